"""The acceptance rule: the exact law of one position, the law of whole rounds, and its corner cases."""

from dataclasses import dataclass, field

import pytest
import torch
from reference.acceptance import own_probability_law, speculative_law
from reference.chi_square import chi_square, count

from dspark_hf.acceptance import Acceptance, accept
from dspark_hf.sampling import Sampler


GREEDY = Sampler(do_sample=False)
FAIL_BELOW = 1e-9  # one p-value in this file is tested against it; the seeds are fixed


@dataclass(frozen=True)
class Scripted(Sampler):
    """Gives these uniform numbers, keeps the weights of every draw, and draws the heaviest."""

    do_sample: bool = True
    numbers: torch.Tensor | float = 0.0
    weights: list[torch.Tensor] = field(default_factory=list)

    def uniform(self, shape, device):
        return torch.as_tensor(self.numbers, dtype=torch.float32, device=device).expand(shape)

    def draw(self, weights):
        self.weights.append(weights)
        return weights.argmax(dim=-1)


def random_laws(*shape: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(*shape, generator=generator)).softmax(dim=-1)


def accept_one(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, numbers, verified=None) -> tuple:
    """Verify one draft token in each row against the same laws; return who passed and what the bonus is drawn from."""
    rows = len(tokens)
    sampler = Scripted(numbers=numbers)
    lengths = torch.ones(rows, dtype=torch.long) if verified is None else verified.long()
    target_probs = torch.stack([p, torch.full_like(p, 1 / len(p))]).expand(rows, -1, -1)
    result = accept(tokens[:, None], q.expand(rows, 1, -1), target_probs, lengths, sampler)
    return result.num_accepted, sampler.weights[0]


def law_of_accept(p: torch.Tensor, q: torch.Tensor, verified: torch.Tensor | None = None) -> torch.Tensor:
    """Exact law of the first committed token under `accept`, every draft token weighted by its probability.

    The chance that a draft token passes is read off at the two sides of p / q.
    """
    p, q = p.float(), q.float()
    tokens = torch.arange(len(p))
    ratio = (p / q).clamp(max=1.0)
    below, above = ratio * (1 - 1e-5), (ratio * (1 + 1e-5)).clamp(max=1 - 2**-24)
    passed_below, _ = accept_one(p, q, tokens, below[:, None], verified)
    passed_above, weights = accept_one(p, q, tokens, above[:, None], verified)
    sent = torch.ones(len(p), dtype=torch.bool) if verified is None else verified
    assert torch.equal(passed_below.bool(), sent & (p > 0))
    assert torch.equal(passed_above.bool(), sent & (p >= q))
    chance = torch.where(sent, ratio.double(), 0.0)
    weights = weights.double() / weights.double().sum(dim=-1, keepdim=True)
    # Where a token surely passes, `weights` is the law after it, and its share below is zero.
    return q.double() * chance + ((q.double() * (1 - chance))[:, None] * weights).sum(dim=0)


@pytest.mark.parametrize("vocab_size", [2, 3, 8, 50])
@pytest.mark.parametrize("seed", range(10))
def test_one_position_has_exactly_the_targets_law(vocab_size, seed):
    p, q = random_laws(2, vocab_size, seed=seed)
    law = law_of_accept(p, q)
    torch.testing.assert_close(law, speculative_law(p, q), atol=1e-5, rtol=0)
    torch.testing.assert_close(law, p.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]),
        ([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]),  # the target forbids a token
        ([1.0, 0.0, 0.0], [0.2, 0.3, 0.5]),
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),  # greedy drafter and target that disagree
        ([0.4, 0.3, 0.3], [0.4, 0.3, 0.3]),
    ],
)
def test_one_position_has_the_targets_law_in_cases_by_hand(p, q):
    p, q = torch.tensor(p), torch.tensor(q)
    drawable = q > 0
    law = speculative_law(p, q)
    torch.testing.assert_close(law, p.double(), atol=1e-7, rtol=0)
    if bool(drawable.all()):
        torch.testing.assert_close(law_of_accept(p, q), law, atol=1e-5, rtol=0)
    tokens = drawable.nonzero()[:, 0]
    passed, weights = accept_one(p, q, tokens, 1 - 2**-24)
    for token, ok, weight in zip(tokens, passed, weights, strict=True):
        assert bool(ok) == bool(p[token] >= q[token])
        if not ok:
            residual = (p - q).clamp_min(0)
            torch.testing.assert_close(weight / weight.sum(), residual / residual.sum())


