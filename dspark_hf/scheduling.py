"""Policies: how many draft tokens of each row to verify (section 3.2).

A policy may look at the confidences of a round, which are known before the tokens they speak of are drawn, and at
earlier rounds. Whether token k is verified never depends on token k itself: that is what keeps sampling lossless.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from dspark_hf.verification_cost import VerificationCost, VerificationPath


@dataclass(frozen=True, slots=True)
class Candidates:
    r"""
    What a policy chooses from in a round.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`, *optional*): Calibrated `c_k`, conditional on the prefix;
            `None` when the drafter has no confidence head.
        caps (`torch.LongTensor` of shape `(R,)`): Largest length allowed for each row, at most K; 0 for finished rows.
        active (`torch.BoolTensor` of shape `(R,)`): False for finished rows.
        cost ([`VerificationCost`], *optional*): What the verifier takes; `None` where no policy asks for it.
    """

    confidence: torch.Tensor | None
    caps: torch.Tensor
    active: torch.Tensor
    cost: VerificationCost | None = None

    @property
    def survival(self) -> torch.Tensor:
        """Probability that each prefix is accepted, `(R, K)`."""
        if self.confidence is None:
            raise ValueError("This policy needs confidences, and this drafter has no confidence head.")
        return self.confidence.cumprod(dim=1)

    def path(self, survival: torch.Tensor) -> VerificationPath:
        """The verifier's path for some survivals `(R, K)` of these rows."""
        if self.cost is None:
            raise ValueError("This policy needs the verifier's cost.")
        positions = torch.arange(1, survival.shape[1] + 1, device=survival.device)
        allowed = (positions <= self.caps.to(survival.device)[:, None]) & self.active.to(survival.device)[:, None]
        return self.cost.path(survival, allowed)


class Policy(Protocol):
    """Chooses verification lengths, once a round; made anew for every call, since it may remember rounds."""

    needs_confidence: ClassVar[bool]
    needs_cost: ClassVar[bool]

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        """Return the lengths, `torch.LongTensor` of shape `(R,)` in `[0, caps]`."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantPolicy:
    """Verify as many draft tokens as allowed."""

    needs_confidence: ClassVar[bool] = False
    needs_cost: ClassVar[bool] = False

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        return candidates.caps


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """Verify up to the first token whose confidence is below `threshold`: length = (smallest k with c_k < threshold) - 1."""

    threshold: float
    needs_confidence: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = False

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        confidence = candidates.confidence
        if confidence is None:
            raise ValueError("The threshold policy needs confidences, and this drafter has no confidence head.")
        confident = (confidence >= self.threshold).cumprod(dim=1).sum(dim=1)
        return torch.minimum(confident, candidates.caps.to(confident.device))


@dataclass(frozen=True, slots=True)
class ThroughputPolicy:
    """Algorithm 1: go along the verifier's path as long as every step raises the expected throughput Θ.

    Stopping early is what makes it lossless when sampling: whether a token is admitted depends on what was admitted
    before it alone.
    """

    needs_confidence: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = True

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        path = candidates.path(candidates.survival)
        throughput = path.throughput(candidates.active.sum())
        return path.lengths((throughput[1:] > throughput[:-1]).long().cumprod(dim=0).sum())


@dataclass(frozen=True, slots=True)
class GlobalThroughputPolicy:
    """The choice of largest Θ on the whole path. It looks at every confidence, so it is lossless in greedy decoding only,
    where every choice gives the same text."""

    needs_confidence: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = True

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        path = candidates.path(candidates.survival)
        return path.lengths(path.throughput(candidates.active.sum()).argmax())


class AsyncThroughputPolicy:
    """The deployed form (section 5.2): as many steps as were best two rounds before, along the current path.

    The number of steps depends on earlier rounds alone, and the path ranks by live survivals, so it is exact when
    sampling. The first two rounds verify all that is allowed.
    """

    needs_confidence: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = True

    def __init__(self) -> None:
        self._survivals: deque[torch.Tensor] = deque(maxlen=2)

    def verification_lengths(self, candidates: Candidates) -> torch.Tensor:
        survival = candidates.survival
        before = self._survivals[0] if len(self._survivals) == 2 else None
        self._survivals.append(survival)
        if before is None or before.shape[1] < survival.shape[1]:
            return candidates.caps
        past = candidates.path(before[:, : survival.shape[1]])
        return candidates.path(survival).lengths(past.throughput(candidates.active.sum()).argmax())


THROUGHPUT_POLICIES: dict[str, Callable[[], Policy]] = {
    "throughput": ThroughputPolicy,
    "throughput_async": AsyncThroughputPolicy,
}
SCHEDULES = ("constant", "threshold", *THROUGHPUT_POLICIES)
"""Values of `num_assistant_tokens_schedule`."""


def make_policy(schedule: str, threshold: float | None, has_confidence: bool, greedy: bool) -> Policy:
    r"""
    Build the policy that a drafter's options name.

    Args:
        schedule (`str`): `num_assistant_tokens_schedule`: `"constant"`, `"threshold"`, `"throughput"` or
            `"throughput_async"`.
        threshold (`float`, *optional*): `assistant_confidence_threshold`; `None` means off.
        has_confidence (`bool`): Whether the drafter has a confidence head.
        greedy (`bool`): Whether every choice gives the same text, so that the best one may be taken.

    Raises:
        ValueError: If the schedule is unknown, or the threshold is missing, out of range, without a confidence head or given to
            another schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"Unknown num_assistant_tokens_schedule {schedule!r}; a DSpark drafter knows {', '.join(map(repr, SCHEDULES))}."
        )
    if schedule == "threshold" and threshold is None:
        raise ValueError(
            "num_assistant_tokens_schedule='threshold' needs assistant_confidence_threshold in [0, 1], got None."
        )
    if threshold is not None and schedule != "threshold":
        raise ValueError(
            f"assistant_confidence_threshold={threshold} has a meaning only with "
            f"num_assistant_tokens_schedule='threshold', got {schedule!r}. Set the schedule, or the threshold to None."
        )
    if threshold is not None and not 0.0 <= threshold <= 1.0:
        raise ValueError(f"assistant_confidence_threshold must lie in [0, 1], got {threshold}.")
    if schedule != "constant" and not has_confidence:
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} needs a drafter with a confidence head; this one was made with "
            "enable_confidence_head=False. Use 'constant'."
        )
    if threshold is not None:
        return ThresholdPolicy(threshold)
    if schedule == "constant":
        return ConstantPolicy()
    return GlobalThroughputPolicy() if greedy else THROUGHPUT_POLICIES[schedule]()
