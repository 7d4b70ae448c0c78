"""Calibrated confidences (section 3.2.1): a temperature for each position, applied to the confidence logits.

`c_k = sigmoid(logit_k / T_k)`, and the survival `a_k = c_1 ... c_k` is the probability that the first k draft tokens are
accepted. Sequential temperature scaling chooses `T_1, T_2, ...` in turn, each so that `a_k` is as well calibrated as it can
be, with the temperatures before frozen. A temperature keeps the order of `c_k`; that of `a_k`, from k = 2 on, may change.

Positions k are 1-based in prose and index `k - 1` in tensors.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch


logger = logging.getLogger(__name__)

NUM_BINS = 20
TEMPERATURES = tuple(round(5.0 ** (step / 80), 4) for step in sorted(range(-80, 81), key=abs))
"""The grid: 0.2 to 5 in steps of 2 %, in order of distance from 1, so that 1 wins where all are equally good."""

MIN_OUTCOMES = 100
UNINFORMATIVE_AUC = 0.6


def calibrated_confidence(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    r"""
    Turn confidence logits into confidences, `c_k = sigmoid(logit_k / T_k)`.

    Args:
        logits (`torch.FloatTensor` of shape `(R, K)`): Confidence logits of positions 1 to K.
        temperatures (`torch.FloatTensor` of shape `(>= K,)`, *optional*): Calibration temperatures; `None` means 1.

    Returns:
        `torch.FloatTensor` of shape `(R, K)`: Conditional acceptance probabilities.
    """
    if temperatures is not None:
        logits = logits / temperatures[: logits.shape[1]]
    return logits.sigmoid()


def warn_of_other_setting(fitted: dict[str, Any] | None, do_sample: bool, temperature: float | None) -> None:
    r"""
    Say once if temperatures were fitted for another decoding setting: confidences are off then, the text is not.

    Args:
        fitted (`dict`, *optional*): `confidence_calibration` of a drafter's config.
        do_sample (`bool`): Whether the call samples.
        temperature (`float`, *optional*): At which temperature, `None` for 1.
    """
    if not fitted or "do_sample" not in fitted:
        return
    now, then = _setting(do_sample, temperature), _setting(fitted["do_sample"], fitted.get("temperature"))
    if now != then:
        _warn_of_other_setting(then, now)


def _setting(do_sample: bool, temperature: float | None) -> str:
    return f"sampling at temperature {temperature or 1.0:g}" if do_sample else "greedy decoding"


@functools.cache
def _warn_of_other_setting(then: str, now: str) -> None:
    logger.warning(
        "This drafter's confidences were calibrated for %s, and this call is %s: it may verify too much or too little. "
        "`dspark-hf calibrate` fits them.",
        then,
        now,
    )


@dataclass(frozen=True, slots=True)
class ReliabilityBins:
    r"""
    Predictions in bins of equal width. All tensors are of shape `(bins,)`, and 0 where a bin is empty.

    Args:
        counts (`torch.LongTensor`): How many predictions fell into each bin.
        predicted (`torch.DoubleTensor`): Their sum.
        accepted (`torch.DoubleTensor`): How many of them came true.
    """

    counts: torch.Tensor
    predicted: torch.Tensor
    accepted: torch.Tensor


def reliability_bins(predicted: torch.Tensor, accepted: torch.Tensor, bins: int = NUM_BINS) -> ReliabilityBins:
    r"""
    Sort predictions into bins of equal width; 1 belongs to the last one.

    Args:
        predicted (`torch.Tensor` of shape `(N,)`): Probabilities.
        accepted (`torch.BoolTensor` of shape `(N,)`): What happened.
        bins (`int`): Number of bins.
    """
    predicted = predicted.double()
    index = (predicted * bins).long().clamp(max=bins - 1)
    return ReliabilityBins(
        counts=index.bincount(minlength=bins),
        predicted=index.bincount(predicted, minlength=bins),
        accepted=index.bincount(accepted.double(), minlength=bins),
    )


def expected_calibration_error(predicted: torch.Tensor, accepted: torch.Tensor, bins: int = NUM_BINS) -> float:
    """Mean distance of a bin's predictions from what happened, weighted by the bins' counts; arguments as [`reliability_bins`]."""
    found = reliability_bins(predicted, accepted, bins)
    return float((found.predicted - found.accepted).abs().sum() / len(predicted)) if len(predicted) else float("nan")


def brier_score(predicted: torch.Tensor, accepted: torch.Tensor) -> float:
    """Mean squared distance of probabilities `(N,)` from what happened `(N,)`."""
    return float((predicted.double() - accepted.double()).square().mean())


def area_under_curve(predicted: torch.Tensor, accepted: torch.Tensor) -> float:
    r"""
    Probability that an accepted one was predicted higher than one that was not, ties counting half.

    Args:
        predicted (`torch.Tensor` of shape `(N,)`): Probabilities, or anything in their order.
        accepted (`torch.BoolTensor` of shape `(N,)`): What happened.

    Returns:
        `float`: In [0, 1], 0.5 by chance; NaN when all or none were accepted.
    """
    positives = int(accepted.sum())
    negatives = len(accepted) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, place, counts = predicted.double().unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # equal predictions share their mean rank
    above = ranks[place[accepted]].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    r"""
    Args:
        temperatures (`tuple[float, ...]`): One for each position.
        rounds (`int`): Rounds they were fitted on.
        warnings (`tuple[str, ...]`): What makes them doubtful, for people.
    """

    temperatures: tuple[float, ...]
    rounds: int
    warnings: tuple[str, ...]


def fit_temperatures(
    logits: torch.Tensor, accepted: torch.Tensor, labelled: torch.Tensor, min_outcomes: int = MIN_OUTCOMES
) -> CalibrationFit:
    r"""
    Fit sequential temperatures by grid search over `TEMPERATURES`.

    `T_k` minimises the expected calibration error of the survival `a_k` against "the first k were accepted", over the rounds
    that have a label for k. It stays 1 unless, of the rounds that accepted all before k, enough accepted and enough
    rejected token k.

    Args:
        logits (`torch.Tensor` of shape `(N, K)`): Confidence logits before calibration, one row a round.
        accepted (`torch.LongTensor` of shape `(N,)`): Accepted draft tokens.
        labelled (`torch.LongTensor` of shape `(N,)`): Positions with a label, K unless the text ended before. A position that was not
            verified has none: rounds that a scheduler cut short would censor the data.
        min_outcomes (`int`): How many rounds are enough.

    Returns:
        [`CalibrationFit`]

    Raises:
        ValueError: If the shapes disagree, a count is impossible, or a logit is not finite.

    Source: DSpark section 3.2.1.
    """
    _check_rounds(logits, accepted, labelled)
    logits, survival = logits.double(), logits.new_ones(len(logits), dtype=torch.double)
    temperatures, warnings = [], []
    for k in range(1, logits.shape[1] + 1):
        known, confidence = labelled >= k, logits[:, k - 1]
        outcome = accepted[known] >= k
        passed, failed = int(outcome.sum()), int((accepted[known] == k - 1).sum())
        enough, temperature = min(passed, failed) >= min_outcomes, 1.0
        if enough:
            temperature = _search(survival[known], confidence[known], outcome)
        survival = survival * (confidence / temperature).sigmoid()
        temperatures.append(temperature)
        if not enough:
            warnings.append(_too_few(k, passed, failed, min_outcomes, len(logits)))
        elif temperature in (min(TEMPERATURES), max(TEMPERATURES)):
            warnings.append(f"Position {k}: its temperature {temperature:g} is the last of the grid, so no fit.")
        if enough and (auc := area_under_curve(survival[known], outcome)) < UNINFORMATIVE_AUC:
            warnings.append(
                f"Position {k}: its survivals say next to nothing about acceptance (AUC {auc:.2f}; chance is 0.5). Either the "
                "confidence head is not trained, or these are the labels of other rounds."
            )
    return CalibrationFit(tuple(temperatures), len(logits), tuple(warnings))


def _search(before: torch.Tensor, logits: torch.Tensor, outcome: torch.Tensor) -> float:
    """The temperature of one position; `before` is the survival up to there."""
    return min(TEMPERATURES, key=lambda t: expected_calibration_error(before * (logits / t).sigmoid(), outcome))


def _too_few(k: int, passed: int, failed: int, needed: int, rounds: int) -> str:
    fewer = min(passed, failed)
    estimate = f": about {-(-rounds * needed // fewer)} rounds in all, instead of {rounds}" if fewer else ""
    return (
        f"Position {k}: its temperature stays 1. Of the rounds that accepted all before it, {passed} accepted and {failed} "
        f"rejected it; {needed} of each are needed{estimate}."
    )


def _check_rounds(logits: torch.Tensor, accepted: torch.Tensor, labelled: torch.Tensor) -> None:
    if logits.dim() != 2 or accepted.shape != logits.shape[:1] or labelled.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected logits (N, K), accepted (N,) and labelled (N,), got {tuple(logits.shape)}, {tuple(accepted.shape)} and "
            f"{tuple(labelled.shape)}."
        )
    if not bool(((accepted >= 0) & (accepted <= labelled) & (labelled <= logits.shape[1])).all()):
        raise ValueError(f"Expected 0 <= accepted <= labelled <= {logits.shape[1]} in every round.")
    if not bool(logits.isfinite().all()):
        raise ValueError("Some confidence logits are not finite: look at the drafter's weights, or use float32.")
