"""Calibration: temperatures are applied and fitted as defined, and data that would spoil the fit is refused or noticed."""

import argparse
import functools
import gzip
import itertools
import json
import math
import sys

import pytest
import torch
from conftest import PAD, ScriptedDrafter, left_padded, make_drafter, make_target, oracle_script, shared_target
from reference import calibration as reference
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf import DSparkConfig, DSparkDraftModel, calibration
from dspark_hf.calibration import (
    TEMPERATURES,
    area_under_curve,
    brier_score,
    calibrated_confidence,
    expected_calibration_error,
    fit_temperatures,
    reliability_bins,
)
from dspark_hf.evaluation import calibrate
from dspark_hf.evaluation.calibrate import Rounds, read_prompt_ids, record_rounds, report, split_prompts, whole_rounds
from dspark_hf.metrics import RoundRecord


# Applying temperatures


def test_confidence_is_the_sigmoid_of_the_logit_over_its_positions_temperature():
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 4.0, -3.0]])
    temperatures = torch.tensor([2.0, 0.5, 1.0])
    expected = 1 / (1 + torch.exp(-logits.double() / temperatures.double()))
    torch.testing.assert_close(calibrated_confidence(logits, temperatures).double(), expected, atol=1e-6, rtol=0)


def test_without_temperatures_confidence_is_the_sigmoid():
    logits = torch.randn(3, 5)
    assert calibrated_confidence(logits, None).equal(logits.sigmoid())
    torch.testing.assert_close(calibrated_confidence(logits, torch.ones(5)), logits.sigmoid())


def test_a_shorter_block_takes_the_first_temperatures():
    logits = torch.randn(3, 2)
    torch.testing.assert_close(
        calibrated_confidence(logits, torch.tensor([2.0, 3.0, 4.0, 5.0])),
        calibrated_confidence(logits, torch.tensor([2.0, 3.0])),
    )


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 20.0])
def test_each_position_keeps_its_order_and_its_side_of_one_half(temperature):
    torch.manual_seed(0)
    logits = torch.randn(50, 1).sort(dim=0).values
    confidence = calibrated_confidence(logits, torch.tensor([temperature]))
    assert (confidence.diff(dim=0) >= 0).all()
    assert (confidence > 0.5).equal(logits > 0)
    assert ((confidence >= 0) & (confidence <= 1)).all()


def test_temperatures_of_the_config_change_what_the_threshold_verifies_and_not_the_text():
    target, inputs = shared_target(), left_padded([5])
    drafter = KnownConfidence.make(target, lambda _row, _position: PAD, lambda _row, _anchor, k: 3.0 - k)
    drafter.generation_config.num_assistant_tokens_schedule = "threshold"
    drafter.generation_config.assistant_confidence_threshold = 0.7
    verified, texts = [], []
    # sigmoid(2), sigmoid(1), sigmoid(0): .88, .73, .5; over 2: .73, .62, .5; over (4, 1, 1): .62, .73, .5.
    for temperatures in (None, [2.0] * 4, [4.0, 1.0, 1.0, 1.0]):
        drafter.config.confidence_temperatures = temperatures
        output = target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
        )
        verified.append(output.statistics.records[0].verified)
        texts.append(output.sequences.tolist())
    assert verified == [2, 1, 0]
    assert texts == [target.generate(**inputs, max_new_tokens=9, do_sample=False).tolist()] * 3


