"""What a new drafter takes from the text: its vocabulary, its mask token, and bigrams."""

import math

import pytest
import torch
from conftest import VOCAB, make_drafter, shared_target

from dspark_hf.training.losses import draft_token_ids
from dspark_hf.training.samples import Sample
from dspark_hf.training.warm_start import QUIET, count_bigrams, frequent_tokens, start_from_bigrams, unused_token


def chain_text(count=60, length=40, seed=0) -> tuple[list[Sample], torch.Tensor]:
    """Samples in which each token is followed by one favourite with probability 0.9, and the favourites."""
    generator = torch.Generator().manual_seed(seed)
    favourite = torch.randperm(VOCAB, generator=generator)
    samples = []
    for number in range(count):
        ids = [int(torch.randint(VOCAB, (1,), generator=generator))]
        while len(ids) < length:
            follows = torch.rand(1, generator=generator) < 0.9
            ids.append(int(favourite[ids[-1]] if follows else torch.randint(VOCAB, (1,), generator=generator)))
        samples.append(Sample(f"chain:{number}", ids, 1))
    return samples, favourite


def test_the_draft_vocabulary_is_what_the_target_writes_most():
    samples = [Sample("a", [9, 9, 9, 5, 5, 7], 3), Sample("b", [5, 7, 3], 0)]  # responses: 5 5 7, 5 7 3
    assert frequent_tokens(samples, 2, 10).tolist() == [5, 7]
    assert frequent_tokens(samples, 5, 10).tolist() == [0, 1, 3, 5, 7]  # the smallest ids fill up
    with pytest.raises(ValueError, match="1 to 10 tokens, got 11"):
        frequent_tokens(samples, 11, 10)


def test_the_mask_token_is_one_that_no_sample_holds():
    assert unused_token([Sample("a", [9, 8, 6], 1)], 10) == 7
    with pytest.raises(ValueError, match="every token of the vocabulary"):
        unused_token([Sample("a", [0, 1, 2], 1)], 3)


@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 40])
def test_bigrams_are_counted_as_loops_count_them(draft_vocab_size):
    samples, _ = chain_text(count=5)
    drafter = make_drafter(shared_target(), draft_vocab_size=draft_vocab_size)
    if draft_vocab_size < VOCAB:
        drafter.d2t.copy_(frequent_tokens(samples, 40, VOCAB) - torch.arange(40))
    draft_ids = draft_token_ids(drafter)
    bigrams = count_bigrams(samples, draft_ids, drafter.config, smoothing=3.0)
    counts = torch.zeros(VOCAB, draft_vocab_size, dtype=torch.float64)
    for sample in samples:
        for first, second in zip(sample.input_ids, sample.input_ids[1:], strict=False):
            own = second if draft_ids is None else int(draft_ids[second])
            if own >= 0:
                counts[first, own] += 1
    frequency = counts.sum(dim=0) / counts.sum()
    log_ratios = bigrams.log_ratios.to_dense() / bigrams.row_weights[:, None] / bigrams.column_weights
    for first in range(VOCAB):
        for second in range(draft_vocab_size):
            expected = 0.0
            if counts[first, second] > 0:
                expected = math.log1p(counts[first, second] / (3.0 * frequency[second]))
            assert log_ratios[first, second] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 40])
def test_a_new_drafter_begins_as_a_bigram_model(draft_vocab_size):
    samples, favourite = chain_text()
    drafter = make_drafter(shared_target(), markov_rank=70, draft_vocab_size=draft_vocab_size)
    kept = torch.arange(VOCAB)
    if draft_vocab_size < VOCAB:
        kept = frequent_tokens(samples, 40, VOCAB)
        drafter.d2t.copy_(kept - torch.arange(40))
    norm = drafter.norm.weight.clone()
    start_from_bigrams(drafter, samples)
    assert torch.equal(drafter.norm.weight, norm * QUIET)
    head = drafter.markov_head
    best = kept[head.markov_w2(head.markov_w1(torch.arange(VOCAB))).argmax(dim=-1)]
    known = torch.isin(favourite, kept)
    assert torch.equal(best[known], favourite[known])
    # One learning rate has to suit both factors.
    assert 0.1 < float(head.markov_w1.weight.detach().norm() / head.markov_w2.weight.detach().norm()) < 10


def test_a_token_that_never_occurs_is_followed_by_what_is_frequent():
    samples = [Sample("a", [1, 2, 3, 3, 3, 3, 2, 3], 0)]
    drafter = make_drafter(shared_target(), markov_rank=6)
    start_from_bigrams(drafter, samples)
    head = drafter.markov_head
    assert int(head.markov_w2(head.markov_w1(torch.tensor([50]))).argmax()) == 3


@pytest.mark.parametrize(
    "shape",
    [{"markov_head_type": "rnn"}, {"markov_rank": 1}, {"markov_rank": 0, "confidence_head_with_markov": False}],
)
def test_other_heads_are_refused(shape):
    with pytest.raises(ValueError, match="vanilla Markov head of rank 2 or more"):
        start_from_bigrams(make_drafter(shared_target(), **shape), [Sample("a", [1, 2, 3], 0)])
