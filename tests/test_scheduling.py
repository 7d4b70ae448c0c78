"""Policies: what they verify, and that whether a token is verified never depends on that token."""

import math

import pytest
import torch
from conftest import make_drafter, make_target

from dspark_hf import DSparkDraftModel
from dspark_hf.modeling.modeling_dspark import DSparkDraft
from dspark_hf.scheduling import (
    AsyncThroughputPolicy,
    Candidates,
    ConstantPolicy,
    GlobalThroughputPolicy,
    ThresholdPolicy,
    ThroughputPolicy,
    make_policy,
)


BLOCK = 4
VOCAB = 64
ROWS = 40


def lengths(policy, confidence, caps) -> list[int]:
    confidence = None if confidence is None else torch.tensor(confidence)
    return policy.verification_lengths(candidates(confidence, torch.tensor(caps))).tolist()


def candidates(confidence, caps) -> Candidates:
    return Candidates(confidence, caps, torch.ones_like(caps, dtype=torch.bool))


@pytest.mark.parametrize("confidence", [None, [[0.0] * 4, [1.0] * 4]])
def test_constant_verifies_the_cap_whatever_the_confidence(confidence):
    assert lengths(ConstantPolicy(), confidence, [3, 0]) == [3, 0]


@pytest.mark.parametrize(
    ("confidence", "length"),
    [
        ([0.9, 0.8, 0.7, 0.6], 4),
        ([0.9, 0.4, 0.9, 0.9], 1),  # the first that is not confident ends it
        ([0.4, 0.9, 0.9, 0.9], 0),
        ([0.5, 0.5, 0.49, 0.5], 2),  # equal to the threshold is confident
        ([0.5, 0.5, 0.5, 0.5], 4),
        ([math.nan, 0.9, 0.9, 0.9], 0),
    ],
)
def test_threshold_verifies_up_to_the_first_token_below_it(confidence, length):
    assert lengths(ThresholdPolicy(0.5), [confidence], [4]) == [length]


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 3), (1.0, 1)])
def test_the_ends_of_the_range_are_thresholds_too(threshold, length):
    assert lengths(ThresholdPolicy(threshold), [[1.0, 0.0, 0.5]], [3]) == [length]


def test_caps_bound_each_row():
    confidence = [[0.9, 0.9, 0.9], [0.9, 0.9, 0.1], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]]
    assert lengths(ThresholdPolicy(0.5), confidence, [2, 3, 3, 0]) == [2, 2, 0, 0]


def test_threshold_needs_confidences():
    with pytest.raises(ValueError, match="no confidence head"):
        lengths(ThresholdPolicy(0.5), None, [2])


def test_later_confidences_never_change_whether_a_token_is_verified():
    torch.manual_seed(0)
    policy, caps = ThresholdPolicy(0.5), torch.full((200,), BLOCK)
    for k in range(1, BLOCK + 1):
        confidence = torch.rand(200, BLOCK)
        changed = confidence.clone()
        changed[:, k:] = torch.rand(200, BLOCK - k)
        before, after = (policy.verification_lengths(candidates(c, caps)) for c in (confidence, changed))
        assert (before >= k).equal(after >= k)
        assert k == BLOCK or not before.equal(after)


# make_policy


def test_the_constant_schedule_needs_no_threshold():
    assert make_policy("constant", None, has_confidence=False, greedy=False) == ConstantPolicy()


def test_the_threshold_schedule_does_not_fall_back_silently():
    with pytest.raises(ValueError, match="needs assistant_confidence_threshold"):
        make_policy("threshold", None, has_confidence=True, greedy=False)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_threshold_is_made_from_its_number(threshold):
    assert make_policy("threshold", threshold, has_confidence=True, greedy=True) == ThresholdPolicy(threshold)


