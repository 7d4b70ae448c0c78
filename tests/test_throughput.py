"""Throughput policies: Algorithm 1, its asynchronous form and the global search, against loops and the paper's example."""

import itertools

import pytest
import torch
from reference.scheduling import algorithm_1, best_throughput, throughput

from dspark_hf.scheduling import AsyncThroughputPolicy, Candidates, GlobalThroughputPolicy, ThroughputPolicy
from dspark_hf.verification_cost import FlattenedCost, PaddedCost


COSTS = {"padded": PaddedCost, "flattened": FlattenedCost}
CURVES = ("convex", "flat", "jagged", "cliff")


def curve(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    """Seconds of a forward."""
    if kind == "flat":
        return torch.ones(size, dtype=torch.double)
    if kind == "cliff":
        return torch.where(torch.arange(size) < size // 2, 1.0, 3.0).double()
    increments = torch.rand(size, generator=generator, dtype=torch.double) * 0.6
    if kind == "convex":
        increments = increments.sort().values
    return 1 + increments.cumsum(dim=0) if kind == "convex" else 1 + increments * 3


class Case:
    """Random survivals, caps and rows that have ended."""

    def __init__(self, seed: int, kind: str, padded: bool, rows=3, positions=3):
        generator = torch.Generator().manual_seed(seed)
        self.confidence = torch.rand(rows, positions, generator=generator)
        self.confidence[torch.rand(rows, positions, generator=generator) < 0.1] = 0.0
        self.confidence[torch.rand(rows, positions, generator=generator) < 0.1] = 1.0  # ties
        self.caps = torch.randint(positions + 1, (rows,), generator=generator)
        self.active = torch.rand(rows, generator=generator) < 0.9
        self.caps *= self.active
        self.padded = padded
        self.seconds = curve(kind, rows * (positions + 1), generator)
        self.cost = (PaddedCost if padded else FlattenedCost)(self.seconds)

    @property
    def candidates(self) -> Candidates:
        return Candidates(self.confidence, self.caps, self.active, self.cost)

    def arguments(self):
        survival = self.confidence.cumprod(dim=1).double()
        caps = torch.minimum(self.caps, (survival > 0).sum(dim=1))  # candidates of survival 0 are dropped
        return survival.tolist(), caps.tolist(), self.seconds.tolist(), self.padded, int(self.active.sum())

    def throughput(self, lengths: torch.Tensor) -> float:
        survival, _, seconds, padded, active = self.arguments()
        return throughput(lengths.tolist(), survival, seconds, padded, active)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", CURVES)
def test_the_early_stop_is_algorithm_1(kind, padded):
    for seed in range(30):
        case = Case(seed, kind, padded)
        lengths = ThroughputPolicy().verification_lengths(case.candidates)
        # Of equal survivals at one position the loops may take another row: what counts is how much, and what it gives.
        expected = algorithm_1(*case.arguments())
        # In a padded batch filling up is free, also with candidates of survival 0.
        size = max if padded else sum
        assert size(lengths.tolist()) == size(expected), seed
        assert case.throughput(lengths) == pytest.approx(case.throughput(torch.tensor(expected)))
        assert (lengths <= case.caps).all()


@pytest.mark.parametrize("padded", [True, False])
def test_the_early_stop_is_best_where_the_step_time_is_convex(padded):
    for seed in range(30):
        case = Case(seed, "convex", padded)
        lengths = ThroughputPolicy().verification_lengths(case.candidates)
        assert case.throughput(lengths) == pytest.approx(best_throughput(*case.arguments())), seed


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", CURVES)
def test_the_global_search_is_best_on_any_curve(kind, padded):
    for seed in range(30):
        case = Case(seed, kind, padded)
        lengths = GlobalThroughputPolicy().verification_lengths(case.candidates)
        assert case.throughput(lengths) == pytest.approx(best_throughput(*case.arguments())), seed
        assert (lengths <= case.caps).all()


def test_the_early_stop_is_trapped_in_front_of_a_cliff_and_the_global_search_is_not():
    cost = PaddedCost(torch.tensor([1.0, 2.0, 1.7, 1.8, 1.9], dtype=torch.double))
    candidates = Candidates(torch.full((1, 4), 0.9), torch.tensor([4]), torch.tensor([True]), cost)
    assert ThroughputPolicy().verification_lengths(candidates).tolist() == [0]
    assert GlobalThroughputPolicy().verification_lengths(candidates).tolist() == [4]


@pytest.mark.parametrize("policy", [ThroughputPolicy, GlobalThroughputPolicy])
@pytest.mark.parametrize("cost", COSTS.values())
def test_a_flat_curve_verifies_everything_and_a_steep_one_nothing(policy, cost):
    confidence, caps = torch.full((2, 3), 0.5), torch.tensor([3, 2])
    flat = Candidates(confidence, caps, torch.tensor([True, True]), cost(torch.ones(8, dtype=torch.double)))
    assert policy().verification_lengths(flat).tolist() == [3, 2]
    steep = Candidates(
        confidence, caps, torch.tensor([True, True]), cost(torch.arange(1.0, 9.0, dtype=torch.double) ** 2)
    )
    assert policy().verification_lengths(steep).tolist() == [0, 0]


def test_candidates_of_survival_zero_are_never_worth_it():
    confidence = torch.tensor([[1.0, 0.0, 1.0]])
    falling = torch.tensor(
        [1.0, 0.9, 0.1, 0.05], dtype=torch.double
    )  # more tokens, less time: as measured now and then
    for cost in COSTS.values():
        candidates = Candidates(confidence, torch.tensor([3]), torch.tensor([True]), cost(falling))
        assert GlobalThroughputPolicy().verification_lengths(candidates).tolist() == [1]


# Appendix A


SPS = torch.tensor([1.0, 0.5, 0.45], dtype=torch.double)
TARGET, DRAFT = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}
SECOND_CONFIDENCE = {"A": 0.9, "B": 0.0}


def first_token_distribution(policy, cost) -> dict[str, float]:
    """Exact distribution of the first output token, over what is drafted, accepted and drawn instead."""
    output = dict.fromkeys(TARGET, 0.0)
    for drafted, probability in DRAFT.items():
        confidence = torch.tensor([[0.8, SECOND_CONFIDENCE[drafted]]])
        candidates = Candidates(confidence, torch.tensor([2]), torch.tensor([True]), cost(1 / SPS))
        verified = policy().verification_lengths(candidates).item() >= 1
        accepted = min(1.0, TARGET[drafted] / DRAFT[drafted]) if verified else 0.0
        residual = {token: max(0.0, TARGET[token] - DRAFT[token]) for token in TARGET} if verified else TARGET
        output[drafted] += probability * accepted
        for token in TARGET:
            output[token] += probability * (1 - accepted) * residual[token] / max(sum(residual.values()), 1e-9)
    return output


@pytest.mark.parametrize("cost", COSTS.values())
def test_appendix_a_early_stop_keeps_the_targets_distribution(cost):
    assert first_token_distribution(ThroughputPolicy, cost) == pytest.approx(TARGET)


@pytest.mark.parametrize("cost", COSTS.values())
def test_appendix_a_retrospective_search_fails_the_same_test(cost):
    assert first_token_distribution(GlobalThroughputPolicy, cost) == pytest.approx({"A": 0.85, "B": 0.15})


@pytest.mark.parametrize("cost", COSTS.values())
@pytest.mark.parametrize(("token", "theta_2"), [("A", 1.134), ("B", 0.81)])
def test_appendix_a_throughputs(cost, token, theta_2):
    # Survival 0.8 times 0.9 for A; for B the candidate of survival 0 is no choice, and Θ is that of verifying it anyway.
    survival = torch.tensor([[0.8, 0.8 * SECOND_CONFIDENCE[token]]], dtype=torch.double)
    path = cost(1 / SPS).path(survival, torch.ones(1, 2, dtype=torch.bool))
    found = path.throughput(torch.tensor(1)).tolist()
    assert found[:2] == pytest.approx([1.0, 0.9])
    if token == "A":
        assert found[2] == pytest.approx(theta_2)
    else:
        assert found[2] == 0
        assert (1 + 0.8) * float(SPS[2]) == pytest.approx(theta_2)


# Non-anticipation


def admitted(policy, confidence, case) -> torch.Tensor:
    lengths = policy.verification_lengths(Candidates(confidence, case.caps, case.active, case.cost))
    return torch.arange(1, confidence.shape[1] + 1) <= lengths[:, None]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize("policy", [ThroughputPolicy, AsyncThroughputPolicy])
def test_a_token_never_decides_whether_it_is_admitted(policy, kind, padded):
    """c_{k+1} and what follows are all that x_k can change."""
    changes = 0
    for seed in range(25):
        case = Case(seed, kind, padded)
        generator = torch.Generator().manual_seed(1000 + seed)
        history = [torch.rand(3, 3, generator=generator) for _ in range(2)]
        for row, k in itertools.product(range(3), range(1, 4)):
            other = case.confidence.clone()
            other[row, k:] = torch.randint(2, (3 - k,), generator=generator).float()
            found = []
            for confidence in (case.confidence, other):
                used = policy()
                for past in history:
                    admitted(used, past, case)
                found.append(admitted(used, confidence, case))
            assert found[0][row, k - 1] == found[1][row, k - 1], (seed, row, k)
            changes += int((found[0] != found[1]).any())
    # The width of a padded batch is known before an asynchronous round, so there nothing can change.
    assert (changes > 0) or (policy is AsyncThroughputPolicy and padded)


@pytest.mark.parametrize("padded", [True, False])
def test_the_global_search_anticipates(padded):
    """Negative control of the test above."""
    with pytest.raises(AssertionError):
        test_a_token_never_decides_whether_it_is_admitted(GlobalThroughputPolicy, "jagged", padded)


# The asynchronous form


@pytest.mark.parametrize("padded", [True, False])
def test_the_asynchronous_form_uses_the_capacity_of_two_rounds_before(padded):
    for seed in range(30):
        cases = [Case(seed * 10 + t, "jagged", padded) for t in range(6)]
        for case in cases:  # one call: the same rows, verifier and caps
            case.caps, case.active, case.cost, case.seconds = (
                cases[0].caps,
                cases[0].active,
                cases[0].cost,
                cases[0].seconds,
            )
        policy = AsyncThroughputPolicy()
        for t, case in enumerate(cases):
            lengths = policy.verification_lengths(case.candidates)
            if t < 2:
                assert torch.equal(lengths, case.caps)
                continue
            best = GlobalThroughputPolicy().verification_lengths(cases[t - 2].candidates)
            capacity = int(best.max() if padded else best.sum())
            ranked = sorted(
                (-float(a), j, r)
                for r, row in enumerate(case.confidence.cumprod(dim=1))
                for j, a in enumerate(row)
                if j < case.caps[r] and a > 0
            )
            if padded:
                expected = torch.minimum(case.caps, torch.tensor(capacity))
            else:
                expected = torch.bincount(
                    torch.tensor([r for _, _, r in ranked[:capacity]], dtype=torch.long), minlength=3
                )
            assert int(lengths.sum()) == int(expected.sum())
            assert case.throughput(lengths) == pytest.approx(case.throughput(expected))


def test_rows_that_ended_no_longer_count_in_the_capacity():
    cost = FlattenedCost(torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0], dtype=torch.double))
    policy = AsyncThroughputPolicy()
    confidence, both = torch.tensor([[0.9, 0.8, 0.7], [0.95, 0.9, 0.9]]), torch.tensor([True, True])
    for _ in range(2):
        policy.verification_lengths(Candidates(confidence, torch.tensor([3, 3]), both, cost))
    alone = Candidates(confidence, torch.tensor([3, 0]), torch.tensor([True, False]), cost)
    assert policy.verification_lengths(alone).tolist() == [2, 0]  # two tokens still fit in front of the cliff