@pytest.mark.parametrize(
    ("fitted", "schedule", "call", "warns"),
    [
        ({"do_sample": False, "temperature": None}, "threshold", {"do_sample": False}, False),
        ({"do_sample": False, "temperature": None}, "threshold", {"do_sample": True}, True),
        ({"do_sample": False, "temperature": None}, "constant", {"do_sample": True}, False),
        ({"do_sample": True, "temperature": 0.7}, "threshold", {"do_sample": True, "temperature": 0.7}, False),
        ({"do_sample": True, "temperature": 0.7}, "threshold", {"do_sample": True}, True),
        (None, "threshold", {"do_sample": True}, False),
    ],
)
def test_confidences_of_another_setting_are_noticed_once(caplog, fitted, schedule, call, warns):
    calibration._warn_of_other_setting.cache_clear()
    target = shared_target()
    drafter = make_drafter(target, confidence_temperatures=fitted and [1.5] * 4, confidence_calibration=fitted)
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    if schedule == "threshold":
        drafter.generation_config.assistant_confidence_threshold = 0.1
    for _ in range(2):
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, assistant_model=drafter, **call)
    said = [record.getMessage() for record in caplog.records if "calibrated for" in record.getMessage()]
    assert len(said) == warns
    assert all("dspark-hf calibrate" in message for message in said)


# Measures


def predictions(seed: int, rounds: int = 60):
    """Probabilities with ties, zeros, ones and empty bins, and what happened."""
    generator = torch.Generator().manual_seed(seed)
    predicted = (torch.rand(rounds, generator=generator, dtype=torch.double) * 8).round() / 8
    return predicted, torch.rand(rounds, generator=generator) < 0.4 + 0.3 * predicted


@pytest.mark.parametrize("seed", range(3))
def test_measures_equal_loops_with_ties_and_empty_bins(seed):
    predicted, accepted = predictions(seed)
    numbers, facts = predicted.tolist(), accepted.tolist()
    for bins in (1, 7, 20):
        expected = reference.expected_calibration_error(numbers, facts, bins)
        assert expected_calibration_error(predicted, accepted, bins) == pytest.approx(expected, abs=1e-12)
    assert area_under_curve(predicted, accepted) == pytest.approx(reference.area_under_curve(numbers, facts))
    assert brier_score(predicted, accepted) == pytest.approx(reference.brier_score(numbers, facts))


def test_bins_count_predictions_and_what_happened():
    bins = reliability_bins(
        torch.tensor([0.0, 0.5, 0.49, 1.0, 0.75]), torch.tensor([True, True, False, True, False]), bins=2
    )
    assert bins.counts.tolist() == [2, 3]
    assert bins.predicted.tolist() == pytest.approx([0.49, 2.25])
    assert bins.accepted.tolist() == [1, 2]
    assert (reliability_bins(torch.tensor([0.1]), torch.tensor([True])).counts > 0).sum() == 1


def test_measures_of_known_cases():
    certain = torch.tensor([0.0, 0.0, 1.0])
    right, wrong = torch.tensor([False, False, True]), torch.tensor([True, True, False])
    assert (expected_calibration_error(certain, right), brier_score(certain, right)) == (0, 0)
    assert (expected_calibration_error(certain, wrong), brier_score(certain, wrong)) == (1, 1)
    assert (area_under_curve(certain, right), area_under_curve(certain, wrong)) == (1, 0)
    assert area_under_curve(torch.full((3,), 0.5), right) == 0.5
    assert math.isnan(area_under_curve(certain, torch.tensor([True] * 3)))
    assert math.isnan(expected_calibration_error(torch.zeros(0), torch.zeros(0, dtype=torch.bool)))


# The fit


def synthetic(rounds: int, temperatures: list[float], seed: int = 0):
    """Logits that are `temperatures` times too large, and what true confidences made happen; all positions labelled."""
    generator = torch.Generator().manual_seed(seed)
    size = (rounds, len(temperatures))
    true = 0.8 + 1.3 * torch.randn(size, generator=generator, dtype=torch.double)
    passed = torch.rand(size, generator=generator, dtype=torch.double) < true.sigmoid()
    logits = true * torch.tensor(temperatures, dtype=torch.double)
    return logits, passed.long().cumprod(dim=1).sum(dim=1), torch.full((rounds,), len(temperatures))