def test_a_threshold_on_the_tokens_own_probability_shifts_the_law():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    biased = torch.tensor([0.55, 0.33, 0.12], dtype=torch.float64)
    torch.testing.assert_close(own_probability_law(p, q, 0.2), biased, atol=1e-7, rtol=0)
    torch.testing.assert_close(law_of_accept(p, q, verified=q >= 0.2), biased, atol=1e-5, rtol=0)


@pytest.mark.parametrize("verified", [True, False])
def test_a_decision_that_ignores_the_token_keeps_the_law(verified):
    p, q = random_laws(2, 5)
    everywhere = torch.full((5,), verified)
    torch.testing.assert_close(law_of_accept(p, q, everywhere), p.double(), atol=1e-5, rtol=0)


def test_rounds_of_several_tokens_follow_the_targets_law():
    """Order-one laws for drafter and target; rows differ in length. The first 4 tokens, counted over 40 000 rounds.

    A round that ends early is continued by the target itself, as the next rounds would on average.
    """
    torch.manual_seed(0)
    rows, positions, vocab = 40_000, 3, 4
    p = random_laws(vocab, vocab, seed=1, sharpness=1.0)
    q = (p + random_laws(vocab, vocab, seed=2, sharpness=1.0)) / 2
    sampler = Sampler(do_sample=True)
    anchor, drafted = torch.zeros(rows, dtype=torch.long), []
    for _ in range(positions):
        drafted.append(sampler.draw(q[drafted[-1] if drafted else anchor]))
    before = torch.stack([anchor, *drafted], dim=1)
    draft_tokens = before[:, 1:]
    lengths = torch.arange(rows) % (positions + 1)
    result = accept(draft_tokens, q[before[:, :-1]], p[before], lengths, sampler)
    assert all(int((result.num_accepted == k).sum()) > 3000 for k in range(positions + 1))
    assert bool((result.num_accepted <= lengths).all())
    tokens = torch.zeros(rows, positions + 1, dtype=torch.long)
    for k in range(positions + 1):
        previous = anchor if k == 0 else tokens[:, k - 1]
        offered = draft_tokens[:, min(k, positions - 1)]
        tokens[:, k] = torch.where(
            k < result.num_accepted,
            offered,
            torch.where(k == result.num_accepted, result.bonus_token, sampler.draw(p[previous])),
        )
    law = p[0].double()
    for _ in range(positions):
        law = law[..., None] * p.double()
    assert chi_square(count(tokens, vocab), law).p_value >= FAIL_BELOW
    drafters_law = q[0].double()
    for _ in range(positions):
        drafters_law = drafters_law[..., None] * q.double()
    assert chi_square(count(tokens, vocab), drafters_law).p_value < FAIL_BELOW


@pytest.mark.parametrize("seed", range(5))
def test_greedy_accepts_the_drafts_that_equal_the_targets_best_token(seed):
    torch.manual_seed(seed)
    rows, positions, vocab = 200, 5, 3
    draft_probs = GREEDY.distribution(torch.randn(rows, positions, vocab))
    target_probs = GREEDY.distribution(torch.randn(rows, positions + 1, vocab))
    draft_tokens, best = draft_probs.argmax(dim=-1), target_probs.argmax(dim=-1)
    lengths = torch.randint(0, positions + 1, (rows,))
    result = accept(draft_tokens, draft_probs, target_probs, lengths, GREEDY)
    for row in range(rows):
        expected = 0
        while expected < lengths[row] and draft_tokens[row, expected] == best[row, expected]:
            expected += 1
        assert result.num_accepted[row] == expected
        assert result.bonus_token[row] == best[row, expected]


def test_a_token_of_probability_zero_is_rejected_even_when_the_uniform_number_is_zero():
    p, q = torch.tensor([0.0, 0.7, 0.3]), torch.tensor([0.8, 0.1, 0.1])
    passed, weights = accept_one(p, q, torch.tensor([0, 1]), numbers=0.0)
    assert passed.tolist() == [0, 1]
    torch.testing.assert_close(weights[0], torch.tensor([0.0, 0.6, 0.2]))


def test_a_residual_without_mass_falls_back_to_the_targets_law():
    q = torch.tensor([0.5, 0.3, 0.2])
    for p in (q, q - torch.tensor([0.0, 0.0, 1e-7])):
        passed, weights = accept_one(p, q, torch.tensor([2]), numbers=1.0)  # rejects, which rounding alone can do
        assert passed.tolist() == [0]
        assert torch.equal(weights[0], p)


