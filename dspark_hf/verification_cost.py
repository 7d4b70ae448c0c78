"""What verifying costs, and the order in which tokens are worth it (section 3.2.2).

A verifier's cost decides which choices of lengths matter. They form a path that starts with the anchors alone and grows
step by step; step i is worth `gains[i - 1]` expected tokens, and the choice it leads to takes `seconds[i]`:

    padded       every row gets the width of the longest, so filling the others up to it is free: step k admits
                 position k of every row, and the choice costs a forward of R x (1 + k) tokens
    flattened    a forward costs by its number of tokens: step i admits the next candidate in descending survival

The best choice for a cost of its kind lies on its path. Non-anticipation: the step at which a token is admitted depends
on survivals of tokens that are admitted no later, never on the token itself.

Shape letters: R rows, K positions (position k is index k - 1), n steps.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class VerificationPath:
    r"""
    Choices of verification lengths, each contained in the next.

    Args:
        step (`torch.LongTensor` of shape `(R, K)`): Step that admits each token, from 1; larger than n for those that
            may not be verified.
        gains (`torch.DoubleTensor` of shape `(n,)`): Expected tokens that each step adds.
        seconds (`torch.DoubleTensor` of shape `(n + 1,)`): Seconds of the round after 0, 1, ..., n steps; infinite for
            steps that admit nothing.
    """

    step: torch.Tensor
    gains: torch.Tensor
    seconds: torch.Tensor

    def throughput(self, anchors: torch.Tensor) -> torch.Tensor:
        """Θ in tokens a second after 0, 1, ..., n steps, float64 `(n + 1,)`; `anchors` is the number of active rows."""
        tokens = anchors + torch.cat([self.gains.new_zeros(1), self.gains.cumsum(dim=0)])
        return tokens / self.seconds

    def lengths(self, steps: torch.Tensor) -> torch.Tensor:
        """Verification lengths `(R,)` after a number of steps."""
        return (self.step <= steps).sum(dim=1)


class VerificationCost(Protocol):
    """Seconds of a round, by the tokens in its target forward. What takes the same whatever is chosen may be part of them."""

    def path(self, survival: torch.Tensor, allowed: torch.Tensor) -> VerificationPath:
        r"""
        Args:
            survival (`torch.FloatTensor` of shape `(R, K)`): Calibrated `a_k`, not increasing along a row.
            allowed (`torch.BoolTensor` of shape `(R, K)`): False beyond a row's cap.

        Returns:
            [`VerificationPath`]
        """
        ...


@dataclass(frozen=True, slots=True)
class PaddedCost:
    r"""
    Cost of a batch whose rows all get the width of the longest.

    Args:
        seconds (`torch.DoubleTensor` of shape `(>= 1 + K,)`): Entry w - 1 is a round with w tokens of every row.
    """

    seconds: torch.Tensor

    def path(self, survival: torch.Tensor, allowed: torch.Tensor) -> VerificationPath:
        positions = survival.shape[1]
        step = torch.arange(1, positions + 1, device=survival.device).expand_as(survival)
        admits = (allowed & (survival > 0)).any(dim=0)
        seconds = self.seconds[: positions + 1].clone()
        seconds[1:].masked_fill_(~admits, torch.inf)
        gains = (survival * allowed).sum(dim=0, dtype=torch.double)
        return VerificationPath(step.masked_fill(~allowed, positions + 1), gains, seconds)


@dataclass(frozen=True, slots=True)
class FlattenedCost:
    r"""
    Cost of a batch without padding.

    Args:
        seconds (`torch.DoubleTensor` of shape `(>= R * (1 + K),)`): Entry B - 1 is a round with a forward of B tokens.
    """

    seconds: torch.Tensor

    def path(self, survival: torch.Tensor, allowed: torch.Tensor) -> VerificationPath:
        rows, positions = survival.shape
        # Position-major, so that the stable sort breaks ties by position: a prefix comes before what follows it.
        candidates = survival.masked_fill(~allowed, 0.0).T.flatten()
        ranked = candidates.sort(descending=True, stable=True)
        order = torch.empty_like(ranked.indices)
        order[ranked.indices] = torch.arange(1, len(order) + 1, device=order.device)
        admits = ranked.values > 0
        seconds = self.seconds[rows - 1 : rows * (1 + positions)].clone()
        seconds[1:].masked_fill_(~admits, torch.inf)
        possible = allowed & (survival > 0)
        step = order.view(positions, rows).T.masked_fill(~possible, len(order) + 1)
        return VerificationPath(step, ranked.values.double(), seconds)
