"""What teacher-forced blocks say about acceptance (arXiv 2607.05147, eq. 8): rates by position, accepted length.

Shape letters: M blocks, K block size, S supervised positions of all blocks (block after block). Position k of a block is
index `k - 1` in tensors.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    r"""
    Sums over blocks by position; of several batches or ranks they add up. All float32 of shape `(K,)`.

    Teacher-forced: the drafter reads ground truth, not what it would have drafted. The estimates count at position k the
    blocks that are supervised there, so that the end of a text does not look like a rejection.

    Args:
        supervised (`torch.Tensor`): Supervised blocks at k.
        acceptance_rate (`torch.Tensor`): Sum of c*_k.
        survival (`torch.Tensor`): Sum of the products of c*_1 to c*_k.
        greedy_match (`torch.Tensor`): Blocks whose best draft token at k is the target's.
        greedy_prefix (`torch.Tensor`): Blocks where that holds at 1 to k.
    """

    supervised: torch.Tensor
    acceptance_rate: torch.Tensor
    survival: torch.Tensor
    greedy_match: torch.Tensor
    greedy_prefix: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """The sums as one tensor `(5, K)`, in the order of the fields."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @property
    def acceptance_by_position(self) -> torch.Tensor:
        """Mean acceptance rate when sampling at temperature 1, `(K,)`; NaN where nothing is supervised."""
        return self.acceptance_rate / self.supervised

    @property
    def greedy_acceptance_by_position(self) -> torch.Tensor:
        """Share of best tokens that agree, `(K,)`; NaN where nothing is supervised."""
        return self.greedy_match / self.supervised

    @property
    def tau(self) -> torch.Tensor:
        """Accepted length at temperature 1, bonus token included: 1 and the mean survivals."""
        return 1 + (self.survival / self.supervised).nansum()

    @property
    def greedy_tau(self) -> torch.Tensor:
        """Accepted length of greedy decoding, bonus token included."""
        return 1 + (self.greedy_prefix / self.supervised).nansum()


def draft_metrics(supervised: torch.Tensor, acceptance_rate: torch.Tensor, matches: torch.Tensor) -> DraftMetrics:
    r"""Sum up acceptance by position.

    Args:
        supervised (`torch.BoolTensor` of shape `(M, K)`): The supervised positions, the first ones of each block.
        acceptance_rate (`torch.FloatTensor` of shape `(S,)`): c* of the supervised positions, block after block.
        matches (`torch.BoolTensor` of shape `(S,)`): Whether the best tokens of drafter and target agree there.

    Returns:
        [`DraftMetrics`]

    Source: DSpark section 3.3, eq. 8; footnote 3 for the bonus token in τ.
    """
    rates = acceptance_rate.new_zeros(supervised.shape).masked_scatter(supervised, acceptance_rate)
    agree = rates.new_zeros(supervised.shape).masked_scatter(supervised, matches.to(rates.dtype))
    return DraftMetrics(
        supervised=supervised.sum(dim=0).to(rates.dtype),
        acceptance_rate=rates.sum(dim=0),
        survival=rates.cumprod(dim=1).sum(dim=0),
        greedy_match=agree.sum(dim=0),
        greedy_prefix=agree.cumprod(dim=1).sum(dim=0),
    )