def test_without_drafts_the_token_comes_from_the_target():
    p, sampler = random_laws(4, 1, 7), Scripted()
    empty = torch.zeros(4, 0, dtype=torch.long)
    result = accept(empty, torch.zeros(4, 0, 7), p, torch.zeros(4, dtype=torch.long), sampler)
    assert result.num_accepted.tolist() == [0, 0, 0, 0]
    assert torch.equal(sampler.weights[0], p[:, 0])
    assert torch.equal(result.bonus_token, p[:, 0].argmax(dim=-1))


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_nothing_beyond_the_verification_length_is_accepted_and_the_bonus_is_not_reduced(length):
    sampler = Scripted()
    p = random_laws(1, 4, 6)
    tokens, q = torch.tensor([[1, 2, 3]]), random_laws(1, 3, 6, seed=5)
    result = accept(tokens, q, p, torch.tensor([length]), sampler)
    assert result.num_accepted.tolist() == [length]
    assert torch.equal(sampler.weights[0][0], p[0, length])


def test_a_rejection_takes_the_residual_of_its_own_position():
    p, q, tokens = random_laws(1, 4, 6), random_laws(1, 3, 6, seed=5), torch.tensor([[1, 2, 3]])
    for rejected in range(3):
        numbers = torch.zeros(1, 3)
        numbers[0, rejected] = 1e6
        sampler = Scripted(numbers=numbers)
        result = accept(tokens, q, p, torch.tensor([3]), sampler)
        assert result.num_accepted.tolist() == [rejected]
        torch.testing.assert_close(sampler.weights[0][0], (p[0, rejected] - q[0, rejected]).clamp_min(0))


def test_a_later_pass_does_not_undo_a_rejection():
    numbers = torch.tensor([[0.0, 1e6, 0.0]])
    result = accept(
        torch.zeros(1, 3, dtype=torch.long),
        torch.full((1, 3, 2), 0.5),
        torch.full((1, 4, 2), 0.5),
        torch.tensor([3]),
        Scripted(numbers=numbers),
    )
    assert result.num_accepted.tolist() == [1]


def test_rows_of_a_ragged_batch_do_not_see_each_other():
    torch.manual_seed(0)
    rows, positions, vocab = 64, 4, 5
    p, q = random_laws(rows, positions + 1, vocab), random_laws(rows, positions, vocab, seed=3)
    tokens, numbers = torch.randint(0, vocab, (rows, positions)), torch.rand(rows, positions)
    lengths = torch.randint(0, positions + 1, (rows,))
    together = Scripted(numbers=numbers)
    result = accept(tokens, q, p, lengths, together)
    for row in range(rows):
        own, alone = slice(row, row + 1), Scripted(numbers=numbers[row : row + 1])
        expected = accept(tokens[own], q[own], p[own], lengths[own], alone)
        assert result.num_accepted[own].equal(expected.num_accepted)
        assert result.bonus_token[own].equal(expected.bonus_token)
        assert together.weights[0][own].equal(alone.weights[0])


def test_invalid_draft_probabilities_beyond_the_length_change_nothing():
    """A reduced vocabulary can run out of tokens; its draft is cut there, and what follows is meaningless."""
    p, q, tokens = random_laws(1, 4, 6), random_laws(1, 3, 6, seed=5), torch.tensor([[1, 2, 3]])
    q[:, 2] = torch.nan
    result = accept(tokens, q, p, torch.tensor([2]), sampler := Scripted())
    assert result.num_accepted.tolist() == [2]
    assert torch.equal(sampler.weights[0][0], p[0, 2])


@pytest.mark.parametrize(
    ("draft_shape", "target_shape"),
    [((2, 2, 5), (2, 4, 5)), ((2, 3, 5), (2, 3, 5)), ((1, 3, 5), (2, 4, 5)), ((2, 3, 5), (1, 4, 5))],
)
def test_shapes_that_disagree_are_named(draft_shape, target_shape):
    with pytest.raises(ValueError, match=r"Expected draft_probs \(2, 3, V\) and target_probs \(2, 4, V\)"):
        accept(
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(draft_shape),
            torch.ones(target_shape),
            torch.ones(2, dtype=torch.long),
            GREEDY,
        )


def test_the_result_is_an_acceptance_of_one_number_and_one_token_a_row():
    p, q = random_laws(3, 5, 6), random_laws(3, 4, 6)
    result = accept(torch.zeros(3, 4, dtype=torch.long), q, p, torch.tensor([0, 2, 4]), Sampler(do_sample=True))
    assert isinstance(result, Acceptance)
    assert result.num_accepted.shape == result.bonus_token.shape == (3,)
    assert result.num_accepted.dtype == result.bonus_token.dtype == torch.long
