"""Responses written many at once: rows that end make room for the next prompts.

Up to kernel rounding a row's text does not depend on the rows beside it: a greedy response is what `target.generate` gives
for the prompt alone, a sampled one is drawn with random numbers of its own.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import TopPLogitsWarper

from dspark_hf.caches import SlotCache
from dspark_hf.host import TargetModel, cache_argument
from dspark_hf.training.prompts import Prompt, Settings
from dspark_hf.transfer import upload
from dspark_hf.verification import Verifier


LOOP_TOKENS, LOOP_PERIOD = 96, 32


class Row:
    """A prompt and what the target has written so far."""

    def __init__(self, prompt: Prompt, settings: Settings):
        self.prompt = prompt
        self.settings = settings
        self.temperature = settings.temperatures[prompt.index % len(settings.temperatures)]
        self.response: list[int] = []
        self.random = random.Random(f"{settings.seed} {prompt.index}")

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        position = len(self.prompt.ids) + len(self.response) - 1
        return (self.response or self.prompt.ids)[-1], position

    @property
    def finish(self) -> str | None:
        """Why the response ends here: `"end"`, `"length"`, `"loop"`, or `None` if it goes on."""
        if self.response[-1] in self.settings.end_ids:
            return "end"
        if len(self.response) == self.settings.max_new_tokens:
            return "length"
        return "loop" if _is_loop(self.response) else None

    def sample(self) -> dict[str, Any]:
        """The line of the file."""
        return {
            "index": self.prompt.index,
            "prompt_ids": self.prompt.ids.tolist(),
            "response_ids": self.response,
            "temperature": self.temperature,
            "top_k": self.settings.top_k,
            "top_p": self.settings.top_p,
            "finish": self.finish,
        }


class Rows:
    r"""
    The rows that the target writes at once, with keys and values in slots: the token at position i is in slot i.

    Args:
        target (`PreTrainedModel`): The target.
        num_rows (`int`): How many.
        settings ([`Settings`]): Settings.
    """

    def __init__(self, target: TargetModel, num_rows: int, settings: Settings):
        self.target = target
        self.settings = settings
        self.rows: list[Row | None] = [None] * num_rows
        self.cache = SlotCache(target.config.get_text_config(decoder=True).num_hidden_layers)
        self.warpers: Any = LogitsProcessorList([TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else [])

    def fill(self, waiting: Iterator[Prompt]) -> bool:
        """Give empty rows to waiting prompts once an eighth of the rows is empty; return whether there is anything to write.

        A forward over several prompts of like length takes little longer than one over a single prompt.
        """
        empty = [place for place, row in enumerate(self.rows) if row is None]
        at_once = -(-len(self.rows) // 8)
        if len(empty) >= at_once:
            prompts = sorted(itertools.islice(waiting, len(empty)), key=lambda prompt: len(prompt.ids))
            for group in _alike(prompts, at_once):
                self._prefill([empty.pop(0) for _ in group], group)
        live = [place for place, row in enumerate(self.rows) if row is not None]
        if 0 < 2 * len(live) <= len(self.rows):  # nobody waits any more: stop computing the empty rows
            self.rows = [self.rows[place] for place in live]
            kept = upload(live, self.target.device)
            for layer in self.cache.layers:
                if layer.keys is not None:
                    layer.keys, layer.values = layer.keys[kept], layer.values[kept]
        return bool(live)

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Write one token of every row; return the rows that end with it, which are empty then."""
        device = self.target.device
        last = [row.last if row is not None else (0, 0) for row in self.rows]
        tokens, slots = upload([token for token, _ in last], device), upload([slot for _, slot in last], device)
        none = torch.ones(len(last), 0, dtype=torch.bool, device=device)
        before_first = torch.full((len(last), 1), -1, device=device)
        verifier = Verifier(self.target, self.cache, none, {"position_ids": before_first})
        used = max(slot for _, slot in last) + 1
        logits = verifier(tokens[:, None], slots[:, None], used, torch.ones_like(slots)).logits[:, 0]  # (R, V)
        chosen = self._choose(logits)
        for row, token in zip(self.rows, chosen, strict=True):
            if row is not None:
                row.response.append(token)
        finished = [row for row in self.rows if row is not None and row.finish is not None]
        self.rows = [None if row in finished else row for row in self.rows]
        return finished

    @torch.no_grad()
    def _prefill(self, places: list[int], prompts: list[Prompt]) -> None:
        """Bring all but the last token of prompts, which the next step reads, into the slots of rows."""
        lengths = [len(prompt.ids) - 1 for prompt in prompts]
        for place, prompt in zip(places, prompts, strict=True):
            self.rows[place] = Row(prompt, self.settings)
        longest = max(lengths)
        self.cache.reserve(longest + self.settings.max_new_tokens)
        if not longest:
            return
        # Padding comes last, where no token of the prompt sees it, and each slot is written again before a mask shows it.
        ids = [prompt.ids[:-1].tolist() + [0] * (longest - n) for prompt, n in zip(prompts, lengths, strict=True)]
        of_rows = upload(places, self.target.device)
        own: Any = DynamicCache()
        self.target(upload(ids, self.target.device), logits_to_keep=1, **{cache_argument(): own})
        # Layers that share keys and values come last, and have none of their own.
        for mine, theirs in zip(self.cache.layers, own.layers, strict=False):
            if mine.keys is None:
                rows = (len(self.rows), -1, -1, -1)
                mine.lazy_initialization(theirs.keys[:1].expand(rows), theirs.values[:1].expand(rows))
            chosen = of_rows.to(theirs.keys.device)
            mine.keys[chosen, :, :longest] = theirs.keys
            mine.values[chosen, :, :longest] = theirs.values

    def _choose(self, logits: torch.Tensor) -> list[int]:
        """The next token of every row: the most likely one, or a draw with the row's own random numbers."""
        chosen = logits.argmax(dim=-1)
        places = [place for place, row in enumerate(self.rows) if row is not None and row.temperature > 0]
        sampled = [row for row in self.rows if row is not None and row.temperature > 0]
        if sampled:
            temperatures = torch.tensor([[row.temperature] for row in sampled], device=logits.device)
            numbers = torch.tensor(
                [[row.random.random()] for row in sampled], dtype=torch.double, device=logits.device
            )
            of_rows = upload(places, logits.device)
            candidates, ids = logits[of_rows], None
            if self.settings.top_k:
                ids = candidates.topk(min(self.settings.top_k, candidates.shape[-1])).indices.sort().values
                candidates = candidates.gather(1, ids)
            drawn = _invert(self.warpers(None, candidates / temperatures).softmax(dim=-1), numbers)  # (R, 1)
            chosen[of_rows] = (drawn if ids is None else ids.gather(1, drawn)).squeeze(1)
        return chosen.tolist()  # the step's host sync


def _alike(prompts: list[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Groups of prompts, given by length, of at most `most` each and none more than twice as long as another."""
    group: list[Prompt] = []
    for prompt in prompts:
        if group and (len(group) == most or len(prompt.ids) > 2 * len(group[0].ids)):
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw from `probs` `(R, V)` with uniform float64 `numbers` `(R, 1)`; near probabilities give near draws.

    Inverting the cumulative sums takes one number a row, and never gives an entry of probability 0.
    """
    sums = probs.cumsum(dim=-1, dtype=torch.double)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)


def _is_loop(ids: list[int]) -> bool:
    """Whether the last 96 tokens repeat with a period of at most 32."""
    tail = ids[-LOOP_TOKENS:]
    return len(tail) == LOOP_TOKENS and any(tail[n:] == tail[:-n] for n in range(1, LOOP_PERIOD + 1))
