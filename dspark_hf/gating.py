"""Whether to draft at all: on text that the drafter cannot predict, plain decoding is faster.

Kept is an account, in rounds of plain decoding. A drafting round pays in how many plain rounds would have brought the batch
as far, its shortest unfinished row that is, and takes out how long it lasted; every plain round pays in a little. In the
red, rows decode plainly until the account is balanced, while taps go on being recorded, and then the next round tries
again. So drafting that loses costs the opening balance once and `SHARE` of the time from then on, however much a single
try loses. This is the future work that the paper names in its conclusion.

Decided from past rounds only, for the whole batch, since the drafting pass is saved only when no row needs it. A greedy
call goes on with the account of the last greedy call of as many rows and draft tokens: opening one anew costs short texts
more than they can win back. Calls that sample start with a new one, since the same seed must give the same tokens again.
"""

import weakref
from typing import Any


OPENING_BALANCE = 2.0
"""Plain rounds that a new account may lose before it has to wait."""
LARGEST_BALANCE = 20.0
"""Plain rounds that are kept of what drafting saved: so much may text that becomes hard to predict cost. A run of bad luck
uses it up too, and a drafter that pays little is closed by that, hence several times what one round can lose."""
SHARE = 0.01
"""Part of each plain round that may be lost in finding out whether drafting pays by now."""


class DraftGate:
    """Closes when drafting rounds lose more than they saved before."""

    def __init__(self, balance: float = OPENING_BALANCE) -> None:
        self.balance = balance

    @property
    def is_open(self) -> bool:
        """Whether the next round drafts."""
        return self.balance >= 0

    def observe_draft(self, gained: float, cost: float) -> None:
        r"""
        Learn from a round that drafted.

        Args:
            gained (`float`): Plain rounds that would have brought the batch as far.
            cost (`float`): Plain rounds that draft and verification took as long as.
        """
        self._pay_in(gained - cost)

    def observe_plain(self) -> None:
        """Count a plain round."""
        self._pay_in(SHARE)

    def _pay_in(self, rounds: float) -> None:
        self.balance = min(self.balance + rounds, LARGEST_BALANCE)


_last_gates: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[tuple[int, int], DraftGate]]] = (
    weakref.WeakKeyDictionary()
)


def next_gate(drafter: Any, target: Any, rows: int, most: int) -> DraftGate:
    r"""
    The gate for a call that goes on where the last one with the same models, rows and cap is now.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): The target.
        rows (`int`): Rows of the batch.
        most (`int`): Most draft tokens of a row in a round.

    Returns:
        [`DraftGate`]: The call's own, also beside calls of other threads.
    """
    gates = _last_gates.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    last = gates.get((rows, most))
    gates[rows, most] = DraftGate() if last is None else DraftGate(last.balance)
    return gates[rows, most]
