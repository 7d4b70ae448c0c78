"""Statistics of a run, from records written by hand and from runs that a stop cuts short."""

import math

import pytest
import torch
from conftest import PAD, left_padded, make_scripted, make_target, oracle_script

from dspark_hf.metrics import PHASES, DecodingStatistics, PhaseTimer, RoundRecord


RECORDS = [
    RoundRecord(row=0, verified=3, accepted=3, committed=4),
    RoundRecord(row=0, verified=3, accepted=1, committed=2),
    RoundRecord(row=2, verified=0, accepted=0, committed=1),
    RoundRecord(row=2, verified=2, accepted=0, committed=1),
    RoundRecord(row=2, verified=1, accepted=1, committed=2),
]
STATISTICS = DecodingStatistics(block_size=3, records=RECORDS, target_forwards=4, seconds={"draft": 1.5})


def test_tau_is_pooled_over_rounds_and_counts_the_bonus():
    assert STATISTICS.rounds == 5
    assert STATISTICS.tau == 10 / 5


def test_tau_by_row_leaves_out_rows_without_a_round():
    assert STATISTICS.tau_by_row == {0: 3.0, 2: 4 / 3}


def test_acceptance_by_position_is_over_all_rounds():
    assert STATISTICS.acceptance_by_position == [3 / 5, 1 / 5, 1 / 5]


def test_conditional_acceptance_is_over_rounds_that_got_there_and_verified():
    # Position 2: accepted at least 1 and verified at least 2 are the first two records; one of them accepted 2.
    assert STATISTICS.conditional_acceptance_by_position == [3 / 4, 1 / 2, 1 / 1]


def test_conditional_acceptance_is_nan_where_nothing_was_verified():
    statistics = DecodingStatistics(block_size=2, records=[RoundRecord(row=0, verified=1, accepted=0, committed=1)])
    first, second = statistics.conditional_acceptance_by_position
    assert first == 0
    assert math.isnan(second)


def test_verification_lengths_are_counted_from_zero_to_the_block_size():
    assert STATISTICS.verification_lengths == [1, 1, 1, 2]


def test_without_rounds_rates_are_nan_and_counts_zero():
    empty = DecodingStatistics(block_size=2)
    assert empty.rounds == 0
    assert math.isnan(empty.tau)
    assert empty.tau_by_row == {}
    assert all(map(math.isnan, empty.acceptance_by_position + empty.conditional_acceptance_by_position))
    assert empty.verification_lengths == [0, 0, 0]
    assert "nan" in empty.summary()


def test_summary_is_one_line_with_the_numbers_people_ask_for():
    summary = STATISTICS.summary()
    assert "\n" not in summary
    assert "accepted length 2.00 over 5 rounds" in summary
    assert "1.8 draft tokens verified a round" in summary
    assert "draft 1.50 s" in summary


def test_phase_times_are_not_negative_and_add_up():
    timer = PhaseTimer(torch.device("cpu"))
    start = timer._now()
    for phase in ("prefill", "draft", "draft", "verify"):
        timer.mark(phase)
    total = timer._now() - start
    seconds = timer.seconds()
    assert tuple(seconds) == PHASES
    assert all(value >= 0 for value in seconds.values())
    assert seconds["schedule"] == seconds["commit"] == 0
    assert 0 < seconds["draft"] <= sum(seconds.values()) < total + 1


# Runs


def run(new_tokens: int, eos_after: int | None = None, block_size: int = 4, **kwargs):
    """Greedy run of a perfect drafter; the text ends at its `eos_after`-th token, unless that is `None`."""
    target = make_target(eos_token_id=None, seed=4)
    inputs = left_padded([5])
    text = target.generate(**inputs, max_new_tokens=new_tokens + block_size + 1)
    drafter = make_scripted(target, oracle_script(text, [5], 5), block_size=block_size)
    eos = {} if eos_after is None else {"eos_token_id": int(text[0, 5 + eos_after - 1]), "pad_token_id": PAD}
    output = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=new_tokens, return_dict_in_generate=True, **eos, **kwargs
    )
    return output, text[0, 5:].tolist()


@pytest.mark.parametrize("step_by_step", [False, True])
def test_a_perfect_drafter_commits_whole_blocks_and_the_last_round_is_capped(step_by_step):
    output, _ = run(new_tokens=1 + 5 + 5 + 3, output_logits=step_by_step)
    assert [(r.verified, r.accepted, r.committed) for r in output.statistics.records] == [
        (4, 4, 5),
        (4, 4, 5),
        (2, 2, 3),
    ]
    assert output.statistics.target_forwards == 3
    assert output.statistics.tau == 13 / 3


@pytest.mark.parametrize("new_tokens", range(1, 8))
def test_committed_tokens_and_the_first_add_up_to_the_text(new_tokens):
    output, _ = run(new_tokens)
    assert 1 + sum(record.committed for record in output.statistics.records) == new_tokens
    assert set(output.statistics.seconds) == set(PHASES)


@pytest.mark.parametrize("step_by_step", [False, True])
@pytest.mark.parametrize(
    ("eos_after", "expected"),
    [
        # (verified, accepted, committed): what comes after the end of text counts as not verified.
        (2, [(1, 1, 1)]),
        (3, [(2, 2, 2)]),
        (4, [(3, 3, 3)]),
        (7, [(4, 4, 5), (1, 1, 1)]),
        (8, [(4, 4, 5), (2, 2, 2)]),
        (9, [(4, 4, 5), (3, 3, 3)]),
    ],
)
def test_a_round_that_the_end_of_text_cuts_counts_what_it_kept(eos_after, expected, step_by_step):
    output, text = run(30, eos_after, output_logits=step_by_step)
    assert text.index(text[eos_after - 1]) == eos_after - 1  # the end-of-text token does not come up before
    assert output.sequences[0, 5:].tolist() == text[:eos_after]
    assert [(r.verified, r.accepted, r.committed) for r in output.statistics.records] == expected
    rates = output.statistics.conditional_acceptance_by_position
    assert all(math.isnan(rate) or rate == 1 for rate in rates)


def test_a_text_that_ends_at_its_first_token_has_no_rounds():
    output, _ = run(30, eos_after=1)
    assert output.statistics.rounds == 0
    assert math.isnan(output.statistics.tau)
    assert output.statistics.target_forwards == 0
