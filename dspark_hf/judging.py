"""Judging a drafter by its first rounds: what is lossless but slow is said once, with what to do about it.

Two mistakes fit in every shape and only cost speed: a drafter that was trained for another target, and a drafter whose
config names the wrong first slot (docs/checkpoints.md). The second is seen in the base logits: an input slot that was
trained to predict the token after the anchor is right about it often, its neighbour seldom.
"""

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


logger = logging.getLogger(__name__)

ROUNDS = 48
"""Rounds to see before judging, over all calls of a drafter with a target."""
HOPELESS_ACCEPTANCE = 0.05
"""Share of accepted first tokens below which a drafter cannot belong to its target."""
CLEAR_LEAD = 0.25
"""How much oftener, as a share of the rounds, the other slot must be right: six standard deviations where both never are."""


@dataclass(slots=True)
class FirstRounds:
    """What was seen of a drafter with a target: rounds, accepted first tokens, and hits of slots 0 and 1."""

    rounds: int = 0
    accepted: int = 0
    slot_rounds: int = 0
    slot_hits: tuple[int, int] = (0, 0)


_seen: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, FirstRounds]] = weakref.WeakKeyDictionary()


class DrafterJudge:
    r"""
    Watches the first rounds of a drafter with a target, over all calls, and warns once.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): Its target.
    """

    def __init__(self, drafter: DSparkDraftModel, target: TargetModel):
        self.drafter = drafter
        self.first = _seen.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, FirstRounds())
        self._predictions: torch.Tensor | None = None

    @property
    def watches_slots(self) -> bool:
        """Whether [`look`] still wants to see blocks."""
        return self.first.slot_rounds < ROUNDS and self.drafter.config.num_block_inputs > 1

    @property
    def has_looked(self) -> bool:
        """Whether [`observe`] wants to know what came after the anchors of a block."""
        return self._predictions is not None

    def look(self, hidden_states: torch.Tensor, anchor: torch.Tensor, lm_head: nn.Module | None) -> None:
        r"""
        Note what each of the first two slots would propose for the token after the anchor.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(R, I, D)`): From the drafter's parallel stage.
            anchor (`torch.LongTensor` of shape `(R,)`): The anchors.
            lm_head (`nn.Module`, *optional*): Head to use instead of the drafter's own.
        """
        drafter = self.drafter
        logits = drafter.head_logits(hidden_states[:, :2], lm_head).float()
        if drafter.markov_head is not None:
            features = drafter.markov_head.markov_w1(anchor)
            state = torch.zeros_like(features)
            biases = [drafter.markov_head.step(features, hidden_states[:, slot], state)[0] for slot in (0, 1)]
            logits = logits + torch.stack(biases, dim=1)
        best, kept = logits.argmax(dim=-1), drafter.kept_token_ids
        self._predictions = best if kept is None else kept[best]  # (R, 2), target ids

    def observe(self, accepted: list[bool], next_tokens: list[int | None]) -> None:
        r"""
        Take a round's outcome into account.

        Args:
            accepted (`list[bool]`): Whether the first draft token was accepted, for each row that verified one.
            next_tokens (`list[int | None]`): First committed token of every row, `None` where it committed none.
        """
        first = self.first
        if first.rounds < ROUNDS and accepted:
            first.rounds += len(accepted)
            first.accepted += sum(accepted)
            if first.rounds >= ROUNDS:
                self._warn_if_hopeless()
        if self._predictions is None:
            return
        for predicted, token in zip(self._predictions.tolist(), next_tokens, strict=True):
            if token is not None:
                first.slot_rounds += 1
                first.slot_hits = (
                    first.slot_hits[0] + (predicted[0] == token),
                    first.slot_hits[1] + (predicted[1] == token),
                )
        self._predictions = None
        if first.slot_rounds >= ROUNDS:
            self._warn_if_other_slot_wins()

    def _warn_if_hopeless(self) -> None:
        first = self.first
        if first.accepted < HOPELESS_ACCEPTANCE * first.rounds:
            logger.warning(
                "The drafter's first token was accepted in %d of its first %d rounds. The output is right, but slow: the "
                "drafter was probably trained for another target's weights.",
                first.accepted,
                first.rounds,
            )

    def _warn_if_other_slot_wins(self) -> None:
        first, configured = self.first, self.drafter.config.first_prediction_slot
        own, other = first.slot_hits[configured], first.slot_hits[1 - configured]
        if other - own >= CLEAR_LEAD * first.slot_rounds:
            logger.warning(
                "Slot %d of the drafter's block was right about the next token in %d of the first %d rounds, slot %d, which "
                "its config uses, in %d. The output is right, but slow: the config names the wrong slot. Load the drafter with "
                "first_prediction_slot=%d and the block_size that goes with it (docs/checkpoints.md).",
                1 - configured,
                other,
                first.slot_rounds,
                configured,
                own,
                1 - configured,
            )
