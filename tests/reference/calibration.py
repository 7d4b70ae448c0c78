"""Calibration measures and the fit of sequential temperatures, written as nested loops over plain numbers."""

import math


def bin_of(probability: float, bins: int) -> int:
    """The bin of equal width that a probability lies in; 1 belongs to the last."""
    return min(int(probability * bins), bins - 1)


def expected_calibration_error(predicted: list[float], accepted: list[bool], bins: int) -> float:
    error = 0.0
    for number in range(bins):
        inside = [i for i in range(len(predicted)) if bin_of(predicted[i], bins) == number]
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            share = sum(accepted[i] for i in inside) / len(inside)
            error += len(inside) / len(predicted) * abs(confidence - share)
    return error


def area_under_curve(predicted: list[float], accepted: list[bool]) -> float:
    """Over all pairs of one that was accepted and one that was not."""
    won = pairs = 0.0
    for high, yes in zip(predicted, accepted, strict=True):
        for low, no in zip(predicted, accepted, strict=True):
            if yes and not no:
                pairs += 1
                won += 1.0 if high > low else 0.5 if high == low else 0.0
    return won / pairs if pairs else math.nan


def brier_score(predicted: list[float], accepted: list[bool]) -> float:
    total = 0.0
    for probability, happened in zip(predicted, accepted, strict=True):
        total += (probability - happened) ** 2
    return total / len(predicted)


def fit_temperatures(
    logits: list[list[float]], accepted: list[int], labelled: list[int], grid: list[float], bins: int
) -> list[float]:
    """Each temperature in turn, those before frozen; of equally good ones that nearest to 1."""
    chosen: list[float] = []
    for k in range(1, len(logits[0]) + 1):
        best, smallest = 1.0, math.inf
        for temperature in sorted(grid, key=lambda t: (abs(math.log(t)), t)):
            predicted, happened = [], []
            for row, number, known in zip(logits, accepted, labelled, strict=True):
                if known < k:
                    continue
                survival = 1.0
                for logit, divisor in zip(row, [*chosen, temperature], strict=False):
                    survival *= 1 / (1 + math.exp(-logit / divisor))
                predicted.append(survival)
                happened.append(number >= k)
            error = expected_calibration_error(predicted, happened, bins)
            if error < smallest - 1e-12:
                best, smallest = temperature, error
        chosen.append(best)
    return chosen