@pytest.mark.parametrize("seed", range(2))
def test_the_fit_equals_nested_loops(seed):
    logits, accepted, labelled = synthetic(30, [1.5, 0.7, 2.0], seed)
    labelled[:10] = labelled[:10].minimum(accepted[:10].clamp(min=1))
    expected = reference.fit_temperatures(
        logits.tolist(), accepted.tolist(), labelled.tolist(), list(TEMPERATURES), bins=20
    )
    fit = fit_temperatures(logits, accepted, labelled, min_outcomes=1)
    assert fit.temperatures == tuple(expected)
    assert fit.rounds == 30


def test_the_grid_is_documented():
    grid = sorted(TEMPERATURES)
    assert (grid[0], grid[-1], len(grid)) == (0.2, 5.0, 161)
    assert TEMPERATURES[0] == 1.0
    assert all(1.019 < high / low < 1.022 for low, high in zip(grid, grid[1:], strict=False))


def test_known_temperatures_are_found():
    """Over seeds, 20000 rounds scatter by 2 %, 4 % and 7 % at these positions; allowed is three times as much."""
    true = [1.5, 0.9, 1.6]
    logits, accepted, labelled = synthetic(20_000, true)
    fit = fit_temperatures(logits, accepted, labelled)
    for found, expected, tolerance in zip(fit.temperatures, true, (0.06, 0.12, 0.21), strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
    assert fit.warnings == ()
    before, after = (calibrated_confidence(logits, t).cumprod(1) for t in (None, torch.tensor(fit.temperatures)))
    for k in (1, 2, 3):
        assert expected_calibration_error(after[:, k - 1], accepted >= k) < 0.012
        assert expected_calibration_error(before[:, k - 1], accepted >= k) > 0.02


def test_where_temperatures_make_no_difference_1_is_chosen():
    logits, accepted, labelled = synthetic(2000, [1.0])
    assert fit_temperatures(torch.zeros_like(logits), accepted, labelled).temperatures == (1.0,)


def test_positions_without_a_label_do_not_count():
    logits, accepted, labelled = synthetic(3000, [1.5, 1.5])
    ended = torch.arange(3000) % 3 == 0
    labelled[ended & (accepted >= 1)] = 1
    accepted = accepted.minimum(labelled)
    fit = fit_temperatures(logits, accepted, labelled)
    logits[labelled < 2, 1] = 20.0
    assert fit_temperatures(logits, accepted, labelled).temperatures == fit.temperatures
    assert fit_temperatures(logits, accepted, torch.full_like(labelled, 2)).temperatures != fit.temperatures


def test_too_few_rounds_leave_a_temperature_at_1_and_say_how_many_it_takes():
    logits, accepted, labelled = synthetic(600, [1.5, 1.5, 1.5])
    passed, failed = int((accepted >= 2).sum()), int((accepted == 1).sum())
    fit = fit_temperatures(logits, accepted, labelled, min_outcomes=min(passed, failed) + 1)
    assert fit.temperatures[0] != 1.0
    assert fit.temperatures[1:] == (1.0, 1.0)
    assert len(fit.warnings) == 2
    assert (
        f"Position 2: its temperature stays 1. Of the rounds that accepted all before it, {passed} " in fit.warnings[0]
    )
    assert f"{failed} rejected it; {min(passed, failed) + 1} of each are needed: about 60" in fit.warnings[0]
    none = fit_temperatures(logits, torch.zeros_like(accepted), labelled)
    assert none.temperatures == (1.0, 1.0, 1.0)
    assert none.warnings[0].endswith("0 accepted and 600 rejected it; 100 of each are needed.")


@pytest.mark.parametrize(("scale", "bound"), [(20.0, "5"), (0.02, "0.2")])
def test_a_temperature_at_the_end_of_the_grid_is_noticed(scale, bound):
    fit = fit_temperatures(*synthetic(1000, [scale]))
    assert fit.warnings == (f"Position 1: its temperature {bound} is the last of the grid, so no fit.",)


@pytest.mark.parametrize("shift", ["shuffled", "one round late"])
def test_labels_of_other_rounds_are_noticed(shift):
    """The AUC of 4000 shuffled labels scatters by .01 around .5; the warning comes below .6."""
    logits, accepted, labelled = synthetic(4000, [1.2, 1.2])
    assert fit_temperatures(logits, accepted, labelled).warnings == ()
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(1))
    wrong = accepted[order] if shift == "shuffled" else accepted.roll(1)
    warnings = fit_temperatures(logits, wrong, labelled).warnings
    for k in (1, 2):
        assert any(f"Position {k}: its survivals say next to nothing" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, accepted, labelled: (logits[:, 0], accepted, labelled), r"Expected logits \(N, K\)"),
        (lambda logits, accepted, labelled: (logits, accepted[1:], labelled), r"accepted \(N,\)"),
        (lambda logits, accepted, labelled: (logits, accepted, labelled + 1), "labelled <= 2"),
        (lambda logits, accepted, labelled: (logits, accepted, accepted - 1), "accepted <= labelled"),
        (lambda logits, accepted, labelled: (logits * math.inf, accepted, labelled), "not finite"),
    ],
)
def test_impossible_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fit_temperatures(*change(*synthetic(20, [1.0, 1.0])))


