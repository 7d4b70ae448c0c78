"""Goodness of fit without scipy, in float64.

A p-value is the chi-square approximation. Cells that expect fewer than `MIN_EXPECTED` counts are merged, and directions
whose counts vary less than `MIN_VARIANCE` are left out, which keeps it useful far out: where it says 1e-9, a single cell
that expects 25 (10) counts has a Poisson tail of 7e-8 (3e-7), and more cells and more counts bring it nearer.
"""

from dataclasses import dataclass

import torch


MIN_EXPECTED = 25.0
MIN_VARIANCE = 10.0


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic and its degrees of freedom; independent ones add up."""

    statistic: float
    degrees: int

    def __add__(self, other: "ChiSquare") -> "ChiSquare":
        return ChiSquare(self.statistic + other.statistic, self.degrees + other.degrees)

    @property
    def p_value(self) -> float:
        if self.degrees == 0:
            return 1.0
        half = torch.tensor([self.degrees / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


IMPOSSIBLE = ChiSquare(float("inf"), 1)


def count(outcomes: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Count sequences: `(N, k)` tokens to `(V,) * k` counts."""
    powers = vocab_size ** torch.arange(outcomes.shape[1] - 1, -1, -1)
    flat = (outcomes * powers).sum(dim=1).bincount(minlength=vocab_size ** outcomes.shape[1])
    return flat.view((vocab_size,) * outcomes.shape[1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> ChiSquare:
    """Compare counts with a law of the same shape. A count where the law has exactly zero is impossible."""
    counts, law = counts.flatten().double(), probabilities.flatten().double()
    if bool(counts[law == 0].any()):
        return IMPOSSIBLE
    expected = law * counts.sum()
    large = expected >= MIN_EXPECTED
    if int(large.sum()) < 2:
        return ChiSquare(0.0, 0)
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < MIN_EXPECTED:
        smallest = expected[:-1].argmin()
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return ChiSquare(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def conditional_chi_square(tokens: torch.Tensor, laws: torch.Tensor, bins: torch.Tensor) -> ChiSquare:
    r"""
    Compare a history-dependent process with its conditional laws.

    In each bin the sum of `onehot(x_t) - p_t` has mean zero and covariance `sum(diag(p_t) - p_t p_t^T)`, whatever the
    histories are, as long as the bin of step t is known before `x_t` is drawn.

    Args:
        tokens (`torch.LongTensor` of shape `(T,)`): What was drawn.
        laws (`torch.DoubleTensor` of shape `(T, V)`): The law of each, given its history.
        bins (`torch.LongTensor` of shape `(T,)`): A group for each step.
    """
    if bool((laws.gather(1, tokens[:, None]) == 0).any()):
        return IMPOSSIBLE
    total = ChiSquare(0.0, 0)
    for group in bins.unique():
        p = laws[bins == group]
        surplus = torch.nn.functional.one_hot(tokens[bins == group], p.shape[1]).double().sum(dim=0) - p.sum(dim=0)
        variances, directions = torch.linalg.eigh(p.sum(dim=0).diag() - p.T @ p)
        kept = variances > MIN_VARIANCE  # the others are too few to be normal
        along = directions[:, kept].T @ surplus
        total += ChiSquare(float((along**2 / variances[kept]).sum()), int(kept.sum()))
    return total
