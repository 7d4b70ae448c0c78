"""The losses of section 3.3 (arXiv 2607.05147) on teacher-forced blocks, and what they say about acceptance.

    c*_k   = 1 - |q_k - p_k|_1 / 2                                        acceptance rate, eq. 8
    L_ce   = sum_k w_k * -log q_k(x*_k)                                   eqs. 9-12
    L_tv   = sum_k w_k * |q_k - p_k|_1
    L_conf = sum_k w_k * BCE(c_k, c*_k), c*_k without gradient
    L      = (a_ce * L_ce + a_tv * L_tv + a_conf * L_conf) / sum_k w_k

with w_k = exp(-(k - 1) / loss_decay) and every sum over the supervised positions of the whole micro-batch. p is the
target's distribution over its full vocabulary, also where the drafter proposes from a reduced one.

Shape letters: M blocks, I input slots of a block, K block size, S supervised positions of all blocks (block after block),
V vocabulary, V_d draft vocabulary, D hidden size. Position k of a block is index `k - 1` in tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.training.anchors import PackedBlocks


@dataclass(frozen=True, slots=True)
class LossConfig:
    r"""
    Weights of the losses. The defaults are the paper's, and the decay of the released configs.

    Args:
        cross_entropy (`float`): Weight of the cross entropy.
        total_variation (`float`): Weight of the total variation.
        confidence (`float`): Weight of the confidence head's loss.
        loss_decay (`float`): Constant of the position weights, in positions; `math.inf` weighs all alike.

    Raises:
        ValueError: If a weight is negative, all are zero, or the decay is not positive.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    loss_decay: float = 4.0

    def __post_init__(self) -> None:
        weights = (self.cross_entropy, self.total_variation, self.confidence)
        if not (all(weight >= 0 for weight in weights) and sum(weights) > 0):
            raise ValueError(f"Loss weights must not be negative, and one must be positive, got {weights}.")
        if not self.loss_decay > 0:
            raise ValueError(f"`loss_decay` must be positive, got {self.loss_decay}.")


