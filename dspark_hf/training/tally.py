"""Sums over micro-batches and ranks of what training reports: each loss, and acceptance on ground truth."""

from collections.abc import Callable

import torch

from dspark_hf.training.draft_metrics import DraftMetrics
from dspark_hf.training.losses import DraftLosses


class Tally:
    r"""
    Adds up micro-batches of one rank.

    Args:
        block_size (`int`): K.
        device (`torch.device`): Where the losses are.
    """

    def __init__(self, block_size: int, device: torch.device):
        self.terms = torch.zeros(4, device=device)
        self.weight = torch.zeros((), device=device)
        self.metrics = torch.zeros(5, block_size, device=device)

    def add(self, losses: DraftLosses, divisor: torch.Tensor, weight: torch.Tensor) -> None:
        r"""
        Args:
            losses ([`DraftLosses`]): Of a micro-batch.
            divisor (`torch.FloatTensor`): Scalar they were divided by.
            weight (`torch.FloatTensor`): Scalar, the micro-batch's own position weight.
        """
        terms = (losses.total, losses.cross_entropy, losses.total_variation, losses.confidence)
        self.terms += torch.stack(terms).detach() * divisor
        self.weight += weight
        self.metrics += losses.metrics.stacked()

    def report(self, prefix: str, summed_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        r"""
        What `Trainer` logs.

        Args:
            prefix (`str`): Before every name.
            summed_over_ranks (`Callable`): Adds up a tensor over all ranks.

        Returns:
            `dict[str, float]`: The losses; `tau` and `greedy_tau` (accepted length with the bonus token, temperature 1
            and greedy, teacher-forced); `acceptance_k` and `greedy_acceptance_k` for each position.
        """
        sums = summed_over_ranks(torch.cat([self.terms, self.weight[None], self.metrics.flatten()]))
        total, entropy, variation, confidence = (sums[:4] / sums[4].clamp_min(1e-9)).tolist()
        metrics = DraftMetrics(*sums[5:].view_as(self.metrics))
        report = {
            "loss": total,
            "cross_entropy": entropy,
            "total_variation": variation,
            "confidence": confidence,
            "tau": metrics.tau.item(),
            "greedy_tau": metrics.greedy_tau.item(),
        }
        rates = {
            "acceptance": metrics.acceptance_by_position,
            "greedy_acceptance": metrics.greedy_acceptance_by_position,
        }
        for name, by_position in rates.items():
            report |= {f"{name}_{k}": rate for k, rate in enumerate(by_position.tolist(), start=1)}
        return {prefix + name: value for name, value in report.items()}
