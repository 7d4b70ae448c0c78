"""The gate: loses no more than it may on text that drafting does not pay on, tries again, and is rarely fooled by chance."""

import random

import pytest
import torch
from conftest import left_padded, make_scripted, make_target, oracle_script
from transformers import LogitsProcessor, set_seed

from dspark_hf.cost_curve import CostCurve, ForwardCosts
from dspark_hf.gating import LARGEST_BALANCE, OPENING_BALANCE, SHARE, DraftGate
from dspark_hf.planning import Planner


def run(gate: DraftGate, accepted_length, rounds: int, cost=1.6) -> list[bool]:
    """Rounds of one row; a drafting round takes `cost` plain ones. Returns whether each drafted."""
    drafted = []
    for number in range(rounds):
        drafted.append(gate.is_open)
        if gate.is_open:
            gate.observe_draft(accepted_length(number), cost)
        else:
            gate.observe_plain()
    return drafted


def test_a_drafter_that_pays_is_never_stopped():
    assert all(run(DraftGate(), lambda _: 3, 200))


@pytest.mark.parametrize("cost", [1.1, 1.6, 4.0])
def test_hopeless_text_costs_the_opening_balance_and_a_share_of_the_time(cost):
    gate = DraftGate()
    first, then = run(gate, lambda _: 1, 100, cost), run(gate, lambda _: 1, 10000, cost)
    lost = cost - 1
    assert abs(sum(first) * lost - OPENING_BALANCE) <= lost + 100 * SHARE
    assert sum(then) > 0  # it goes on trying
    assert sum(then) * lost <= SHARE * 10000 + lost


def test_whatever_comes_no_more_is_lost_than_the_account_allows():
    generator = random.Random(1)
    for _ in range(200):
        gate, saved, plain = DraftGate(), 0.0, 0
        worst = 0.0
        for _ in range(generator.randrange(300)):
            if gate.is_open:
                tokens, cost = generator.randint(1, 4), generator.uniform(1.1, 6)
                gate.observe_draft(tokens, cost)
                saved += tokens - cost
                worst = max(worst, cost - tokens)
            else:
                gate.observe_plain()
                plain += 1
            assert saved >= -(OPENING_BALANCE + SHARE * plain + worst) - 1e-9


def test_what_drafting_saved_is_kept_up_to_a_limit():
    gate = DraftGate()
    run(gate, lambda _: 8, 1000)
    drafted = run(gate, lambda _: 1, 100)
    assert sum(drafted) * 0.6 <= LARGEST_BALANCE + 0.6 + 100 * SHARE


def test_text_that_becomes_predictable_is_drafted_again():
    gate = DraftGate()
    run(gate, lambda _: 1, 200)
    drafted = run(gate, lambda _: 5, 200)
    assert sum(drafted) > 130  # a first try comes after 60 plain rounds at the latest
    assert all(drafted[-100:])


def test_chance_rarely_closes_the_gate_on_a_drafter_that_pays():
    generator = random.Random(0)
    drafted = run(DraftGate(), lambda _: generator.choice([1, 1, 2, 3, 4]), 2000)  # 2.2 on average, for 1.6
    assert sum(drafted) > 0.9 * 2000


@pytest.mark.parametrize(("chance", "most", "cost"), [(0.65, 7, 2.2), (0.5, 3, 1.6), (0.5, 2, 1.45)])
def test_a_drafter_that_pays_keeps_nearly_all_of_its_gain(chance, most, cost):
    """Blocks accepted token by token; the text is long, and drafting always would be the best one can do."""
    generator = random.Random(0)
    gate, tokens, seconds = DraftGate(), 0, 0.0
    for _ in range(30000):
        if gate.is_open:
            accepted = next((k for k in range(most) if generator.random() > chance), most)
            gate.observe_draft(1 + accepted, cost)
            tokens, seconds = tokens + 1 + accepted, seconds + cost
        else:
            gate.observe_plain()
            tokens, seconds = tokens + 1, seconds + 1
    always = sum(chance**k for k in range(most + 1)) / cost
    assert always > 1.1
    assert tokens / seconds > 0.97 * always


@pytest.mark.parametrize("processors", [[], ["one"]], ids=["rows advance alone", "rows keep one length"])
def test_what_a_call_gains_adds_up_to_its_plain_rounds(monkeypatch, processors):
    """Rows that run ahead of others bring the call no nearer to its end, and padding of rows that ended neither."""
    target = make_target(eos_token_id=None)
    prompt = left_padded([3, 6, 5])
    plain = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    oracle = oracle_script(plain, [3, 6, 5], prompt["input_ids"].shape[1])
    drafter = make_scripted(target, lambda row, position: oracle(row, position) if (row + position) % 3 else 1)
    drafter.generation_config.num_assistant_tokens_schedule = "throughput"
    monkeypatch.setattr(DraftGate, "is_open", True)
    monkeypatch.setattr(CostCurve, "costs", lambda self, rows, context: ForwardCosts([1.0] * 16, [0.0] * 15))
    end = int(plain[0, prompt["input_ids"].shape[1] + 2])  # the first row ends early
    gained = []
    monkeypatch.setattr(Planner, "observe", lambda self, progress, *others: gained.append(progress))
    output = target.generate(
        **prompt,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=end,
        assistant_model=drafter,
        logits_processor=[Untouched() for _ in processors],
        return_dict_in_generate=True,
    )
    longest = output.sequences.shape[1] - prompt["input_ids"].shape[1]
    assert sum(gained) == longest - 1  # the first token comes from the prompt's forward
    assert min(gained) >= 0
    assert len(gained) < longest - 1  # some of the drafts were accepted


def drafted_rounds(target, drafter, prompt, **options) -> tuple[int, object]:
    """Rounds that drafted, and the tokens."""
    output = target.generate(
        **prompt,
        max_new_tokens=40,
        eos_token_id=None,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **options,
    )
    records = output.statistics.records
    return sum(record.confidence_logits is not None for record in records), output.sequences


@pytest.mark.parametrize("lengths", [[5], [5, 3]])
def test_a_greedy_call_goes_on_with_what_the_last_one_learned(lengths, monkeypatch):
    costs = ForwardCosts(target_seconds=[1.0] * 16, draft_seconds=[0.5] * 15)
    monkeypatch.setattr(CostCurve, "costs", lambda self, rows, context: costs)
    target = make_target(eos_token_id=None)
    drafter, prompt = make_scripted(target, lambda row, position: 1), left_padded(lengths)
    drafter.generation_config.num_assistant_tokens_schedule = "throughput"
    first, tokens = drafted_rounds(target, drafter, prompt, do_sample=False)
    second, again = drafted_rounds(target, drafter, prompt, do_sample=False)
    assert first >= 4 * len(lengths)  # half a plain round is lost in each
    assert second < first / 2
    assert torch.equal(tokens, again)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # which asks no gate
    always, _ = drafted_rounds(target, drafter, prompt, do_sample=False)
    assert always > first


def test_a_call_that_samples_learns_from_no_other():
    """The same seed gives the same tokens, whatever was generated in between."""
    target = make_target(eos_token_id=None)
    drafter, prompt = make_scripted(target, lambda row, position: 1), left_padded([5])
    drafter.generation_config.num_assistant_tokens_schedule = "throughput"
    runs = []
    for _ in range(2):
        set_seed(7)
        runs.append(drafted_rounds(target, drafter, prompt, do_sample=True))
        drafted_rounds(target, drafter, prompt, do_sample=False)
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


class Untouched(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores
