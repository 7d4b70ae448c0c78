"""The end of a round: which tokens become text.

[`BlockCommitter`] takes all positions of all rows at once, each row as far as it goes. [`StepCommitter`] takes one token
of every row after another and calls the user's processors, criteria and streamer exactly as plain generation would; it
stops where the first row needs the target again, so all rows keep one length. Both apply the same acceptance rule.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from dspark_hf.acceptance import accept
from dspark_hf.metrics import RoundRecord
from dspark_hf.modeling.modeling_dspark import DSparkDraft
from dspark_hf.outputs import OutputRecorder
from dspark_hf.processors import Processors
from dspark_hf.sampling import Sampler
from dspark_hf.sequences import Sequences
from dspark_hf.transfer import upload
from dspark_hf.verification import Verification


class Committer(Protocol):
    """Commits tokens from one forward of the target."""

    def __call__(self, draft: DSparkDraft, lengths: list[int], verification: Verification) -> list[RoundRecord]:
        r"""
        Args:
            draft ([`DSparkDraft`]): K draft tokens for each row, K >= 0.
            lengths (`list[int]`): Verification length of each row, each in `[0, K]`.
            verification ([`Verification`]): Logits after the anchor and after each draft token, `(R, K + 1, V)`.

        Returns:
            `list[RoundRecord]`: One entry for each row that was unfinished.
        """
        ...


@dataclass
class BlockCommitter:
    """All positions of all rows in one vectorised pass; with stateless processors, and no stopping criteria but length, end
    of text and stop strings."""

    sequences: Sequences
    processors: Processors
    sampler: Sampler
    streamer: BaseStreamer | None = None

    def __call__(self, draft: DSparkDraft, lengths: list[int], verification: Verification) -> list[RoundRecord]:
        sequences, positions = self.sequences, draft.tokens.shape[1]
        device = draft.tokens.device
        sequences.write_ahead(draft.tokens)  # processors read the draft tokens as history
        probs = self.sampler.distribution(self._process(verification.logits))
        accepted = accept(draft.tokens, draft.probs, probs, upload(lengths, device), self.sampler)
        tokens = torch.cat([draft.tokens, draft.tokens.new_zeros(len(sequences), 1)], dim=1)
        tokens.scatter_(1, accepted.num_accepted[:, None], accepted.bonus_token[:, None])
        ends = torch.isin(tokens, sequences.stop.eos_token_ids)
        ends &= torch.arange(positions + 1, device=device) <= accepted.num_accepted[:, None]
        stopped = ends.any(dim=1)
        counts = torch.where(stopped, ends.int().argmax(dim=1), accepted.num_accepted) + 1
        used = probs[torch.arange(len(sequences), device=device), accepted.num_accepted]  # (R, V)
        invalid = ~used.sum(dim=-1).isfinite()
        # Here a round waits for the device.
        known = torch.stack([counts, stopped.long(), accepted.num_accepted, invalid.long()]).tolist()
        _check_probabilities(any(bad and not done for bad, done in zip(known[3], sequences.finished, strict=True)))
        sequences.write_ahead(tokens)  # now with the bonus token in place
        return self._commit(lengths, *known[:3])

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self.processors) == 0:
            return logits
        rows, width, vocab = logits.shape
        row_of = [row for row in range(rows) for _ in range(width)]
        length_of = [self.sequences.lengths[row] + k for row in range(rows) for k in range(width)]
        scores = self.processors(logits.reshape(-1, vocab), self.sequences.tokens, row_of, length_of)
        return scores.view(rows, width, vocab)

    def _commit(
        self, lengths: list[int], counts: list[int], stopped: list[int], num_accepted: list[int]
    ) -> list[RoundRecord]:
        sequences, records = self.sequences, []
        for row, finished in enumerate(sequences.finished):
            if finished:
                counts[row] = 0
                continue
            counts[row], stopped[row] = self._cut_at_stop_string(row, counts[row], stopped[row])
            cut = counts[row] <= num_accepted[row]
            records.append(
                RoundRecord(
                    row=row,
                    verified=counts[row] if cut else lengths[row],
                    accepted=min(num_accepted[row], counts[row]),
                    committed=counts[row],
                )
            )
        first = sequences.lengths[0]
        sequences.advance(counts, [bool(s) for s in stopped])
        if self.streamer is not None:
            for token in sequences.tokens[0, first : first + counts[0]].cpu().split(1):
                self.streamer.put(token)
        return records

    def _cut_at_stop_string(self, row: int, count: int, stopped: int) -> tuple[int, int]:
        sequences = self.sequences
        for taken in range(1, count + 1 if sequences.stop.stop_strings else 1):
            text = sequences.tokens[row : row + 1, : sequences.lengths[row] + taken]
            if any(bool(criterion(text, None)) for criterion in sequences.stop.stop_strings):
                return taken, 1
        return count, stopped


@dataclass
class StepCommitter:
    """Token by token, all rows together: any processor, criterion and streamer, and all optional outputs."""

    sequences: Sequences
    processors: Processors
    sampler: Sampler
    outputs: OutputRecorder
    prompt_columns: int
    streamer: BaseStreamer | None = None

    def __call__(self, draft: DSparkDraft, lengths: list[int], verification: Verification) -> list[RoundRecord]:
        before, taken = list(self.sequences.finished), 0
        accepted = [0] * len(before)
        for k in range(draft.tokens.shape[1] + 1):
            goes_on = self._step(k, draft, lengths, verification)
            taken += 1
            accepted = [total + int(passed) for total, passed in zip(accepted, goes_on, strict=True)]
            newly_finished = self.sequences.finished != before and self.sequences.stop.pads_finished_rows
            if self.sequences.all_finished or newly_finished or not all(goes_on):
                break
        return [
            RoundRecord(row=row, verified=min(lengths[row], taken), accepted=accepted[row], committed=taken)
            for row, finished in enumerate(before)
            if not finished
        ]

    def _step(self, k: int, draft: DSparkDraft, lengths: list[int], verification: Verification) -> list[bool]:
        """Commit one token of every row; k counts from 0.

        Return for each row whether it took draft token k + 1: only then do the logits after it speak of the row's text.
        """
        sequences, sampler = self.sequences, self.sampler
        length = sequences.lengths[0]
        logits = verification.logits[:, k].clone()  # processors may write in place
        scores = self.processors.processors(sequences.tokens[:, :length].contiguous(), logits)
        index = None if length == sequences.prompt_length else k  # prefill: keep all of the prompt's columns
        used = self.prompt_columns + length - sequences.prompt_length
        self.outputs.add(scores, logits, verification.outputs, index, used)
        probs = sampler.distribution(scores)
        _check_probabilities(not bool(probs.sum().isfinite()))
        offered = draft.tokens[:, k : k + 1]
        # What follows the offered token is not known yet, nor needed to judge it.
        beyond = probs.new_zeros(len(sequences), offered.shape[1], probs.shape[-1])
        has_draft = upload([own > k for own in lengths], probs.device).long()
        result = accept(
            offered, draft.probs[:, k : k + 1], torch.cat([probs[:, None], beyond], dim=1), has_draft, sampler
        )
        passed = result.num_accepted.bool()
        token = torch.where(passed, offered.squeeze(1), result.bonus_token) if offered.shape[1] else result.bonus_token
        goes_on = passed.tolist()  # waits for the device at each token: the user's code decides what comes next
        if sequences.stop.pads_finished_rows:
            done = upload(sequences.finished, token.device)
            token = token.masked_fill(done, sequences.pad_token_id)
            goes_on = [own or finished for own, finished in zip(goes_on, sequences.finished, strict=True)]
        self._append(token)
        return goes_on

    def _append(self, token: torch.Tensor) -> None:
        sequences = self.sequences
        sequences.write_ahead(token[:, None])
        sequences.advance([1] * len(sequences), [False] * len(sequences))
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        text = sequences.tokens[:, : sequences.lengths[0]].contiguous()
        stopped = sequences.stop.criteria(text, self.outputs.scores)
        sequences.advance([0] * len(sequences), stopped.tolist())


def _check_probabilities(invalid: bool) -> None:
    if invalid:
        raise RuntimeError(
            "The target's processed scores give no valid distribution (NaN, infinite, or every token masked). Look at the "
            "logits processors, or pass remove_invalid_values=True."
        )