def test_a_history_of_shorter_drafts_does_not_bind():
    cost = PaddedCost(torch.tensor([1.0, 5.0, 5.0, 5.0], dtype=torch.double))
    policy, active = AsyncThroughputPolicy(), torch.tensor([True])
    for _ in range(2):
        policy.verification_lengths(Candidates(torch.full((1, 1), 0.1), torch.tensor([1]), active, cost))
    assert policy.verification_lengths(
        Candidates(torch.full((1, 3), 0.1), torch.tensor([3]), active, cost)
    ).tolist() == [3]


@pytest.mark.parametrize("policy", [ThroughputPolicy, GlobalThroughputPolicy, AsyncThroughputPolicy])
def test_throughput_needs_confidences_and_a_cost(policy):
    caps, active, cost = torch.tensor([2]), torch.tensor([True]), PaddedCost(torch.ones(3, dtype=torch.double))
    with pytest.raises(ValueError, match="no confidence head"):
        policy().verification_lengths(Candidates(None, caps, active, cost))
    used, without_cost = policy(), Candidates(torch.rand(1, 2), caps, active)
    if policy is AsyncThroughputPolicy:  # its first two rounds look at nothing
        for _ in range(2):
            used.verification_lengths(without_cost)
    with pytest.raises(ValueError, match="verifier's cost"):
        used.verification_lengths(without_cost)
