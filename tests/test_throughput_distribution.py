"""Sampling with a throughput policy follows the target's law, on flat, jagged and cliff-shaped cost curves.

The confidences depend on the token before, as the Markov feature makes them. Each test fails by chance with a
probability below 1e-9 a p-value; the retrospective search, wrong when sampling, must fail the same test.
"""

import pytest
from test_distribution import FAIL_BELOW, PROMPTS, good_drafter, tiny_target, transition_p_values, write_text

from dspark_hf.cost_curve import CostCurve, ForwardCosts
from dspark_hf.scheduling import GlobalThroughputPolicy


CURVES = {
    "flat": [1.0, 1.0, 1.0, 1.0, 1.0],
    "jagged": [1.0, 1.75, 1.7, 2.6, 2.2],
    "cliff": [1.0, 1.3, 1.35, 2.6, 2.7],
}
HUMP = [1.0, 2.0, 2.05, 3.5, 3.6]
"""Verifying pays only if the second token is likely too, which the first one decides (Appendix A)."""
TOKENS = 600


def drafter_with(schedule: str, monkeypatch, curve: list[float]):
    monkeypatch.setattr(CostCurve, "costs", lambda self, rows, context: ForwardCosts(curve, [0.0] * len(curve)))
    drafter = good_drafter(tiny_target(order_one=True))
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    return drafter


def p_values(drafter, rows: int, tokens: int = TOKENS) -> tuple[dict[str, float], list[int]]:
    output = write_text(tiny_target(order_one=True), drafter, rows, tokens, token_by_token=False)
    found = {
        f"{row} {name}": p
        for row, text in enumerate(output.sequences[:, PROMPTS.shape[1] - 1 :])
        for name, p in transition_p_values(text, {}).items()
    }
    return found, output.statistics.verification_lengths


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("schedule", ["throughput", "throughput_async"])
def test_sampled_text_follows_the_targets_law(monkeypatch, schedule, curve, rows):
    found, lengths = p_values(drafter_with(schedule, monkeypatch, curve), rows, TOKENS if rows == 1 else 300)
    assert min(found.values()) > FAIL_BELOW, found
    if curve != CURVES["flat"] and rows == 1:
        assert sum(count > 20 for count in lengths) > 1  # the policy did choose


@pytest.mark.slow  # a text long enough to be sure; test_throughput.py enumerates the paper's example exactly
def test_the_retrospective_search_is_caught(monkeypatch):
    drafter = drafter_with("throughput", monkeypatch, HUMP)
    monkeypatch.setattr("dspark_hf.options.make_policy", lambda *args, **kwargs: GlobalThroughputPolicy())
    monkeypatch.setattr("dspark_hf.gating.DraftGate.is_open", True)  # on such a curve it would soon stop drafting
    found, lengths = p_values(drafter, 1, 4000)
    assert sum(count > 20 for count in lengths) > 1
    assert min(found.values()) < FAIL_BELOW, found