# Recording


class KnownConfidence(ScriptedDrafter):
    """Says `confidence(row, anchor position, k)` about token k."""

    confidence = None

    @classmethod
    def make(cls, target, script, confidence, **overrides):
        drafter = make_drafter(target, **overrides)
        drafter.__class__, drafter.script, drafter.confidence = cls, script, confidence
        return drafter

    def draft(self, *args, **kwargs):
        drawn = super().draft(*args, **kwargs)
        drawn.confidence_logits = torch.tensor(
            [
                [float(self.confidence(row, anchor, k + 1)) for k in range(drawn.tokens.shape[1])]
                for row, anchor in enumerate(self.anchor_positions)
            ]
        )
        return drawn


def named(row: int, anchor: int, k: int) -> int:
    """A number that says which row, round and position it belongs to."""
    return 10_000 * row + 10 * anchor + k


def different_ends(texts: list[list[int]]) -> tuple[list[int], list[int]]:
    """End tokens that stop each text at another place, and these places, neither near the beginning nor near the limit."""
    for ends in itertools.combinations(range(3, 64), len(texts)):
        stops = [next((i for i, token in enumerate(text) if token in ends), 0) for text in texts]
        if len(set(stops)) == len(texts) and min(stops) > 6 and max(stops) < 30:
            return list(ends), stops
    raise AssertionError("no tokens end these texts at different places")


@pytest.mark.parametrize("lengths", [[5], [5, 3, 7]])
def test_each_round_is_recorded_with_its_own_rows_logits_and_labels(lengths):
    """Rows end at different times; a drafter that errs at known places says by each logit what it speaks of."""
    target, inputs = make_target(eos_token_id=None, seed=5, num_hidden_layers=2), left_padded(lengths)
    columns, limit = max(lengths), 40
    text = target.generate(**inputs, max_new_tokens=limit + 5, do_sample=False)
    perfect = oracle_script(text, lengths, columns)

    def is_wrong(row, position):
        return (position * 5 + row) % 7 == 0

    def script(row, position):
        return (perfect(row, position) + is_wrong(row, position)) % 64

    drafter = KnownConfidence.make(target, script, named)
    ends, stops = different_ends(text[:, columns:].tolist())
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=PAD,
        return_dict_in_generate=True,
    )
    anchors, ended = list(lengths), 0
    for record in output.statistics.records:
        row, anchor = record.row, anchors[record.row]
        assert record.confidence_logits.tolist() == [named(row, anchor, k) for k in (1, 2, 3, 4)]
        left = lengths[row] + stops[row] - anchor  # tokens up to the end of the text
        passed = next((k for k in range(4) if is_wrong(row, anchor + 1 + k)), 4)
        assert record.accepted == min(passed, left)
        assert record.verified == (left if left <= passed else 4)
        anchors[row] += record.committed
        ended += left <= passed
    assert anchors == [length + stop for length, stop in zip(lengths, stops, strict=True)]
    assert ended > 0
    kept = whole_rounds(output.statistics.records, 4, limit)
    assert kept == output.statistics.records
    rounds = Rounds.from_records(kept)
    assert rounds.logits[:, 3].tolist() == [record.confidence_logits[3] for record in kept]
    assert rounds.labelled.tolist() == [record.verified for record in kept]
    fit_temperatures(rounds.logits, rounds.accepted, rounds.labelled)


