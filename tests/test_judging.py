"""A config that names the wrong first slot is noticed in the first rounds, and a right one is left in peace."""

import pytest
import torch
from conftest import VOCAB, left_padded, make_drafter, oracle_script, shared_target
from transformers.modeling_outputs import BaseModelOutput

from dspark_hf import DSparkDraftModel
from dspark_hf.judging import ROUNDS, DrafterJudge
from dspark_hf.planning import Planner


class SlotOracle(DSparkDraftModel):
    """Knows the token after the anchor, and says it in slot `speaking` alone; its head passes hidden states through."""

    speaking = 0
    script = None

    def forward(self, inputs_embeds, context, position_ids, context_position_ids, attention_mask=None, cache=None):
        super().forward(inputs_embeds, context, position_ids, context_position_ids, attention_mask, cache)
        rows, slots = position_ids.shape
        says = torch.randint(VOCAB, (rows, slots))
        for row in range(rows):
            says[row, self.speaking] = self.script(row, int(position_ids[row, 0]) + 1)
        return BaseModelOutput(last_hidden_state=torch.nn.functional.one_hot(says, VOCAB).float())


def slot_oracle(configured, speaking, script, block_size=4, **overrides):
    shape = {"hidden_size": VOCAB, "head_dim": 16, "has_embedding": True, "has_lm_head": True, "markov_rank": 0}
    drafter = make_drafter(
        shared_target(),
        enable_confidence_head=False,
        first_prediction_slot=configured,
        block_size=block_size,
        **shape | overrides,
    )
    drafter.__class__ = SlotOracle
    drafter.speaking, drafter.script = speaking, script
    drafter.lm_head.weight.data = torch.eye(VOCAB)
    return drafter


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "names the wrong slot" in record.getMessage()]


@pytest.mark.parametrize("lengths", [[7], [7, 4, 2]])
@pytest.mark.parametrize(("configured", "speaking"), [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_the_other_slot_winning_clearly_is_said_once(configured, speaking, lengths, caplog):
    inputs = left_padded(lengths)
    options = {"max_new_tokens": 2 * ROUNDS, "do_sample": False, "pad_token_id": 0}
    plain = shared_target().generate(**inputs, **options)
    drafter = slot_oracle(configured, speaking, oracle_script(plain, lengths, max(lengths)))
    for _ in range(2):
        assert torch.equal(shared_target().generate(**inputs, assistant_model=drafter, **options), plain)
    said = warnings_of(caplog)
    assert len(said) == (configured != speaking)
    if said:
        assert f"Load the drafter with first_prediction_slot={speaking}" in said[0]


def test_a_drafter_that_knows_nothing_is_not_told_about_slots(caplog):
    inputs = left_padded([5])
    drafter = slot_oracle(0, 3, lambda row, position: 0)
    shared_target().generate(**inputs, assistant_model=drafter, max_new_tokens=2 * ROUNDS, do_sample=False)
    assert not warnings_of(caplog)


def test_rounds_without_a_draft_do_not_wait_for_tokens_that_nobody_compares(monkeypatch):
    shown = []
    monkeypatch.setattr(DrafterJudge, "observe", lambda self, accepted, tokens: shown.append((accepted, tokens)))
    monkeypatch.setattr(Planner, "drafts", False)
    drafter = make_drafter(shared_target())
    shared_target().generate(**left_padded([5]), assistant_model=drafter, max_new_tokens=5, do_sample=False)
    assert shown == [([], [None])] * 4


@pytest.mark.parametrize("overrides", [{"block_size": 1}, {"block_size": 1, "draft_vocab_size": 40}])
def test_a_block_with_one_slot_has_nothing_to_compare(overrides, caplog):
    drafter = make_drafter(shared_target(), **overrides)
    shared_target().generate(**left_padded([5]), assistant_model=drafter, max_new_tokens=ROUNDS + 10, do_sample=False)
    assert not warnings_of(caplog)
