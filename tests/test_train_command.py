"""`dspark-hf train`: data that cannot be trained on, runs that go on or are refused, what is measured and kept."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_trainer import assert_equal_weights, make_samples, make_target

from dspark_hf import DSparkDraftModel
from dspark_hf.cli import main
from dspark_hf.training.command import last_checkpoint
from dspark_hf.training.samples import read_samples


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=2).requires_grad_(False)


@pytest.fixture(scope="module")
def samples(target):
    return make_samples(target)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no samples"),
        ([{"prompt_ids": [1, 2], "response_ids": [3]}], "None of the 1 samples .* fills a block: that takes 8 tokens"),
        ([{"prompt_ids": [1] * 9, "response_ids": [3]}], "fills a block"),
        ([{"prompt_ids": [1, 2]}], "samples.jsonl:1 has no `response_ids`"),
        ([{"prompt_ids": "hello", "response_ids": [1]}], "samples.jsonl:1 has no `prompt_ids`"),
        ([{"prompt_ids": [1], "response_ids": [1.5]}], "samples.jsonl:1 has no `response_ids`"),
        ([[1, 2]], "samples.jsonl:1 has no `prompt_ids`"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(tmp_path, rows, message):
    path = write_lines(tmp_path / "samples.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        read_samples(path, 100, 7)


def test_a_torn_line_is_named_and_short_samples_are_counted(tmp_path, caplog):
    rows = [{"prompt_ids": [1, 2, 3], "response_ids": list(range(length))} for length in (12, 2, 40)]
    path = write_lines(tmp_path / "samples.jsonl", rows)
    kept = read_samples(path, 20, 7)
    assert [(s.name, len(s.input_ids), s.prompt_length) for s in kept] == [
        (f"{path}:1", 15, 3),
        (f"{path}:3", 20, 3),
    ]
    assert "1 of 3 samples" in caplog.text
    path.write_text(path.read_text() + '{"prompt_ids": [1, 2')
    with pytest.raises(ValueError, match="samples.jsonl:4 is not a JSON object"):
        read_samples(path, 20, 7)


@pytest.fixture
def folders(target, samples, tmp_path):
    target.save_pretrained(tmp_path / "target")
    rows = [{"prompt_ids": s.input_ids[:4], "response_ids": s.input_ids[4:]} for s in samples]
    return tmp_path / "target", write_lines(tmp_path / "samples.jsonl", rows), tmp_path / "drafter"


def command(folders, *more) -> list[str]:
    target, data, output = map(str, folders)
    options = ["--target", target, "--data", data, "--output", output, "--block-size", "4", "--held-out", "4"]
    options += ["--max-steps", "4", "--save-steps", "2", "--draft-vocab-size", "40", "--markov-rank", "6"]
    return ["train", *options, "--use-cpu", "--disable-tqdm", "True", "--num-anchors", "4", *more]


@pytest.mark.parametrize("cached", [False, True])
def test_the_command_makes_a_drafter_that_drafts(target, folders, tmp_path, cached):
    more = ["--feature-cache", str(tmp_path / "features")] if cached else []
    assert main(command(folders, "--small-budget", *more)) == 0
    drafter = DSparkDraftModel.from_pretrained(folders[2])
    config = drafter.config
    assert (config.num_hidden_layers, config.draft_vocab_size, config.markov_rank, config.block_size) == (2, 40, 6, 4)
    prompt = torch.tensor([[5, 6, 7]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=20, do_sample=False), plain)
    assert drafter.dtype == torch.bfloat16
    weights_file = folders[2] / "model.safetensors"
    before = weights_file.read_bytes()
    weights_file.write_bytes(b"torn")
    torn = folders[2] / "checkpoint-6"  # as after a kill, without the state that is written last
    torn.mkdir()
    assert main(command(folders, "--small-budget", *more)) == 0
    assert weights_file.read_bytes() == before
    assert sorted(path.name for path in folders[2].iterdir() if path.name.startswith(".")) == []
    state = json.loads((folders[2] / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def test_the_command_goes_on_from_a_drafter(folders, tmp_path):
    assert main(command(folders)) == 0
    first, second = folders[2], tmp_path / "second"
    assert main(command((*folders[:2], second), "--start-from", str(first), "--learning-rate", "0")) == 0
    assert_equal_weights(*(dict(DSparkDraftModel.from_pretrained(folder).state_dict()) for folder in (first, second)))


@pytest.mark.parametrize(
    ("more", "rate"),
    [
        ([], 3e-3),
        (["--muon-learning-rate", "0"], 0.0),
        (["--muon-learning-rate", "0.5", "--start-from", "x"], 0.5),
        (["--start-from", "x"], None),
        (["--optim", "adamw_torch"], None),
    ],
)
def test_the_preset_trains_new_drafters_with_muon(monkeypatch, more, rate):
    seen = []
    monkeypatch.setattr("dspark_hf.training.command.train", lambda arguments, training: seen.append(training))
    monkeypatch.setattr("dspark_hf.training.trainer.check_muon", lambda rate: None)
    assert (
        main(["train", "--small-budget", "--target", "t", "--data", "d", "--output", "o", "--use-cpu", "True", *more])
        == 0
    )
    assert [training.muon_learning_rate for training in seen] == [rate]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--held-out", "24"], "--held-out must lie in [1, 23]"),
        (["--dtype", "fast"], "'fast' is no torch dtype"),
        (["--output-dtype", "fast"], "'fast' is no torch dtype"),
        (["--draft-vocab-size", "65"], "`draft_vocab_size` must lie in [1, vocab_size = 64], got 65"),
        (["--cross-entropy-weight", "-1"], "must not be negative"),
    ],
)
def test_the_command_explains_what_is_wrong(folders, capsys, more, message):
    assert main(command(folders, *more)) == 2
    assert message in capsys.readouterr().err
    assert not folders[2].exists()


def log_of(folder) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_by_bit(folders, tmp_path, cached):
    def long_run(output):
        features = ["--feature-cache", str(output.with_name(f"{output.name}-features"))] if cached else []
        steps = ["--max-steps", "40", "--save-steps", "1", "--logging-steps", "1"]
        return command((*folders[:2], output), "--small-budget", *steps, *features)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(long_run(whole)) == 0
    threads = str(torch.get_num_threads())
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_hf.cli", *long_run(killed)],
        env=os.environ | {"OMP_NUM_THREADS": threads},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and last_checkpoint(killed) is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 0 < int(last_checkpoint(killed).name.rpartition("-")[2]) < 40
    assert not (killed / "model.safetensors").exists()
    assert main(long_run(killed)) == 0
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    logs = [[entry["loss"] for entry in log_of(folder) if "loss" in entry] for folder in (killed, whole)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 40


def test_held_out_samples_are_measured_without_being_asked(folders):
    for _ in range(2):  # the second time it is finished
        assert main(command(folders)) == 0
        measured = [entry for entry in log_of(folders[2]) if "eval_greedy_tau" in entry]
        assert [entry["step"] for entry in measured] == [3, 4]  # an epoch has 3 steps
        assert {"eval_tau", "eval_loss", "eval_cross_entropy", "eval_acceptance_4"} <= set(measured[-1])


def test_a_run_goes_on_with_its_own_data_and_drafter_alone(folders, tmp_path, capsys):
    target, data, output = folders
    assert main(command(folders)) == 0
    before = (output / "model.safetensors").read_bytes()
    grown = tmp_path / "grown.jsonl"
    grown.write_text(data.read_text() + data.read_text().splitlines()[0] + "\n")
    for changed, difference in (
        (command((target, grown, output)), "samples was 24, is now 25"),
        (command(folders, "--markov-rank", "5"), "markov_rank was 6, is now 5"),
        (command(folders, "--held-out", "5"), "held_out was 4, is now 5"),
    ):
        assert main([*changed, "--max-steps", "8"]) == 2
        message = capsys.readouterr().err
        assert difference in message
        assert "--start-from" in message
    assert (output / "model.safetensors").read_bytes() == before
    assert main([*command(folders), "--max-steps", "8"]) == 0  # more steps of the same run are no other run
    assert last_checkpoint(output).name == "checkpoint-8"


def test_a_finished_run_keeps_its_best_drafter_wherever_it_lies(folders, tmp_path):
    best = ["--load-best-model-at-end", "True", "--eval-strategy", "steps", "--eval-steps", "2", "--max-steps", "6"]
    assert main(command(folders, *best)) == 0
    moved = folders[2].rename(tmp_path / "moved")
    state = moved / "checkpoint-6" / "trainer_state.json"
    elsewhere = json.loads(state.read_text()) | {"best_model_checkpoint": str(folders[2] / "checkpoint-4")}
    state.write_text(json.dumps(elsewhere))
    assert main(command((*folders[:2], moved), *best, "--output-dtype", "float32")) == 0
    assert_equal_weights(
        *(dict(DSparkDraftModel.from_pretrained(f).state_dict()) for f in (moved, moved / "checkpoint-4"))
    )


def test_a_finished_run_takes_no_step_more(folders):
    for _ in range(2):
        assert main(command(folders, "--max-steps", "-1", "--num-train-epochs", "1.5")) == 0
        assert last_checkpoint(folders[2]).name == "checkpoint-5"


def test_a_checkpoint_whose_state_is_torn_is_passed_over(folders):
    assert main(command(folders)) == 0
    (folders[2] / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4, "log')
    assert last_checkpoint(folders[2]).name == "checkpoint-2"
    before = (folders[2] / "model.safetensors").read_bytes()
    assert main(command(folders)) == 0
    assert (folders[2] / "model.safetensors").read_bytes() == before


def test_samples_of_another_target_are_named(folders, capsys):
    data = folders[1]
    lines = data.read_text().splitlines()
    lines[2] = json.dumps({"prompt_ids": [1, 64], "response_ids": list(range(9))})
    data.write_text("\n".join(lines) + "\n")
    whole_vocabulary = [word for word in command(folders) if word not in ("--draft-vocab-size", "40")]
    assert main(whole_vocabulary) == 2
    assert "samples.jsonl:3 holds token 64, but the target's vocabulary ends at 63" in capsys.readouterr().err
    assert not folders[2].exists()


def test_several_files_are_one_set_of_samples(folders, tmp_path):
    target, data, output = folders
    lines = data.read_text().splitlines(keepends=True)
    halves = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for half, part in zip(halves, (lines[:9], lines[9:]), strict=True):
        half.write_text("".join(part))
    assert main(command(folders)) == 0
    assert main(command((target, data, tmp_path / "split"), "--data", *map(str, halves))) == 0  # the last one counts
    assert (tmp_path / "split" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_options_are_not_guessed_from_their_beginnings(folders, capsys):
    with pytest.raises(SystemExit):
        main(command(folders, "--small"))
    assert "--small" in capsys.readouterr().err