def test_rounds_that_the_length_limit_cuts_are_left_out():
    records = [RoundRecord(0, 4, 4, 5), RoundRecord(1, 4, 0, 1), RoundRecord(0, 2, 2, 3), RoundRecord(1, 4, 2, 3)]
    # Row 0 may write 8 after prefill's token: 5, then 3, so its second round verifies two. Row 1 has 7 left after its first.
    assert whole_rounds(records, block_size=4, new_tokens=9) == [records[0], records[1], records[3]]
    with pytest.raises(ValueError, match="verified 2 of 4"):
        whole_rounds(records, block_size=4, new_tokens=20)


@pytest.mark.parametrize("counts", [(3, 1, 2), (2, 2, 3), (0, 0, 1)])
def test_a_truncated_round_is_refused(counts):
    with pytest.raises(ValueError, match="does not end there"):
        whole_rounds([RoundRecord(0, *counts)], block_size=4, new_tokens=100)


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 3, 3), (4, 4, 4), (4, 1, 2)])
def test_an_end_of_text_is_no_truncation(counts):
    assert len(whole_rounds([RoundRecord(0, *counts)], block_size=4, new_tokens=100)) == 1


def test_a_scheduler_is_off_while_recording_and_back_afterwards():
    target = shared_target()
    drafter = KnownConfidence.make(target, lambda _row, _position: PAD, lambda *_: -9.0)
    options = drafter.generation_config
    options.num_assistant_tokens = 3
    options.num_assistant_tokens_schedule, options.assistant_confidence_threshold = "threshold", 0.9
    prompt = left_padded([5])["input_ids"]
    output = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    with pytest.raises(ValueError, match="scheduler off"):
        whole_rounds(output.statistics.records, 4, 12)
    rounds = record_rounds(target, drafter, prompt.tolist(), 12)
    assert set(rounds.labelled.tolist()) == {4}
    assert rounds.logits.equal(torch.full_like(rounds.logits, -9.0))
    assert drafter.generation_config is options


def test_uncalibrated_logits_are_recorded_whatever_the_config_says():
    target = shared_target()
    drafter = make_drafter(target)
    prompts = left_padded([5, 5])["input_ids"].tolist()
    plain = record_rounds(target, drafter, prompts, 12)
    drafter.config.confidence_temperatures = [3.0] * 4
    assert record_rounds(target, drafter, prompts, 12).logits.equal(plain.logits)


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        ({"enable_confidence_head": False}, (20,), "no confidence head"),
        ({}, (5,), "Raise --max-new-tokens"),
        ({}, (20, -1.0), "temperature of 0"),
    ],
)
def test_what_cannot_be_recorded_is_refused(overrides, arguments, message):
    target = shared_target()
    with pytest.raises(ValueError, match=message):
        record_rounds(target, make_drafter(target, **overrides), [[5, 6, 7]], *arguments)


