"""Decoding through `generate()` against numbers of the reference implementation (see `golden/README.md`).

What happens inside is recorded: taps, hidden states, logits, drafts and confidences of every round.
"""

from dataclasses import dataclass

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.taps import TapRecorder


CASES = ["deepspec-qwen3-vanilla", "deepspec-qwen3-rnn", "deepspec-gemma4-vanilla"]
PROMPT = 13
BATCH = (13, 9, 5)
TOLERANCE = 1e-4  # absolute, float32; see golden/README.md
PATHS = {"block": {}, "step": {"output_scores": True}}
"""What makes `generate()` commit a whole block at once, and token by token."""


@dataclass
class RecordedRound:
    """What one drafting pass saw and gave; the fields have the names of the golden files."""

    start: torch.Tensor  # (R,), positions of the anchors
    anchor: torch.Tensor
    block_hidden_states: torch.Tensor
    base_logits: torch.Tensor
    draft_logits: torch.Tensor
    draft_tokens: torch.Tensor
    confidence_logits: torch.Tensor


@dataclass
class Run:
    """One recorded `generate()` call."""

    output: object
    rounds: list[RecordedRound]
    taps: list[torch.Tensor]

    def committed(self, row: int = 0) -> list[int]:
        return [record.committed for record in self.output.statistics.records if record.row == row]


class Golden:
    """A case: target, drafter and the recorded tensors."""

    def __init__(self, name: str):
        self.target = AutoModelForCausalLM.from_pretrained(GOLDEN / name / "target")
        self.drafter = DSparkDraftModel.from_pretrained(GOLDEN / name / "drafter")
        self.tensors = load_file(GOLDEN / name / "golden.safetensors")
        self.prompt = self.tensors["input_ids"]
        # The reference caps no draft, so that its last rounds go beyond the 40 tokens that it was asked for.
        new_tokens = 40 + self.drafter.config.block_size + 1
        self.options = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}

        self.runs: dict[tuple, Run] = {}

    def generate(self, *lengths: int, **kwargs) -> Run:
        """Decode the last tokens of the prompt, `lengths` of them in each row; every call is made and recorded once."""
        key = (lengths, *kwargs.items())
        if key not in self.runs:
            rounds: list[RecordedRound] = []
            taps: list[torch.Tensor] = []
            with pytest.MonkeyPatch.context() as patch:
                _record(patch, rounds, taps)
                output = self.target.generate(
                    **self.inputs(*lengths),
                    assistant_model=self.drafter,
                    return_dict_in_generate=True,
                    **self.options,
                    **kwargs,
                )
            self.runs[key] = Run(output, rounds, taps)
        return self.runs[key]

    def inputs(self, *lengths: int) -> dict[str, torch.Tensor]:
        """The last tokens of the prompt as a left-padded batch."""
        columns = max(lengths)
        input_ids = torch.zeros(len(lengths), columns, dtype=torch.long)
        mask = torch.zeros(len(lengths), columns, dtype=torch.long)
        for row, length in enumerate(lengths):
            input_ids[row, columns - length :] = self.prompt[0, -length:]
            mask[row, columns - length :] = 1
        return {"input_ids": input_ids, "attention_mask": mask}


def _record(patch: pytest.MonkeyPatch, rounds: list[RecordedRound], taps: list[torch.Tensor]) -> None:
    take, draft = TapRecorder.take, DSparkDraftModel.draft
    forward, base_logits = DSparkDraftModel.forward, DSparkDraftModel.base_logits
    seen = {}

    def recording_take(self):
        taps.append(take(self))
        return taps[-1]

    def recording_forward(self, inputs_embeds, context, position_ids, *args):
        seen["start"] = position_ids[:, 0]
        return forward(self, inputs_embeds, context, position_ids, *args)

    def recording_base_logits(self, *args):
        seen["base_logits"] = base_logits(self, *args)
        return seen["base_logits"]

    def recording_draft(self, hidden_states, anchor, choose, *args):
        draft_logits = []

        def recording_choose(index, logits, drafted):
            draft_logits.append(logits)
            return choose(index, logits, drafted)

        result = draft(self, hidden_states, anchor, recording_choose, *args)
        rounds.append(
            RecordedRound(
                start=seen["start"],
                anchor=anchor,
                block_hidden_states=hidden_states,
                base_logits=seen["base_logits"],
                draft_logits=torch.stack(draft_logits, dim=1),
                draft_tokens=result.tokens,
                confidence_logits=result.confidence_logits,
            )
        )
        return result

    patch.setattr(TapRecorder, "take", recording_take)
    patch.setattr(DSparkDraftModel, "forward", recording_forward)
    patch.setattr(DSparkDraftModel, "base_logits", recording_base_logits)
    patch.setattr(DSparkDraftModel, "draft", recording_draft)


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    return Golden(request.param)


