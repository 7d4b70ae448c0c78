"""A drafter saved by the `speculators` library, and one of its training forwards (see `golden/README.md`)."""

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.taps import TapRecorder, tapped_layers


CASE = GOLDEN / "speculators-anchor-d2t"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(CASE / "target").eval()


@pytest.fixture(scope="module")
def drafter():
    return DSparkDraftModel.from_pretrained(CASE / "drafter")


@pytest.fixture(scope="module")
def expected():
    return load_file(CASE / "teacher_forced.safetensors")


def close(actual, wanted) -> None:
    torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def taps_of(target, layer_ids, input_ids):
    with TapRecorder(target, layer_ids, target.device, target.dtype) as recorder:
        target(input_ids)
        return recorder.take()


@torch.no_grad()
def teacher_forced(drafter, target, taps, input_ids, anchor):
    """Draft logits `(K, V)` and confidence logits `(K,)` of one block, along the text after its anchor."""
    text = input_ids[:, anchor + 1 : anchor + 1 + drafter.config.block_size]
    shown = []

    def follow_text(index, logits, _drafted):
        shown.append(logits)
        token = text[:, index] if index < text.shape[1] else torch.zeros(1, dtype=torch.long)
        return token, logits

    hidden = drafter(
        drafter.embed(drafter.block_input_ids(input_ids[:, anchor]), target.get_input_embeddings()),
        drafter.project_context(taps[:, :anchor]),
        anchor + torch.arange(drafter.config.num_block_inputs)[None],
        torch.arange(anchor)[None],
    ).last_hidden_state
    lent = None if drafter.config.has_lm_head else target.lm_head
    draft = drafter.draft(hidden, input_ids[:, anchor], follow_text, lm_head=lent)
    return torch.cat(shown), draft.confidence_logits[0]


def test_the_librarys_layer_ids_are_shifted_by_one(drafter, target, expected):
    assert drafter.config.target_layer_ids == [0, 2, 4]
    taps = taps_of(target, tapped_layers(drafter.config, target), expected["input_ids"])
    close(taps, expected["context_hidden_states"])
    unshifted = taps_of(target, [1, 3, 5], expected["input_ids"])
    assert (unshifted - expected["context_hidden_states"]).abs().max() > 0.01


def test_every_supervised_position_of_the_training_forward_agrees(drafter, target, expected):
    input_ids, kept, block = expected["input_ids"], drafter.kept_token_ids, drafter.config.block_size
    taps, compared = expected["context_hidden_states"], 0
    supervised = expected["loss_mask"][0].view(-1, block).bool()
    logits, confidences = (
        expected["draft_logits"][0].view(-1, block, len(kept)),
        expected["confidence_logits"].view(-1, block),
    )
    for number, anchor in enumerate(expected["anchor_positions"].tolist()):
        if not expected["anchor_valid"][number]:
            continue
        drawn, confidence = teacher_forced(drafter, target, taps, input_ids, anchor)
        outside = torch.ones(drawn.shape[1], dtype=torch.bool).index_fill(0, kept, False)
        assert drawn[:, outside].isneginf().all()
        here = supervised[number]
        close(drawn[here][:, kept], logits[number, here])
        close(confidence[here], confidences[number, here])
        compared += int(here.sum())
    assert compared >= 20


@pytest.mark.parametrize("prompts", [1, 3])
def test_the_drafter_decodes_what_the_target_alone_writes(drafter, target, expected, prompts):
    input_ids = expected["input_ids"][:, :13].repeat(prompts, 1) + torch.arange(prompts)[:, None]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    mine = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, **options)
    assert torch.equal(mine, plain)
