"""What the training text alone tells a new drafter: which tokens to propose, and what tends to follow what.

The sequential head adds `W_1[x] W_2` to the logits of the token after x (eq. 5). It starts as log p(y), which takes one
of its ranks, and a low-rank factorisation of the smoothed bigram log-ratios

    log (p(y | x) / p(y)) = log(1 + n_xy / (smoothing * p(y))) + a constant of x,

which is sparse: a pair that never occurs gives 0, and the constant changes no softmax. Rows and columns are weighted by
the roots of how often their tokens occur.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.training.losses import draft_token_ids
from dspark_hf.training.samples import Sample


QUIET = 0.3
"""Scale of a new final norm. At 1 the logits of an untrained drafter repeat the anchor, with a cross entropy of 16; at 0.1 it
learns more slowly (docs/log.md)."""


def frequent_tokens(samples: Iterable[Sample], count: int, vocab_size: int) -> torch.Tensor:
    r"""
    The tokens that the target writes most often.

    Args:
        samples (`Iterable[Sample]`): Their responses are counted.
        count (`int`): How many to return; tokens that never occur fill up, from the smallest id.
        vocab_size (`int`): Size of the target's vocabulary.

    Returns:
        `torch.LongTensor` of shape `(count,)`: Ascending.

    Raises:
        ValueError: If `count` does not lie in `[1, vocab_size]`.
    """
    if not 1 <= count <= vocab_size:
        raise ValueError(f"The draft vocabulary must have 1 to {vocab_size} tokens, got {count}.")
    counts = Counter(token for sample in samples for token in sample.input_ids[sample.prompt_length :])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:count]))


@torch.no_grad()
def start_from_bigrams(drafter: DSparkDraftModel, samples: Sequence[Sample], smoothing: float = 30.0) -> None:
    r"""
    Let a new drafter begin as a bigram model of the samples' responses: its vanilla Markov head says what follows what,
    and the final norm is scaled down, so that what the untrained layers say is quiet beside it.

    Args:
        drafter ([`DSparkDraftModel`]): Its head and final norm are changed in place.
        samples (`Sequence[Sample]`): The text.
        smoothing (`float`): Pseudo-count of a pair with independent tokens.

    Raises:
        ValueError: If the drafter has no head of this kind, or one of rank 1.
    """
    config = drafter.config
    if drafter.markov_head is None or config.markov_head_type != "vanilla" or config.markov_rank < 2:
        raise ValueError(
            "Bigrams start a vanilla Markov head of rank 2 or more; this drafter has rank "
            f"{config.markov_rank} and type {config.markov_head_type!r}."
        )
    bigrams = count_bigrams(samples, draft_token_ids(drafter), config, smoothing)
    rank = config.markov_rank - 1
    left, scale, right = torch.svd_lowrank(
        bigrams.log_ratios, q=min(rank + 16, min(bigrams.log_ratios.shape)), niter=3
    )
    w1 = left[:, :rank] * scale[:rank].sqrt() / bigrams.row_weights[:, None]
    w2 = right[:, :rank] * scale[:rank].sqrt() / bigrams.column_weights[:, None]
    balance = (w2.norm() / w1.norm()).sqrt()  # factors of one size, so that one learning rate suits both
    last = 1 + w1.shape[1]  # fewer than the rank where the vocabulary is smaller
    head = drafter.markov_head
    head.markov_w1.weight.zero_()[:, 1:last].copy_(w1 * balance)
    head.markov_w2.weight.zero_()[:, 1:last].copy_(w2 / balance)
    unigrams = bigrams.log_frequency - bigrams.log_frequency.mean()
    head.markov_w1.weight[:, 0] = unigrams.std().sqrt()
    head.markov_w2.weight[:, 0] = unigrams / unigrams.std().sqrt()
    drafter.norm.weight.mul_(QUIET)


@dataclass(frozen=True, slots=True)
class Bigrams:
    r"""
    What follows what.

    Args:
        log_ratios (`torch.Tensor`): Sparse `(V, V_d)`, float32, times the weights of rows and columns.
        row_weights (`torch.FloatTensor` of shape `(V,)`): Roots of how often each x occurs.
        column_weights (`torch.FloatTensor` of shape `(V_d,)`): Roots of the frequencies p(y).
        log_frequency (`torch.FloatTensor` of shape `(V_d,)`): log p(y).
    """

    log_ratios: torch.Tensor
    row_weights: torch.Tensor
    column_weights: torch.Tensor
    log_frequency: torch.Tensor


def count_bigrams(
    samples: Sequence[Sample], draft_ids: torch.Tensor | None, config: DSparkConfig, smoothing: float
) -> Bigrams:
    r"""
    Count the bigrams of the responses.

    Args:
        samples (`Sequence[Sample]`): The text; the last prompt token counts as the first x.
        draft_ids (`torch.LongTensor` of shape `(V,)`, *optional*): Draft id of each target id, -1 for none.
        config ([`DSparkConfig`]): Sizes of the vocabularies.
        smoothing (`float`): Pseudo-count of a pair with independent tokens.

    Returns:
        [`Bigrams`]
    """
    texts = [torch.tensor(sample.input_ids[max(sample.prompt_length - 1, 0) :]) for sample in samples]
    first, second = (torch.cat([text[part] for text in texts]) for part in (slice(None, -1), slice(1, None)))
    second = second if draft_ids is None else draft_ids.cpu()[second]
    first, second = first[second >= 0], second[second >= 0]
    occurrences = torch.bincount(first, minlength=config.vocab_size).float()
    frequency = torch.bincount(second, minlength=config.draft_vocab_size).float().clamp_min(0.5) / len(second)
    pairs, counts = (first * config.draft_vocab_size + second).unique(return_counts=True)
    rows, columns = pairs // config.draft_vocab_size, pairs % config.draft_vocab_size
    row_weights, column_weights = occurrences.clamp_min(1.0).sqrt(), frequency.sqrt()
    ratios = torch.log1p(counts / (smoothing * frequency[columns])) * row_weights[rows] * column_weights[columns]
    shape = (config.vocab_size, config.draft_vocab_size)
    sparse = torch.sparse_coo_tensor(torch.stack([rows, columns]), ratios, shape, check_invariants=True)
    return Bigrams(sparse, row_weights, column_weights, frequency.log())


def unused_token(samples: Iterable[Sample], vocab_size: int) -> int:
    r"""
    The last token of the vocabulary that no sample holds: what fills a block should mean nothing else.

    Raises:
        ValueError: If the samples hold every token.
    """
    used = {token for sample in samples for token in sample.input_ids}
    for token in reversed(range(vocab_size)):
        if token not in used:
            return token
    raise ValueError("The samples hold every token of the vocabulary: say with --mask-token-id which fills a block.")