@dataclass(frozen=True, slots=True)
class TeacherForcedDraft:
    r"""
    What the drafter says about ground-truth text.

    Args:
        logits (`torch.FloatTensor` of shape `(M, K, V_d)`): float32, draft logits over the draft vocabulary.
        confidence_logits (`torch.FloatTensor` of shape `(M, K)`, *optional*): float32; `None` without a confidence head.
    """

    logits: torch.Tensor
    confidence_logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PositionLosses:
    r"""
    Unweighted terms of each supervised position, all float32 of shape `(S,)`.

    Args:
        cross_entropy (`torch.Tensor`): -log q(x*); 0 where x* is outside the draft vocabulary.
        total_variation (`torch.Tensor`): |q - p|_1, in [0, 2].
        confidence (`torch.Tensor`): Binary cross entropy; 0 without a confidence head.
        acceptance_rate (`torch.Tensor`): c*, in [0, 1], without gradient.
    """

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance_rate: torch.Tensor


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

    def __add__(self, other: "DraftMetrics") -> "DraftMetrics":
        return DraftMetrics(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

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


@dataclass(frozen=True, slots=True)
class DraftLosses:
    r"""
    The losses of a micro-batch, scalars that are divided by the total position weight.

    Args:
        total (`torch.Tensor`): What to minimise.
        cross_entropy, total_variation, confidence (`torch.Tensor`): Its terms before they are weighted.
        metrics ([`DraftMetrics`]): Without gradient.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    metrics: DraftMetrics


def position_weights(block_size: int, loss_decay: float, device: torch.device | str | None = None) -> torch.Tensor:
    """Weights `w_k = exp(-(k - 1) / loss_decay)`, float32 `(block_size,)` (section 3.3)."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / loss_decay)


def total_position_weight(supervised: torch.Tensor, loss_decay: float) -> torch.Tensor:
    """Sum of w over the supervised positions `(..., K)`, known before any forward: ranks add theirs up first."""
    return (position_weights(supervised.shape[-1], loss_decay, supervised.device) * supervised).sum()


def teacher_forced_draft(
    drafter: DSparkDraftModel,
    hidden_states: torch.Tensor,
    previous_ids: torch.Tensor,
    lm_head: nn.Module | None = None,
) -> TeacherForcedDraft:
    r"""The sequential stage on ground truth: position k reads x_{k-1}, the anchor for k = 1.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter, with any sequential head or none.
        hidden_states (`torch.FloatTensor` of shape `(M, I, D)`): From [`block_hidden_states`].
        previous_ids (`torch.LongTensor` of shape `(M, K)`): Ground truth x_{k-1}, ids of the target's vocabulary.
        lm_head (`nn.Module`, *optional*): Head to use instead of the drafter's own, giving `V_d` logits.

    Returns:
        [`TeacherForcedDraft`]

    Raises:
        ValueError: If there is no head, or it gives another number of logits.

    Source: DSpark section 3.1, eqs. 4-7; section 3.3.
    """
    base_logits = drafter.base_logits(hidden_states, lm_head)
    if base_logits.shape[-1] != drafter.config.draft_vocab_size:
        raise ValueError(
            f"Expected a head that gives {drafter.config.draft_vocab_size} logits, one for each token of the draft "
            f"vocabulary, got {base_logits.shape[-1]}. Pass the rows of the target's head for `drafter.kept_token_ids`."
        )
    predicting = hidden_states[:, drafter.config.first_prediction_slot :]
    logits, confidences = [], []
    features: Any = None
    bias: Any = 0.0
    state = hidden_states.new_zeros(len(hidden_states), drafter.config.markov_rank)
    for k in range(previous_ids.shape[1]):
        if drafter.markov_head is not None:
            features = drafter.markov_head.markov_w1(previous_ids[:, k])
            bias, state = drafter.markov_head.step(features, predicting[:, k], state)
        if drafter.confidence_head is not None:
            confidences.append(drafter.confidence_head(predicting[:, k], features))
        logits.append(base_logits[:, k].float() + bias)
    return TeacherForcedDraft(
        logits=torch.stack(logits, dim=1).float(),
        confidence_logits=torch.stack(confidences, dim=1).float() if confidences else None,
    )


@torch.no_grad()
def aligned_target_logits(
    blocks: PackedBlocks, last_hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    r"""Soft labels: the target's logits at the supervised positions, and only there.

    Args:
        blocks ([`PackedBlocks`]): The blocks.
        last_hidden_states (`torch.FloatTensor` of shape `(B, T, D_target)`): The target's hidden states after its final
            norm; p_k comes from that of x_{k-1}.
        head (`Callable`): The target's whole head, `(S, D_target) -> (S, V)`: its bias, scale and soft-cap included, but
            no temperature or logits processor.

    Returns:
        `torch.FloatTensor` of shape `(S, V)`: float32.

    Source: DSpark section 3.3.
    """
    row, block, position = blocks.supervised.nonzero(as_tuple=True)
    return head(last_hidden_states[row, blocks.label_columns[row, block, position]]).float()


def cross_entropy(
    draft_log_probs: torch.Tensor, target_ids: torch.Tensor, kept: torch.Tensor | None, vocab_size: int
) -> torch.Tensor:
    """`-log q(x*)` of each position `(S,)`; 0 where x* is not among the `kept` tokens `(V_d,)`."""
    if kept is None:
        return F.nll_loss(draft_log_probs, target_ids, reduction="none")
    draft_ids = torch.full((vocab_size,), -1, device=kept.device)
    draft_ids[kept] = torch.arange(len(kept), device=kept.device)
    return F.nll_loss(draft_log_probs, draft_ids[target_ids], ignore_index=-1, reduction="none")


def total_variation(
    draft_probs: torch.Tensor, target_probs: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """`sum_v |q(v) - p(v)|` over the full vocabulary, `(S,)`, from q `(S, V_d)` and p `(S, V)`.

    A token outside `kept` `(V_d,)` cannot be drafted, so it adds p(v).
    """
    if kept is None:
        return (draft_probs - target_probs).abs().sum(dim=-1)
    kept_probs = target_probs[:, kept]
    return (draft_probs - kept_probs).abs().sum(dim=-1) + (1 - kept_probs.sum(dim=-1)).clamp_min(0)


def position_losses(
    draft_logits: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    target_logits: torch.Tensor,
    target_ids: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> PositionLosses:
    r"""The three terms of each position.

    Args:
        draft_logits (`torch.FloatTensor` of shape `(S, V_d)`): float32.
        confidence_logits (`torch.FloatTensor` of shape `(S,)`, *optional*): float32.
        target_logits (`torch.FloatTensor` of shape `(S, V)`): float32, of the full vocabulary.
        target_ids (`torch.LongTensor` of shape `(S,)`): Gold tokens x*, ids of the target's vocabulary.
        kept (`torch.LongTensor` of shape `(V_d,)`, *optional*): Target ids of the draft vocabulary; `None` means all.

    Returns:
        [`PositionLosses`]

    Raises:
        ValueError: If the sizes of the vocabularies disagree.

    Source: DSpark section 3.3, eqs. 8-12.
    """
    expected = target_logits.shape[-1] if kept is None else len(kept)
    if draft_logits.shape != (len(target_logits), expected):
        raise ValueError(
            f"Expected draft logits of shape {(len(target_logits), expected)}, got {tuple(draft_logits.shape)}. The heads "
            "of drafter and target must give one logit for each token of their vocabularies."
        )
    log_probs = draft_logits.log_softmax(dim=-1)
    distance = total_variation(log_probs.exp(), target_logits.softmax(dim=-1), kept)
    acceptance_rate = (1 - distance.detach() / 2).clamp(0, 1)
    if confidence_logits is None:
        confidence = torch.zeros_like(acceptance_rate)
    else:
        confidence = F.binary_cross_entropy_with_logits(confidence_logits, acceptance_rate, reduction="none")
    entropy = cross_entropy(log_probs, target_ids, kept, target_logits.shape[-1])
    return PositionLosses(entropy, distance, confidence, acceptance_rate)


def draft_losses(
    drafter: DSparkDraftModel,
    blocks: PackedBlocks,
    hidden_states: torch.Tensor,
    target_logits: torch.Tensor,
    lm_head: nn.Module | None = None,
    config: LossConfig | None = None,
    total_weight: torch.Tensor | float | None = None,
) -> DraftLosses:
    r"""The training loss of a micro-batch.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        blocks ([`PackedBlocks`]): The blocks.
        hidden_states (`torch.FloatTensor` of shape `(B * N, I, D)`): From [`block_hidden_states`].
        target_logits (`torch.FloatTensor` of shape `(S, V)`): From [`aligned_target_logits`].
        lm_head (`nn.Module`, *optional*): Head to use instead of the drafter's own, giving `V_d` logits.
        config ([`LossConfig`], *optional*): Weights of the terms. `None` means the paper's.
        total_weight (`torch.Tensor` or `float`, *optional*): What the sums are divided by, for a micro-batch that is
            spread over ranks or steps: the sum of its [`total_position_weight`]s. `None` means that of these blocks.

    Returns:
        [`DraftLosses`]

    Raises:
        ValueError: If nothing is supervised and no `total_weight` is given, or shapes disagree.

    Source: DSpark section 3.3, eqs. 8-12.
    """
    config = LossConfig() if config is None else config
    keep = blocks.block_keep_mask.flatten()  # dummies cost no logits
    supervised = blocks.supervised.flatten(0, 1)[keep]  # (M, K)
    if total_weight is None:
        if not supervised.any():
            raise ValueError("No position of this batch is supervised: check the loss mask and the anchors.")
        total_weight = total_position_weight(supervised, config.loss_decay)
    draft = teacher_forced_draft(drafter, hidden_states[keep], blocks.previous_ids.flatten(0, 1)[keep], lm_head)
    draft_logits, kept = draft.logits[supervised], drafter.kept_token_ids  # (S, V_d), (V_d,)
    confidence_logits = None if draft.confidence_logits is None else draft.confidence_logits[supervised]
    target_ids = blocks.target_ids.flatten(0, 1)[keep][supervised]
    terms = position_losses(draft_logits, confidence_logits, target_logits, target_ids, kept)
    decayed = position_weights(supervised.shape[1], config.loss_decay, supervised.device)
    weights = decayed.expand_as(supervised)[supervised] / total_weight
    l_ce = (weights * terms.cross_entropy).sum()
    l_tv = (weights * terms.total_variation).sum()
    l_conf = (weights * terms.confidence).sum()
    total = config.cross_entropy * l_ce + config.total_variation * l_tv + config.confidence * l_conf
    best = draft_logits.detach().argmax(dim=-1)
    matches = (best if kept is None else kept[best]) == target_logits.argmax(dim=-1)
    return DraftLosses(total, l_ce, l_tv, l_conf, draft_metrics(supervised, terms.acceptance_rate, matches))


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