def test_the_report_judges_labelled_rounds_by_position():
    logits, accepted, labelled = synthetic(300, [1.5, 1.5])
    labelled[accepted == 1] = 1
    labelled[accepted != 1] = 2
    rows = report(Rounds(logits, accepted, labelled), [1.5, 2.0])
    known = labelled == 2
    survival = (logits[known] / torch.tensor([1.5, 2.0])).sigmoid().prod(dim=1)
    outcome = accepted[known] == 2
    second = rows[1]
    assert (second["rounds"], second["accepted"], second["temperature"]) == (int(known.sum()), int(outcome.sum()), 2.0)
    assert second["after"]["ece"] == pytest.approx(expected_calibration_error(survival, outcome))
    assert second["after"]["auc"] == pytest.approx(area_under_curve(survival, outcome))
    assert second["before"]["brier"] == pytest.approx(brier_score(logits[known].sigmoid().prod(dim=1), outcome))
    assert sum(second["after"]["bin_counts"]) == second["rounds"]
    # A temperature keeps the order of the first confidences.
    assert rows[0]["before"]["auc"] == rows[0]["after"]["auc"]


def test_a_position_without_rounds_is_reported_as_such():
    rows = report(Rounds(torch.zeros(3, 2), torch.ones(3).long(), torch.ones(3).long()), [1.0, 1.0])
    assert rows[0]["before"]["auc"] is None  # all accepted
    assert rows[1]["after"]["ece"] is None
    assert "none" in calibrate.table(rows)


# The command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny pair, and samples of `dspark-hf data`."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder / "target")
    target = make_target(num_hidden_layers=2)
    target.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    samples = [{"index": i, "prompt_ids": [5, 6, 7 + i], "response_ids": [9]} for i in range(10)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def run(folders, *more):
    parser = argparse.ArgumentParser()
    calibrate.add_calibrate_arguments(parser)
    names = ["--target", str(folders / "target"), "--drafter", str(folders / "drafter"), "--device", "cpu"]
    calibrate.run_calibrate(parser.parse_args([*names, "--prompts", str(folders / "samples.jsonl"), *more]))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def few_rounds_suffice(monkeypatch):
    monkeypatch.setattr(calibrate, "fit_temperatures", functools.partial(fit_temperatures, min_outcomes=3))


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.usefixtures("few_rounds_suffice")
def test_the_drafters_config_gets_a_plain_list_and_nothing_else_changes(folders, capsys, caplog):
    """A hot temperature makes both models nearly uniform, so that even a random drafter is accepted now and then."""
    pytest.importorskip("matplotlib")
    before = contents(folders / "drafter")
    run(folders, "--temperature", "8", "--max-new-tokens", "24")
    after = contents(folders / "drafter")
    assert after.keys() - before.keys() == {"calibration.json", "calibration.png"}
    assert [name for name in before if after[name] != before[name]] == ["config.json"]
    old, new = json.loads(before["config.json"]), json.loads(after["config.json"])
    temperatures, setting = new["confidence_temperatures"], new["confidence_calibration"]
    assert len(temperatures) == 4
    assert set(temperatures) <= set(TEMPERATURES)
    assert temperatures[0] != 1.0
    assert new | {"confidence_temperatures": None, "confidence_calibration": None} == old
    assert setting.items() >= {"do_sample": True, "temperature": 8.0}.items()
    assert after["calibration.png"].startswith(b"\x89PNG")
    record = json.loads(after["calibration.json"], parse_constant=refuse_constant)
    assert [row["temperature"] for row in record["positions"]] == temperatures
    assert record["rounds"]["fit"] == setting["rounds"] > record["rounds"]["held_out"] > 0
    assert record["prompts"] == {"fit": 7, "held_out": 3}
    assert "before -> after" in capsys.readouterr().out
    assert [warning.getMessage() for warning in caplog.records] == record["warnings"]
    loaded = DSparkDraftModel.from_pretrained(folders / "drafter")
    assert loaded.config.confidence_temperatures == temperatures
    assert loaded.config.confidence_calibration == setting
    loaded.generation_config.num_assistant_tokens_schedule = "threshold"
    loaded.generation_config.assistant_confidence_threshold = 0.5
    target, prompt = shared_target_of(folders), torch.tensor([[5, 6, 7]])
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=loaded).equal(expected)


