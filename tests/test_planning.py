"""The planner hands policies the seconds of a whole step."""

import pytest
import torch
from conftest import make_drafter, make_target

from dspark_hf.cost_curve import CostCurve, ForwardCosts
from dspark_hf.modeling.modeling_dspark import DSparkDraft
from dspark_hf.planning import Planner
from dspark_hf.scheduling import GlobalThroughputPolicy, ThroughputPolicy


@pytest.mark.parametrize("policy", [ThroughputPolicy, GlobalThroughputPolicy])
@pytest.mark.parametrize(("draft_seconds", "length"), [(0.0, 0), (1.0, 1)])
def test_a_drafting_pass_that_was_made_counts_in_the_step(monkeypatch, policy, draft_seconds, length):
    """Verifying costs 1.3 plain forwards for 1.2 tokens: a loss by itself, but not once drafting took as long again."""
    costs = ForwardCosts(target_seconds=[1.0, 1.3], draft_seconds=[draft_seconds])
    monkeypatch.setattr(CostCurve, "costs", lambda self, rows, context: costs)
    target = make_target(num_hidden_layers=2)
    planner = Planner(policy(), target, make_drafter(target, block_size=1), rows=1, most=1, greedy=True)
    draft = DSparkDraft(
        tokens=torch.zeros(1, 1, dtype=torch.long),
        probs=torch.zeros(1, 1, 64),
        confidence_logits=torch.logit(torch.tensor([[0.2]])),
    )
    assert planner.lengths(draft, [1], [False], context=8).tolist() == [length]
