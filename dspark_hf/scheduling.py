"""Policies: how many draft tokens of each row to verify (section 3.2).

A policy may look at the confidences of a round, which are known before the tokens they speak of are drawn, and at
earlier rounds. Whether token k is verified never depends on token k itself: that is what keeps sampling lossless.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class Policy(Protocol):
    """Chooses verification lengths, once a round."""

    def verification_lengths(self, confidence: torch.Tensor | None, caps: torch.Tensor) -> torch.Tensor:
        r"""
        Args:
            confidence (`torch.FloatTensor` of shape `(R, K)`, *optional*): Calibrated `c_k`, conditional on the prefix;
                `None` when the drafter has no confidence head.
            caps (`torch.LongTensor` of shape `(R,)`): Largest length allowed for each row, at most K.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Lengths in `[0, caps]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConstantPolicy:
    """Verify as many draft tokens as allowed."""

    def verification_lengths(self, confidence: torch.Tensor | None, caps: torch.Tensor) -> torch.Tensor:
        return caps


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """Verify up to the first token whose confidence is below `threshold`: length = (smallest k with c_k < threshold) - 1."""

    threshold: float

    def verification_lengths(self, confidence: torch.Tensor | None, caps: torch.Tensor) -> torch.Tensor:
        if confidence is None:
            raise ValueError("The threshold policy needs confidences, and this drafter has no confidence head.")
        confident = (confidence >= self.threshold).cumprod(dim=1).sum(dim=1)
        return torch.minimum(confident, caps.to(confident.device))


def make_policy(schedule: str, threshold: float | None, has_confidence: bool) -> Policy:
    r"""
    Build the policy that a drafter's options name.

    Args:
        schedule (`str`): `num_assistant_tokens_schedule`, `"constant"` or `"threshold"`.
        threshold (`float`, *optional*): `assistant_confidence_threshold`; `None` means off.
        has_confidence (`bool`): Whether the drafter has a confidence head.

    Raises:
        ValueError: If the schedule is unknown, or the threshold is missing, out of range, without a confidence head or given to
            another schedule.
    """
    if schedule not in ("constant", "threshold"):
        raise ValueError(
            f"Unknown num_assistant_tokens_schedule {schedule!r}; a DSpark drafter knows 'constant' and 'threshold'."
        )
    if schedule == "threshold" and threshold is None:
        raise ValueError(
            "num_assistant_tokens_schedule='threshold' needs assistant_confidence_threshold in [0, 1], got None."
        )
    if threshold is None:
        return ConstantPolicy()
    if schedule != "threshold":
        raise ValueError(
            f"assistant_confidence_threshold={threshold} has a meaning only with "
            f"num_assistant_tokens_schedule='threshold', got {schedule!r}. Set the schedule, or the threshold to None."
        )
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"assistant_confidence_threshold must lie in [0, 1], got {threshold}.")
    if not has_confidence:
        raise ValueError(
            "num_assistant_tokens_schedule='threshold' needs a drafter with a confidence head; this one was made with "
            "enable_confidence_head=False. Use 'constant'."
        )
    return ThresholdPolicy(threshold)
