"""Supervision, equations 8-12 and the acceptance metrics written as loops over rows, blocks and positions, in float64.

Distributions are spread over the target's whole vocabulary first, so that a reduced draft vocabulary is no special case:
its missing tokens have probability zero. Nothing here is from the library; gradients come from autograd through these
loops, in float64.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class ReferenceLosses:
    """Scalars, and the label `c*` of each supervised position in reading order."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance_rates: list[float]


def supervised_length(loss_mask: list[int], sequence_ids: list[int], anchor: int, block_size: int) -> int:
    """Positions of a block that are trained: up to the first token that is unsupervised or of another sequence."""
    for k in range(1, block_size + 1):
        column = anchor + k
        if column >= len(loss_mask) or sequence_ids[column] != sequence_ids[anchor] or not loss_mask[column]:
            return k - 1
    return block_size


def anchor_candidates(loss_mask: list[int], sequence_ids: list[int]) -> set[int]:
    """Columns of a row that may be an anchor."""
    return {
        column
        for column in range(len(loss_mask) - 1)
        if loss_mask[column]
        and loss_mask[column + 1]
        and sequence_ids[column] != 0
        and sequence_ids[column] == sequence_ids[column + 1]
    }


def softmax(logits: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def reference_losses(
    draft_logits, confidence_logits, target_logits, target_ids, lengths, weights, decay, kept=None
) -> ReferenceLosses:
    """The losses of a list of blocks.

    Args:
        draft_logits: `(M, K, V_d)`.
        confidence_logits: `(M, K)`, or `None`.
        target_logits: `(M, K, V)`.
        target_ids: `(M, K)`.
        lengths: Supervised positions of each block.
        weights: Those of cross entropy, total variation and confidence.
        decay: Of the position weights.
        kept: Target ids of the draft vocabulary.
    """
    zero = torch.zeros((), dtype=torch.float64)
    cross_entropy, total_variation, confidence, total_weight, rates = zero, zero, zero, 0.0, []
    vocab_size = target_logits.shape[-1]
    kept = list(range(vocab_size)) if kept is None else [int(token) for token in kept]
    for block, length in enumerate(lengths):
        for k in range(1, length + 1):
            weight = math.exp(-(k - 1) / decay)
            total_weight += weight
            q = [zero] * vocab_size
            for token, probability in zip(kept, softmax(draft_logits[block, k - 1].double()), strict=True):
                q[token] = probability
            p = softmax(target_logits[block, k - 1].double().detach())
            gold = int(target_ids[block, k - 1])
            if gold in kept:
                cross_entropy = cross_entropy - weight * torch.log(q[gold])
            distance = sum(torch.abs(q[token] - p[token]) for token in range(vocab_size))
            total_variation = total_variation + weight * distance
            # Eq. 8, by its first form.
            label = sum(min(float(q[token].detach()), float(p[token])) for token in range(vocab_size))
            rates.append(label)
            if confidence_logits is not None:
                c = 1 / (1 + torch.exp(-confidence_logits[block, k - 1].double()))
                confidence = confidence - weight * (label * torch.log(c) + (1 - label) * torch.log(1 - c))
    terms = [term / total_weight for term in (cross_entropy, total_variation, confidence)]
    total = sum(weight * term for weight, term in zip(weights, terms, strict=True))
    return ReferenceLosses(total, *terms, rates)


def accepted_length(per_position: list[list[float]], block_size: int) -> float:
    """1 + the mean over blocks, for each k, of the product of the first k values of a block that has so many."""
    result = 1.0
    for k in range(1, block_size + 1):
        products = [math.prod(values[:k]) for values in per_position if len(values) >= k]
        result += sum(products) / len(products) if products else 0.0
    return result