def shared_target_of(folders):
    return calibrate.load_target(str(folders / "target"), "float32", "cpu")


def test_another_output_is_a_copy_of_the_drafter(folders, tmp_path):
    pytest.importorskip("matplotlib")
    before = contents(folders / "drafter")
    run(folders, "--output", str(tmp_path / "copy"), "--max-new-tokens", "12", "--num-prompts", "3")
    assert contents(folders / "drafter") == before
    copy, info = DSparkDraftModel.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not any(info.values())
    assert copy.config.confidence_temperatures == [1.0] * 4
    assert copy.config.confidence_calibration["do_sample"] is False
    assert copy.config.confidence_calibration["temperature"] is None
    original = DSparkDraftModel.from_pretrained(folders / "drafter").state_dict()
    assert all(tensor.equal(original[name]) for name, tensor in copy.state_dict().items())


def test_the_setting_survives_the_config(tmp_path):
    config = DSparkConfig(block_size=2, confidence_temperatures=[1.5, 0.9])
    config.confidence_calibration = {"do_sample": False, "temperature": None, "rounds": 7}
    config.save_pretrained(tmp_path / "first")
    DSparkConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    again = json.loads((tmp_path / "second" / "config.json").read_text())
    assert again["confidence_calibration"] == config.confidence_calibration
    assert again["confidence_temperatures"] == [1.5, 0.9]


@pytest.mark.parametrize("drafter", ["nowhere/on-the-hub", "foreign"])
def test_a_drafter_that_cannot_hold_temperatures_needs_another_output(tmp_path, drafter):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "qwen3"}')
    name = drafter if "/" in drafter else str(tmp_path / drafter)
    with pytest.raises(ValueError, match="Give another --output"):
        calibrate._output_folder(name, None)
    assert calibrate._output_folder(name, tmp_path / "copy") == tmp_path / "copy"


def test_without_matplotlib_the_error_names_the_extra_before_anything_runs(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(calibrate, "load_target", None)
    with pytest.raises(ImportError, match=r"dspark_hf\[plots\]"):
        run(folders)


def test_prompts_are_samples_or_turns_and_each_is_taken_once(folders, tmp_path):
    tokenizer = calibrate.AutoTokenizer.from_pretrained(folders / "target")
    turns = json.dumps({"dataset": "sums", "domain": "math", "index": 0, "turns": ["w5 w9"]})
    (tmp_path / "a.jsonl").write_text(f"{turns}\n\n{turns}\n")
    (tmp_path / "b.jsonl").write_text('{"prompt_ids": [7, 8]}\n{"prompt_ids": [5, 9]}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"prompt_ids": [4]}\n')
    assert read_prompt_ids(tmp_path, tokenizer) == [[5, 9], [7, 8]]
    assert read_prompt_ids(tmp_path / "b.jsonl", tokenizer) == [[7, 8], [5, 9]]
    assert read_prompt_ids(tmp_path / "c.jsonl.gz", tokenizer) == [[4]]
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 has no `dataset`"):
        read_prompt_ids(tmp_path, tokenizer)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompt_ids(tmp_path / "a.jsonl", tokenizer)


def test_prompts_are_split_at_random_and_none_is_on_both_sides():
    prompts = [[i] for i in range(20)]
    fitting, held_out = split_prompts(prompts, 10, 0.3, seed=0)
    assert (len(fitting), len(held_out)) == (7, 3)
    assert len({prompt[0] for prompt in fitting + held_out}) == 10
    assert split_prompts(prompts, 10, 0.3, seed=0) == (fitting, held_out)
    assert split_prompts(prompts, 10, 0.3, seed=1) != (fitting, held_out)
    assert [len(part) for part in split_prompts(prompts, 2, 0.01, seed=0)] == [1, 1]
    for limit, fraction in ((1, 0.3), (10, 0.0), (10, 1.0)):
        with pytest.raises(ValueError, match="two prompts or more"):
            split_prompts(prompts, limit, fraction, seed=0)
