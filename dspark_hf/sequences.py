"""The text of a batch while it grows: tokens, the length of each row, and the rules that end a row.

Rows may stand at different lengths. Columns beyond a row's length hold draft tokens or nothing of meaning until
[`Sequences.result`] fills them with padding.
"""

import sys
from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from dspark_hf.transfer import upload


BUCKET = 256


class StopRules:
    r"""
    The stopping criteria of one `generate()` call.

    Args:
        criteria (`StoppingCriteriaList`): As the host prepared them.
        device (`torch.device`): Device of the tokens.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device):
        self.criteria = criteria
        self.max_length: int = min(
            (c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=sys.maxsize
        )
        ends = [c.eos_token_id.to(device).flatten() for c in criteria if type(c) is EosTokenCriteria]
        self.eos_token_ids = torch.cat(ends) if ends else torch.zeros(0, dtype=torch.long, device=device)
        self.stop_strings = [c for c in criteria if type(c) is StopStringCriteria]
        # As the host decides whether rows that are done go on as padding.
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.treats_rows_alone = all(
            type(c) in (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria) for c in criteria
        ) and (self.pads_finished_rows or not self.stop_strings)


class Sequences:
    r"""
    Args:
        input_ids (`torch.LongTensor` of shape `(R, P)`): The prompt, left-padded; P may be 0.
        stop ([`StopRules`]): When rows end.
        pad_token_id (`torch.Tensor`, *optional*): Fills rows that end before others.
    """

    def __init__(self, input_ids: torch.Tensor, stop: StopRules, pad_token_id: torch.Tensor | None):
        self.tokens = input_ids.long()
        self.stop = stop
        self.pad_token_id = 0 if pad_token_id is None else int(pad_token_id)  # host sync, once a call
        self.prompt_length = input_ids.shape[1]
        self.lengths = [self.prompt_length] * input_ids.shape[0]
        self.finished = [False] * input_ids.shape[0]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def all_finished(self) -> bool:
        return all(self.finished)

    @property
    def generated(self) -> list[int]:
        """Tokens that each row has beyond the prompt."""
        return [length - self.prompt_length for length in self.lengths]

    @property
    def progress(self) -> int:
        """Rounds of plain decoding, where all rows advance alike, that it takes to come this far: the batch is as far as its
        shortest unfinished row, since a call lasts until the last one ends."""
        unfinished = [count for count, ended in zip(self.generated, self.finished, strict=True) if not ended]
        return min(unfinished) if unfinished else max(self.generated)

    def tokens_left(self, row: int) -> int:
        """Tokens that a row may still get, padding left out."""
        padding = self.finished[row] and self.stop.pads_finished_rows
        return 0 if padding else self.stop.max_length - self.lengths[row]

    def last_tokens(self) -> torch.Tensor:
        """The last token of each row, `(R,)`: the anchors."""
        last = upload(self.lengths, self.tokens.device) - 1
        return self.tokens.gather(1, last[:, None]).squeeze(1)

    def write_ahead(self, tokens: torch.Tensor) -> None:
        """Write `(R, N)` tokens after each row's text, without making them part of it."""
        self._reserve(max(self.lengths) + tokens.shape[1])
        columns = upload(self.lengths, tokens.device)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.tokens.scatter_(1, columns, tokens)

    def advance(self, counts: Sequence[int], stopped: Sequence[bool]) -> None:
        """Make the first `counts[r]` tokens that were written ahead part of row r, and mark the rows that end."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        at_limit = [length >= self.stop.max_length for length in self.lengths]
        self.finished = [f or s or m for f, s, m in zip(self.finished, stopped, at_limit, strict=True)]

    def result(self) -> torch.Tensor:
        """All rows, `(R, longest)`, the shorter ones padded at the end."""
        longest = max(self.lengths)
        device = self.tokens.device
        beyond = torch.arange(longest, device=device) >= upload(self.lengths, device)[:, None]
        return self.tokens[:, :longest].masked_fill(beyond, self.pad_token_id)

    def _reserve(self, columns: int) -> None:
        missing = columns - self.tokens.shape[1]
        if missing > 0:
            size = -(-missing // BUCKET) * BUCKET
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(self.tokens.shape[0], size)], dim=1)
