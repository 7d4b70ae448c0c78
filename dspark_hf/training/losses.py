"""The losses of section 3.3 (arXiv 2607.05147) on teacher-forced blocks.

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

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.training.anchors import PackedBlocks
from dspark_hf.training.draft_metrics import DraftMetrics, draft_metrics
from dspark_hf.training.features import TargetFeatures
from dspark_hf.training.target_head import TargetHead


LOGITS_PER_CHUNK = 2**27
"""Logits that are held at once, 0.5 GB in float32. More are taken in chunks of blocks, and once more in backward."""

CACHED_LOGITS = 2**18
"""Logits that a CPU works on at once, 1 MB in float32: its share of the cache."""


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
class SoftLabels:
    r"""
    What the target says at `S` supervised positions.

    Args:
        probs (`torch.FloatTensor` of shape `(S, V_d)`): float32, p on the draft vocabulary; adds up to less than 1 when
            that is reduced.
        best_ids (`torch.LongTensor` of shape `(S,)`): The target's best token, an id of its own vocabulary.
    """

    probs: torch.Tensor
    best_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PositionLosses:
    r"""
    Unweighted terms of each supervised position, of shape `(S,)`, float32 but for the last.

    Args:
        cross_entropy (`torch.Tensor`): -log q(x*); 0 where x* is outside the draft vocabulary.
        total_variation (`torch.Tensor`): |q - p|_1, in [0, 2].
        confidence (`torch.Tensor`): Binary cross entropy; 0 without a confidence head.
        acceptance_rate (`torch.Tensor`): c*, in [0, 1], without gradient.
        matches (`torch.BoolTensor`): Whether the best tokens of drafter and target agree.
    """

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance_rate: torch.Tensor
    matches: torch.Tensor


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
    state = drafter.initial_state(hidden_states, previous_ids[:, 0])
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
def aligned_soft_labels(features: TargetFeatures, head: TargetHead, tokens: torch.Tensor) -> SoftLabels:
    r"""Soft labels of the supervised positions, and only those.

    Args:
        features ([`TargetFeatures`]): Of the batch, `(B, T, ...)`.
        head ([`TargetHead`]): The target's head, its rows for the draft vocabulary. No temperature and no logits
            processor is applied.
        tokens (`torch.LongTensor` of shape `(S,)`): Where x_{k-1} is, whose hidden state gives p_k, in the flattened
            batch `(B * T,)`.

    Returns:
        [`SoftLabels`] of the `S` positions.

    Source: DSpark section 3.3.
    """
    logits = head(features.last_hidden_states.flatten(0, 1)[tokens])  # (S, V_d)
    probs = logits.sub_(features.log_normalizers.flatten()[tokens, None]).exp_()
    return SoftLabels(probs, features.best_ids.flatten()[tokens])


class VocabularyTerms(torch.autograd.Function):
    r"""
    Cross entropy and total variation of each position, a few positions at a time, so that what lies between logits and
    terms, and between their gradients, stays in the cache of a CPU.

    Args:
        draft_logits (`torch.FloatTensor` of shape `(S, V_d)`): Logits of q.
        target_probs (`torch.FloatTensor` of shape `(S, V_d)`): p on the draft vocabulary, without gradient. A token outside
            cannot be drafted, so it adds p(v) to the total variation: together what p lacks to 1.
        gold (`torch.LongTensor` of shape `(S,)`): Draft id of the gold token, or -1.

    Returns:
        `-log q(x*)`, 0 for a gold token of -1; `sum_v |q(v) - p(v)|` over the full vocabulary; the best draft id; each `(S,)`.

    Source: DSpark section 3.3, eqs. 8-12.
    """

    @staticmethod
    def forward(
        ctx: Any, draft_logits: torch.Tensor, target_probs: torch.Tensor, gold: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_z, entropy, distance = (draft_logits.new_empty(len(gold)) for _ in range(3))
        best_ids = torch.empty_like(gold)
        for part in _few_positions(draft_logits):
            logits, probs = draft_logits[part], target_probs[part]
            log_z[part] = logits.logsumexp(dim=-1)
            best_ids[part] = logits.argmax(dim=-1)
            gap = (logits - log_z[part, None]).exp_().sub_(probs)
            distance[part] = gap.abs_().sum(dim=-1) + (1 - probs.sum(dim=-1)).clamp_min(0)
            gold_logits = logits.gather(1, gold[part, None].clamp_min(0)).squeeze(1)
            entropy[part] = (log_z[part] - gold_logits).masked_fill(gold[part] < 0, 0)
        ctx.save_for_backward(draft_logits, target_probs, gold, log_z)
        ctx.mark_non_differentiable(best_ids)
        return entropy, distance, best_ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_entropy: torch.Tensor, of_distance: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        """d -log q(x*) / d logits = q - [v = x*]; d |q - p|_1 / d logits = q (s - sum_v q s), s the sign of q - p."""
        draft_logits, target_probs, gold, log_z = ctx.saved_tensors
        gradient = torch.empty_like(draft_logits)
        of_entropy = of_entropy.masked_fill(gold < 0, 0)
        for part in _few_positions(draft_logits):
            draft_probs = (draft_logits[part] - log_z[part, None]).exp_()
            signs = (draft_probs - target_probs[part]).sign_()
            mean_sign = (draft_probs * signs).sum(dim=-1)
            shift = of_entropy[part] - of_distance[part] * mean_sign
            torch.mul(signs.mul_(of_distance[part, None]).add_(shift[:, None]), draft_probs, out=gradient[part])
            gradient[part].scatter_add_(1, gold[part, None].clamp_min(0), -of_entropy[part, None])
        return gradient, None, None


def _few_positions(logits: torch.Tensor) -> list[slice]:
    """Slices of positions `(S,)` whose logits fit in a CPU's cache; one slice elsewhere."""
    size = max(1, CACHED_LOGITS // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    return [slice(first, first + size) for first in range(0, len(logits), size)]


def position_losses(
    draft_logits: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    labels: SoftLabels,
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor | None = None,
) -> PositionLosses:
    r"""The three terms of each position.

    Args:
        draft_logits (`torch.FloatTensor` of shape `(S, V_d)`): float32.
        confidence_logits (`torch.FloatTensor` of shape `(S,)`, *optional*): float32.
        labels ([`SoftLabels`]): What the target says.
        target_ids (`torch.LongTensor` of shape `(S,)`): Gold tokens x*, ids of the target's vocabulary.
        draft_ids (`torch.LongTensor` of shape `(V,)`, *optional*): Draft id of each target id, -1 for those that
            cannot be drafted; `None` for the whole vocabulary.

    Returns:
        [`PositionLosses`]

    Raises:
        ValueError: If the sizes of the vocabularies disagree.

    Source: DSpark section 3.3, eqs. 8-12.
    """
    if draft_logits.shape != labels.probs.shape:
        raise ValueError(
            f"Expected draft logits of shape {tuple(labels.probs.shape)}, got {tuple(draft_logits.shape)}. The heads of "
            "drafter and target must give one logit for each token of the draft vocabulary."
        )
    gold = target_ids if draft_ids is None else draft_ids[target_ids]
    entropy, distance, best_ids = VocabularyTerms.apply(draft_logits, labels.probs, gold)
    acceptance_rate = (1 - distance.detach() / 2).clamp(0, 1)
    if confidence_logits is None:
        confidence = torch.zeros_like(acceptance_rate)
    else:
        confidence = F.binary_cross_entropy_with_logits(confidence_logits, acceptance_rate, reduction="none")
    matches = best_ids == (labels.best_ids if draft_ids is None else draft_ids[labels.best_ids])
    return PositionLosses(entropy, distance, confidence, acceptance_rate, matches)


def draft_losses(
    drafter: DSparkDraftModel,
    blocks: PackedBlocks,
    hidden_states: torch.Tensor,
    features: TargetFeatures,
    head: TargetHead,
    config: LossConfig | None = None,
    total_weight: torch.Tensor | float | None = None,
) -> DraftLosses:
    r"""The training loss of a micro-batch.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter. Without a head of its own it uses `head`, the target's rows.
        blocks ([`PackedBlocks`]): The blocks.
        hidden_states (`torch.FloatTensor` of shape `(B * N, I, D)`): From [`block_hidden_states`].
        features ([`TargetFeatures`]): Of the batch, `(B, T, ...)`.
        head ([`TargetHead`]): The target's head, its rows for `drafter.kept_token_ids`.
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
    supervised = blocks.supervised.flatten(0, 1)  # (B * N, K)
    if total_weight is None:
        if not supervised.any():
            raise ValueError("No position of this batch is supervised: check the loss mask and the anchors.")
        total_weight = total_position_weight(supervised, config.loss_decay)
    terms = _batch_terms(drafter, blocks, hidden_states, features, head)
    decayed = position_weights(supervised.shape[1], config.loss_decay, supervised.device)
    weights = decayed.expand_as(supervised)[supervised] / total_weight
    l_ce = (weights * terms.cross_entropy).sum()
    l_tv = (weights * terms.total_variation).sum()
    l_conf = (weights * terms.confidence).sum()
    total = config.cross_entropy * l_ce + config.total_variation * l_tv + config.confidence * l_conf
    return DraftLosses(total, l_ce, l_tv, l_conf, draft_metrics(supervised, terms.acceptance_rate, terms.matches))


def _batch_terms(
    drafter: DSparkDraftModel,
    blocks: PackedBlocks,
    hidden_states: torch.Tensor,
    features: TargetFeatures,
    head: TargetHead,
) -> PositionLosses:
    """Terms of all supervised positions, block after block, with no more than `LOGITS_PER_CHUNK` logits at once."""
    rows, columns = blocks.context_position_ids.shape
    label_tokens = blocks.label_columns + columns * torch.arange(rows, device=hidden_states.device)[:, None, None]
    tensors = (blocks.previous_ids, blocks.target_ids, label_tokens, blocks.supervised)
    keep = blocks.block_keep_mask.flatten()  # dummies cost no logits
    kept = [hidden_states[keep], *(tensor.flatten(0, 1)[keep] for tensor in tensors)]
    size = max(1, LOGITS_PER_CHUNK // (drafter.config.block_size * drafter.config.draft_vocab_size))
    chunks = list(zip(*(tensor.split(size) for tensor in kept), strict=True))
    terms_of = partial(_chunk_terms, drafter, features, head)
    if len(chunks) == 1:
        return terms_of(*chunks[0])
    parts = [checkpoint(terms_of, *chunk, use_reentrant=False) for chunk in chunks]
    return PositionLosses(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(PositionLosses))
    )


def _chunk_terms(
    drafter: DSparkDraftModel,
    features: TargetFeatures,
    head: TargetHead,
    hidden_states: torch.Tensor,
    previous_ids: torch.Tensor,
    target_ids: torch.Tensor,
    label_tokens: torch.Tensor,
    supervised: torch.Tensor,
) -> PositionLosses:
    """Terms of some blocks: `hidden_states` `(m, I, D)`, the others `(m, K)`."""
    draft = teacher_forced_draft(
        drafter, hidden_states, previous_ids, head.module if drafter.lm_head is None else None
    )
    rows = supervised.flatten().nonzero().squeeze(1)  # index_select has a faster backward than a mask
    return position_losses(
        draft.logits.flatten(0, 1).index_select(0, rows),
        None if draft.confidence_logits is None else draft.confidence_logits[supervised],
        aligned_soft_labels(features, head, label_tokens[supervised]),
        target_ids[supervised],
        draft_token_ids(drafter),
    )


def draft_token_ids(drafter: DSparkDraftModel) -> torch.Tensor | None:
    """Draft id of each target id, `(V,)`, -1 for those that cannot be drafted; `None` for the whole vocabulary."""
    kept = drafter.kept_token_ids
    if kept is None:
        return None
    draft_ids = torch.full((drafter.config.vocab_size,), -1, device=kept.device)
    draft_ids[kept] = torch.arange(len(kept), device=kept.device)
    return draft_ids
