"""Whether to draft at all: on text that the drafter cannot predict, plain decoding is faster.

Decided from past rounds only, for the whole batch, since the drafting pass is saved only when no row needs it. While the
gate is closed rows decode plainly and taps go on being recorded; now and then it opens for a few rounds to see whether
the text has become easier. This is the future work that the paper names in its conclusion.

A greedy call goes on with the gate of the last greedy call of as many rows: finding out anew costs short texts more than
they can win back. Calls that sample start with a new one, since the same seed must give the same tokens again.
"""

import statistics
import weakref
from collections import deque
from typing import Any


WINDOW = 16
"""Drafting rounds that are remembered."""
ENOUGH = 6
"""Drafting rounds to see before the gate may close."""
KEPT = 4
"""Of those, how many are remembered after a pause: a new text must be able to open the gate again."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 32
"""Plain rounds before the gate opens again; doubled each time that did not pay."""


class DraftGate:
    """Closes when drafting rounds give fewer tokens a second than plain ones, by more than chance."""

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=WINDOW)
        self._pause = FIRST_PAUSE
        self._closed_for = 0

    @property
    def is_open(self) -> bool:
        """Whether the next round drafts."""
        return self._closed_for == 0

    def observe_draft(self, tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> None:
        r"""
        Learn from a round that drafted.

        Args:
            tokens (`int`): Tokens that it committed.
            seconds (`float`): What draft and verification take.
            plain_tokens (`int`): Tokens that a plain round would have committed: the active rows.
            plain_seconds (`float`): What a plain round takes.
        """
        self._gains.append((tokens / seconds) / (plain_tokens / plain_seconds) - 1)
        if len(self._gains) < ENOUGH:
            return
        error = statistics.stdev(self._gains) / len(self._gains) ** 0.5
        if statistics.fmean(self._gains) + error < 0:
            self._closed_for = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._gains = deque(list(self._gains)[-KEPT:], maxlen=WINDOW)
        elif statistics.fmean(self._gains) > 0:
            self._pause = FIRST_PAUSE

    def observe_plain(self) -> None:
        """Count a plain round."""
        self._closed_for = max(self._closed_for - 1, 0)

    def copy(self) -> "DraftGate":
        """A gate that has seen the same and goes its own way."""
        other = DraftGate()
        other._gains, other._pause, other._closed_for = self._gains.copy(), self._pause, self._closed_for
        return other


_last_gates: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[int, DraftGate]]] = (
    weakref.WeakKeyDictionary()
)


def next_gate(drafter: Any, target: Any, rows: int) -> DraftGate:
    r"""
    The gate for a call that goes on where the last one with the same models and as many rows is now.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): The target.
        rows (`int`): Rows of the batch.

    Returns:
        [`DraftGate`]: The call's own, also beside calls of other threads.
    """
    gates = _last_gates.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    last = gates.get(rows)
    gates[rows] = DraftGate() if last is None else last.copy()
    return gates[rows]