@pytest.mark.parametrize(
    ("schedule", "threshold", "has_confidence", "message"),
    [
        (
            "heuristic",
            None,
            True,
            "Unknown num_assistant_tokens_schedule 'heuristic'.*'threshold', 'throughput', 'throughput_async'",
        ),
        ("", 0.5, True, "Unknown"),
        ("constant", 0.5, True, "only with num_assistant_tokens_schedule='threshold', got 'constant'"),
        ("threshold", -0.1, True, r"must lie in \[0, 1\], got -0.1"),
        ("threshold", 1.5, True, r"must lie in \[0, 1\], got 1.5"),
        ("threshold", math.nan, True, r"must lie in \[0, 1\], got nan"),
        ("threshold", 0.5, False, "needs a drafter with a confidence head"),
        ("throughput", None, False, "'throughput' needs a drafter with a confidence head"),
        ("throughput_async", 0.5, True, "only with num_assistant_tokens_schedule='threshold', got 'throughput_async'"),
    ],
)
def test_impossible_options_are_refused_by_name(schedule, threshold, has_confidence, message):
    with pytest.raises(ValueError, match=message):
        make_policy(schedule, threshold, has_confidence, greedy=False)


def test_the_global_search_runs_in_greedy_decoding_alone():
    for schedule, sampling in (("throughput", ThroughputPolicy), ("throughput_async", AsyncThroughputPolicy)):
        assert type(make_policy(schedule, None, has_confidence=True, greedy=False)) is sampling
        assert type(make_policy(schedule, None, has_confidence=True, greedy=True)) is GlobalThroughputPolicy


def test_a_policy_that_remembers_is_made_anew():
    policies = [make_policy("throughput_async", None, has_confidence=True, greedy=False) for _ in range(2)]
    assert policies[0] is not policies[1]


# Non-anticipation through generate()


class Forcing(DSparkDraftModel):
    """Puts a token of our choice at one position of the first block."""

    forced_position, forced_token, blocks = 1, 0, 0

    def draft(self, hidden_states, anchor, choose, *rest):
        def force(index, logits, drafted):
            tokens, probs = choose(index, logits, drafted)
            if self.blocks == 0 and index == self.forced_position - 1:
                tokens = torch.full_like(tokens, self.forced_token)
                probs = torch.nn.functional.one_hot(tokens, VOCAB).float()
            return tokens, probs

        drawn = super().draft(hidden_states, anchor, force, *rest)
        self.blocks += 1
        return drawn


class ForcingAndAnticipating(Forcing):
    """Gives each position the confidence of the next one, which depends on its token."""

    def draft(self, hidden_states, anchor, choose, *rest):
        drawn = super().draft(hidden_states, anchor, choose, *rest)
        shifted = torch.cat([drawn.confidence_logits[:, 1:], drawn.confidence_logits[:, -1:]], dim=1)
        return DSparkDraft(tokens=drawn.tokens, probs=drawn.probs, confidence_logits=shifted)


def first_lengths(kind: type, position: int) -> torch.Tensor:
    """Verification lengths of the first round, `(tokens, rows)`, for many tokens at a position of every row's block.

    Rows differ in what is drawn elsewhere; the confidence depends on the token before alone.
    """
    target = make_target(eos_token_id=None)
    drafter = make_drafter(target, block_size=BLOCK)
    with torch.no_grad():
        weight = drafter.confidence_head.proj.weight
        weight[:, : target.config.hidden_size] = 0
        weight[:, target.config.hidden_size :] *= 20
        drafter.confidence_head.proj.bias.fill_(1.0)
    drafter.__class__, drafter.forced_position = kind, position
    drafter.generation_config.num_assistant_tokens_schedule = "threshold"
    drafter.generation_config.assistant_confidence_threshold = 0.5
    found = []
    for token in range(0, VOCAB, 4):
        drafter.forced_token, drafter.blocks = token, 0
        torch.manual_seed(0)
        output = target.generate(
            torch.tensor([[5, 9, 11]]),
            assistant_model=drafter,
            do_sample=True,
            top_k=0,
            temperature=3.0,
            max_new_tokens=BLOCK + 2,
            num_return_sequences=ROWS,
            return_dict_in_generate=True,
        )
        found.append([record.verified for record in output.statistics.records[:ROWS]])
    return torch.tensor(found)


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_whether_a_token_is_verified_does_not_depend_on_it(position):
    found = first_lengths(Forcing, position)
    verified = found >= position
    assert (verified == verified[0]).all()
    assert 0 < verified[0].sum() < ROWS  # rows of both kinds were seen
    if position < BLOCK:  # what comes after the token does depend on it
        assert (found != found[0]).any()


@pytest.mark.parametrize("position", [1, 2, 3])
def test_a_confidence_that_looks_at_its_own_token_is_noticed(position):
    verified = first_lengths(ForcingAndAnticipating, position) >= position
    assert (verified != verified[0]).any()
