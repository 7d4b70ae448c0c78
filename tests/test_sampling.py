"""A token and the law it was drawn from are one thing: float32, never a token of weight zero, greedy without chance."""

import pytest
import torch
from conftest import make_drafter, make_target
from reference.chi_square import chi_square

from dspark_hf import DSparkDraftModel
from dspark_hf.sampling import Sampler


SAMPLER = Sampler(do_sample=True)
GREEDY = Sampler(do_sample=False)
FAIL_BELOW = 1e-9  # for each of 6 p-values; the seeds are fixed


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_draws_follow_the_weights(sharpness, scale):
    torch.manual_seed(0)
    weights = scale * (sharpness * torch.randn(8)).softmax(dim=-1)
    drawn = SAMPLER.draw(weights.expand(40_000, -1)).bincount(minlength=8)
    assert chi_square(drawn, weights.double() / weights.double().sum()).p_value >= FAIL_BELOW
    other = weights.double() + 0.03 * weights.double().sum() * torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0])
    if bool((other > 0).all()):  # a bias of 0.03 would be seen
        assert chi_square(drawn, other / other.sum()).p_value < FAIL_BELOW


def test_each_row_is_drawn_from_its_own_weights():
    torch.manual_seed(0)
    weights = torch.eye(5)[torch.tensor([3, 1, 4, 0])].view(2, 2, 5)
    assert SAMPLER.draw(weights).tolist() == [[3, 1], [4, 0]]


@pytest.mark.parametrize("noise", [0.0, 2.0**-149, 2.0**-24, 100.0, 1e30])
def test_a_zero_weight_is_never_drawn_whatever_the_noise(monkeypatch, noise):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, *, generator: self.fill_(noise))
    for weight in (1.0, 0.3, 1e-8):
        weights = torch.zeros(6)
        weights[4] = weight
        assert SAMPLER.draw(weights) == 4


def test_a_zero_weight_is_not_drawn_when_it_alone_gets_extreme_noise(monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "exponential_", lambda self, *, generator: self.copy_(torch.tensor([0.0, 88.0, 0.0]))
    )
    assert SAMPLER.draw(torch.tensor([0.0, 1e-6, 0.0])) == 1


def test_many_draws_never_hit_a_zero_weight():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 0.9, 0.0, 0.1, 0.0]).expand(50_000, -1)
    assert SAMPLER.draw(weights).unique().tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampler", [SAMPLER, GREEDY])
def test_distributions_are_float32_and_normalised(sampler, dtype):
    torch.manual_seed(0)
    scores = (3 * torch.randn(4, 7, 100)).to(dtype)
    probs = sampler.distribution(scores)
    assert probs.dtype == torch.float32
    assert probs.shape == scores.shape
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(4, 7))
    expected = scores.double().softmax(dim=-1)
    if sampler.do_sample:  # not the softmax rounded to the scores' dtype, which is off by up to 4e-3
        torch.testing.assert_close(probs.double(), expected, atol=1e-6, rtol=1e-5)


def test_masked_scores_have_probability_zero():
    probs = SAMPLER.distribution(torch.tensor([0.5, -torch.inf, 1.0]))
    assert probs[1] == 0


def test_greedy_is_the_one_hot_law_at_the_first_best_score():
    scores = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 4.0]])
    assert GREEDY.distribution(scores).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert GREEDY.draw(GREEDY.distribution(scores)).tolist() == [1, 0]


def test_greedy_uses_no_randomness():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    GREEDY.draw(GREEDY.distribution(torch.randn(3, 9, generator=torch.Generator().manual_seed(1))))
    assert GREEDY.uniform((3, 4), torch.device("cpu")).eq(0).all()
    assert torch.get_rng_state().equal(before)


def test_greedy_generation_uses_no_randomness():
    target = make_target()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=make_drafter_quietly(target), max_new_tokens=20)
    assert torch.get_rng_state().equal(before)


def make_drafter_quietly(target) -> DSparkDraftModel:
    """A drafter, made without touching the global random state."""
    with torch.random.fork_rng():
        return make_drafter(target)


def test_a_generator_replaces_the_global_source():
    weights = torch.ones(100, 10)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn, numbers = [], []
    for _ in range(2):
        sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(7))
        drawn.append(sampler.draw(weights))
        numbers.append(sampler.uniform((5,), torch.device("cpu")))
    assert torch.get_rng_state().equal(before)
    assert drawn[0].equal(drawn[1])
    assert numbers[0].equal(numbers[1])


def test_uniform_numbers_are_float32_in_the_half_open_unit_interval():
    torch.manual_seed(0)
    numbers = SAMPLER.uniform((1000, 100), torch.device("cpu"))
    assert numbers.dtype == torch.float32
    assert 0 <= numbers.min() < 1e-3
    assert 0.999 < numbers.max() < 1
    assert abs(float(numbers.double().mean()) - 0.5) < 0.01


class Redrawn(DSparkDraftModel):
    """Draws every token again, from the declared law under the same seed, and compares."""

    compared = 0

    def draft(self, hidden_states, anchor, choose, *rest):
        def draw_and_compare(index, logits, drafted):
            before = torch.get_rng_state()
            tokens, probs = choose(index, logits, drafted)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            assert probs.dtype == torch.float32
            assert SAMPLER.draw(probs).equal(tokens)
            assert torch.get_rng_state().equal(after)
            type(self).compared += tokens.numel()
            return tokens, probs

        drawn = super().draft(hidden_states, anchor, draw_and_compare, *rest)
        assert (drawn.probs.gather(-1, drawn.tokens[..., None]) > 0).all()
        return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.7, "repetition_penalty": 1.4}])
def test_drafted_tokens_are_those_that_the_declared_law_gives_under_the_same_seed(dtype, settings):
    """Precision slips, such as a draw in bfloat16, are too small for a chi-square test."""
    target = make_target(eos_token_id=None).to(dtype)
    drafter = make_drafter(target).to(dtype)
    drafter.__class__, Redrawn.compared = Redrawn, 0
    torch.manual_seed(0)
    target.generate(
        torch.tensor([[5, 6, 7]] * 8),
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=20,
        **({"top_k": 0} | settings),
    )
    assert Redrawn.compared > 200