@pytest.fixture(params=PATHS)
def path(request):
    return PATHS[request.param]


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_rounds_and_tokens_are_those_of_the_reference(golden, path):
    run = golden.generate(PROMPT, **path)
    lengths = golden.tensors["acceptance_lengths"].tolist()
    assert run.committed()[: len(lengths)] == lengths
    expected = golden.tensors["output_ids"]
    assert torch.equal(run.output.sequences[:, : expected.shape[1]], expected)
    plain = golden.target.generate(**golden.inputs(PROMPT), **golden.options)
    assert torch.equal(run.output.sequences, plain)


def test_every_recorded_round_agrees_with_the_reference_in_all_numbers(golden, path):
    run = golden.generate(PROMPT, **path)
    lengths = golden.tensors["acceptance_lengths"].tolist()
    cycles = int(golden.tensors["num_cycles_recorded"])
    assert cycles >= 6
    for n in range(cycles):
        expected = {
            name.removeprefix(f"cycle{n}."): tensor
            for name, tensor in golden.tensors.items()
            if name.startswith(f"cycle{n}.")
        }
        committed = PROMPT if n == 0 else lengths[n - 1]
        _close(run.taps[n][:, :committed], expected.pop("context_hidden_states"))
        for name in ("start", "anchor", "draft_tokens"):
            assert torch.equal(getattr(run.rounds[n], name), expected.pop(name)), name
        for name in ("block_hidden_states", "base_logits", "draft_logits", "confidence_logits"):
            _close(getattr(run.rounds[n], name), expected.pop(name))
        assert not expected


def test_rows_of_a_padded_batch_give_the_tokens_of_their_own_runs(golden, path):
    batch = golden.generate(*BATCH, **path)
    for row, length in enumerate(BATCH):
        alone = golden.generate(length, **path)
        assert torch.equal(batch.output.sequences[row, PROMPT:], alone.output.sequences[0, length:])
    plain = golden.target.generate(**golden.inputs(*BATCH), **golden.options)
    assert torch.equal(batch.output.sequences, plain)


def test_rows_of_a_padded_batch_draft_as_in_their_own_runs_round_by_round(golden):
    batch = golden.generate(*BATCH)
    for row, length in enumerate(BATCH):
        alone = golden.generate(length)
        assert batch.committed(row) == alone.committed()
        assert len(alone.rounds) >= len(golden.tensors["acceptance_lengths"])
        for together, own in zip(batch.rounds, alone.rounds, strict=False):
            _same_draft(together, row, own)


def test_a_batch_in_lockstep_drafts_as_single_rows_do_at_the_same_anchors(golden):
    batch = golden.generate(*BATCH, output_scores=True)
    for row, length in enumerate(BATCH):
        alone = golden.generate(length)
        by_start = {int(own.start): own for own in alone.rounds}
        shared = [together for together in batch.rounds if int(together.start[row]) in by_start]
        assert shared
        for together in shared:
            _same_draft(together, row, by_start[int(together.start[row])])


def _same_draft(together: RecordedRound, row: int, own: RecordedRound) -> None:
    """Compare one row of a batch with the same row alone; near the end either may draw fewer tokens."""
    drawn = min(own.draft_tokens.shape[1], together.draft_tokens.shape[1])
    for name in ("start", "anchor"):
        assert torch.equal(getattr(together, name)[row], getattr(own, name)[0]), name
    assert torch.equal(together.draft_tokens[row, :drawn], own.draft_tokens[0, :drawn])
    _close(together.block_hidden_states[row], own.block_hidden_states[0])
    for name in ("base_logits", "draft_logits", "confidence_logits"):
        _close(getattr(together, name)[row, :drawn], getattr(own, name)[0, :drawn])


def test_a_cap_changes_nothing_in_the_tokens_that_are_still_drawn(golden):
    whole = golden.generate(PROMPT).rounds[0]
    capped = golden.generate(PROMPT, num_assistant_tokens=2).rounds[0]
    assert capped.draft_tokens.shape == (1, 2)
    _same_draft(capped, 0, whole)
