"""Training: it learns, resumes bit by bit, skips what is broken, and saves the drafter alone."""

import json
import logging

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from safetensors import safe_open
from transformers import TrainerCallback, set_seed

from dspark_hf import DSparkDraftModel
from dspark_hf.cli import main
from dspark_hf.training.features import FeatureCache, FeatureExtractor, TargetFeatures
from dspark_hf.training.samples import Sample, read_samples
from dspark_hf.training.trainer import DraftDataset, DSparkTrainer, DSparkTrainingArguments


PROMPT_LENGTH, RESPONSE_LENGTH = 4, 20
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")


@pytest.fixture(scope="module")
def target():
    """A target whose next token depends on the last one alone, so that a few steps teach a drafter something."""
    target = make_target(num_hidden_layers=2).requires_grad_(False)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    return target


@pytest.fixture(scope="module")
def samples(target):
    return make_samples(target)


def make_samples(target) -> list[Sample]:
    """What the target writes to random prompts, in two lengths."""
    torch.manual_seed(6)
    prompts = torch.randint(3, VOCAB, (24, PROMPT_LENGTH), generator=torch.Generator().manual_seed(5))
    texts = target.generate(
        prompts, max_new_tokens=RESPONSE_LENGTH, min_new_tokens=RESPONSE_LENGTH, do_sample=True, top_k=0
    )
    return [Sample(f"text:{i}", ids[: 24 - i % 2 * 7], PROMPT_LENGTH) for i, ids in enumerate(texts.tolist())]


def make_trainer(target, samples, output, held_out=6, cache=None, **overrides) -> DSparkTrainer:
    set_seed(0)
    options = {
        "output_dir": str(output),
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 3,
        "num_anchors": 4,
        "learning_rate": 3e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return DSparkTrainer(
        make_drafter(target).train(),
        target,
        DSparkTrainingArguments(**options | overrides),
        DraftDataset(samples, range(held_out, len(samples)), cache),
        DraftDataset(samples, range(held_out), cache),
    )


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_equal_weights(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class StopAt(TrainerCallback):
    """Ends the process, as far as `Trainer` can tell, in the middle of a run."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_training_improves_loss_and_accepted_length_on_held_out_text(target, samples, tmp_path):
    trainer = make_trainer(
        target, samples, tmp_path, max_steps=150, save_strategy="no", num_anchors=16, learning_rate=1e-2
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.75 * before["eval_loss"]
    assert after["eval_greedy_tau"] > before["eval_greedy_tau"] + 0.4
    assert after["eval_tau"] > before["eval_tau"] + 0.4
    assert after["eval_confidence"] < before["eval_confidence"]
    logged = [entry for entry in trainer.state.log_history if "acceptance_1" in entry]
    assert len(logged) == 150
    assert {"loss", "cross_entropy", "total_variation", "confidence", "tau", "greedy_tau", "acceptance_4"} <= set(
        logged[0]
    )
    assert logged[0]["loss"] == pytest.approx(
        0.1 * logged[0]["cross_entropy"] + 0.9 * logged[0]["total_variation"] + logged[0]["confidence"], rel=1e-4
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2},
        pytest.param({"muon_learning_rate": 3e-3, "gradient_accumulation_steps": 2}, marks=needs_muon),
    ],
)
def test_a_run_that_stopped_goes_on_bit_by_bit(target, samples, tmp_path, more):
    options = {"max_steps": 9, "save_steps": 4} | more  # beyond the first epoch
    whole = make_trainer(target, samples, tmp_path / "whole", **options)
    whole.train()
    assert whole.state.epoch > 1
    stopped = make_trainer(target, samples, tmp_path / "stopped", **options)
    stopped.add_callback(StopAt(6))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(target, samples, tmp_path / "stopped", **options)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True)
    late = make_trainer(target, samples, tmp_path / "late", **options)
    late.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    for other in (resumed, late):
        assert other.state.global_step == 9
        assert_equal_weights(weights(other), weights(whole))
        assert losses(other) == losses(whole)


@needs_muon
def test_muon_trains_the_matrices_of_the_draft_layers(target, samples, tmp_path):
    options = {"muon_learning_rate": 3e-2, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 0}
    trainer = make_trainer(target, samples, tmp_path, max_steps=10, save_strategy="no", **options)
    before, first = weights(trainer), trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first["eval_loss"]
    optimizer = trainer.optimizer.optimizer
    by_id = {id(weight): name for name, weight in trainer.drafter.named_parameters()}
    of_muon, *of_adamw = ({by_id[id(weight)] for weight in group["params"]} for group in optimizer.param_groups)
    linear = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layers = range(trainer.drafter.config.num_hidden_layers)
    assert of_muon == {f"layers.{i}.{name}.weight" for i in layers for name in (*linear, *mlp)} | {"fc.weight"}
    assert of_muon.union(*of_adamw) == {n for n, w in trainer.drafter.named_parameters() if w.requires_grad}
    assert not of_muon.intersection(*of_adamw)
    after = weights(trainer)
    assert [name for name in by_id.values() if torch.equal(before[name], after[name])] == []
    parts = optimizer._parts.values()  # a scheduler that sets the groups' rates reaches both
    assert all(
        one is own for one, own in zip(optimizer.param_groups, (g for p in parts for g in p.param_groups), strict=True)
    )


@needs_muon
def test_a_step_at_rate_zero_changes_nothing(target, samples, tmp_path):
    rates = {"muon_learning_rate": 3e-2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    trainer = make_trainer(target, samples, tmp_path, max_steps=2, save_steps=1, **rates)
    trainer.train()
    resumed = make_trainer(target, samples, tmp_path, max_steps=3, **rates)
    resumed.add_callback(RateZero())
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(weights(resumed), weights(trainer))


class RateZero(TrainerCallback):
    """Sets every rate to zero, where a scheduler would, before each step."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 0.0


@needs_muon
@pytest.mark.parametrize("first", [None, 3e-3])
def test_a_checkpoint_of_another_optimizer_is_refused(target, samples, tmp_path, first):
    make_trainer(target, samples, tmp_path, max_steps=3, muon_learning_rate=first).train()
    other = make_trainer(target, samples, tmp_path, max_steps=6, muon_learning_rate=3e-3 if first is None else None)
    with pytest.raises(ValueError, match="another optimizer.*--muon-learning-rate"):
        other.train(resume_from_checkpoint=True)


def test_muon_is_refused_before_anything_runs_where_it_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"negative, got -1"):
        DSparkTrainingArguments(output_dir=str(tmp_path), muon_learning_rate=-1.0)
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ImportError, match=r"torch 2\.9 .*--muon-learning-rate 0"):
        DSparkTrainingArguments(output_dir=str(tmp_path), muon_learning_rate=3e-3)
    assert DSparkTrainingArguments(output_dir=str(tmp_path), muon_learning_rate=0.0).muon_learning_rate == 0


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


def test_the_saved_model_is_the_drafter_alone_and_the_target_does_not_change(target, samples, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = make_trainer(target, samples, tmp_path)
    trainer.train()
    trainer.save_model()
    assert_equal_weights(before, dict(target.state_dict()))
    for folder in (tmp_path, tmp_path / "checkpoint-6"):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(trainer.drafter.state_dict())
        assert_equal_weights(dict(DSparkDraftModel.from_pretrained(folder).state_dict()), weights(trainer))


def test_the_best_checkpoint_is_loaded_at_the_end(target, samples, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "max_steps": 9}
    options |= {"metric_for_best_model": "greedy_tau", "greater_is_better": True}
    trainer = make_trainer(target, samples, tmp_path, **options)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert_equal_weights(dict(DSparkDraftModel.from_pretrained(best).state_dict()), weights(trainer))
    assert trainer.evaluate()["eval_greedy_tau"] == trainer.state.best_metric


def test_held_out_numbers_do_not_depend_on_the_batch_size_or_the_state_of_the_generator(target, samples, tmp_path):
    options = {"num_anchors": 24}  # more than a row has candidates: all are taken
    one = make_trainer(target, samples, tmp_path, per_device_eval_batch_size=1, **options).evaluate()
    torch.manual_seed(1234)
    all_at_once = make_trainer(target, samples, tmp_path, per_device_eval_batch_size=6, **options).evaluate()
    timing = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    for name in set(one) - timing:
        assert one[name] == pytest.approx(all_at_once[name], rel=1e-4), name


def test_autocast_trains_float32_weights(target, samples, tmp_path):
    trainer = make_trainer(target, samples, tmp_path, bf16=True, save_strategy="no")
    trainer.train()
    assert trainer.drafter.dtype == torch.float32
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


def extractor(target, layer_ids=(0,)) -> FeatureExtractor:
    return FeatureExtractor(target, list(layer_ids))


def test_features_from_disk_train_like_features_of_the_running_target(target, samples, tmp_path, monkeypatch):
    online = make_trainer(target, samples, tmp_path / "online", save_strategy="no")
    online.train()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        monkeypatch.setattr("dspark_hf.training.features.STORED_DTYPE", dtype)
        cache = FeatureCache(tmp_path / str(dtype), samples)
        cached = make_trainer(target, samples, tmp_path / "cached", cache=cache, save_strategy="no")
        cache.fill(cached.extractor)
        cached.train()
        assert losses(online) == pytest.approx(losses(cached), rel=tolerance)


def test_features_are_the_targets_own(target, samples, tmp_path):
    cache = FeatureCache(tmp_path, samples)
    cache.fill(extractor(target))
    for index in (0, 1, 17):
        sample, features = samples[index], cache[index]
        output = target(torch.tensor([sample.input_ids]), output_hidden_states=True)
        torch.testing.assert_close(features.taps, output.hidden_states[1][0].bfloat16(), atol=0, rtol=0.01)
        torch.testing.assert_close(
            features.last_hidden_states, output.hidden_states[-1][0].bfloat16(), atol=0, rtol=0.01
        )
        logits = output.logits[0, sample.prompt_length :]
        torch.testing.assert_close(features.log_normalizers[sample.prompt_length :], logits.logsumexp(dim=-1))
        assert torch.equal(features.best_ids[sample.prompt_length :], logits.argmax(dim=-1))


def test_a_filled_cache_is_not_computed_again_and_a_killed_one_goes_on(target, samples, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, samples * 3)
    assert len(cache.groups) == 3
    written = []
    original = FeatureCache._write

    def write(self, number, tensors):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        original(self, number, tensors)

    monkeypatch.setattr(FeatureCache, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(extractor(target))
    monkeypatch.setattr(FeatureCache, "_write", lambda self, n, t: (written.append(n), original(self, n, t)))
    cache.fill(extractor(target))
    cache.fill(extractor(target))
    assert written == [0, 1, 2]
    assert torch.isfinite(cache[71].taps).all()


def test_ranks_share_the_work_of_a_cache(target, samples, tmp_path):
    cache = FeatureCache(tmp_path, samples * 3)
    cache.fill(extractor(target), rank=1, world_size=2)
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == ["features-00001.safetensors"]
    cache.fill(extractor(target), rank=0, world_size=2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_features_of_other_samples_or_taps_are_refused(target, samples, tmp_path):
    FeatureCache(tmp_path, samples).fill(extractor(target))
    with pytest.raises(ValueError, match=r"target_layer_ids \[0\] \(now \[1\]\)"):
        FeatureCache(tmp_path, samples).fill(extractor(target, [1]))
    with pytest.raises(ValueError, match=r"samples 24 \(now 23\).*delete this one"):
        FeatureCache(tmp_path, samples[1:]).fill(extractor(target))


def test_a_full_disk_is_noticed_before_the_target_runs_and_leaves_no_torn_file(target, samples, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, samples)
    needed = cache.size_bytes(extractor(target))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": needed - 1}))
    with pytest.raises(OSError, match=r"features of 24 samples take .* left"):
        cache.fill(extractor(target))
    monkeypatch.undo()

    def full(_tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark_hf.training.features.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        cache.fill(extractor(target))
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    monkeypatch.undo()
    cache.fill(extractor(target))
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert needed < on_disk < needed + 24 * 4 * 200  # headers of safetensors


def test_samples_with_broken_features_are_named_skipped_and_counted(target, samples, tmp_path, caplog):
    class Broken(FeatureExtractor):
        def __call__(self, input_ids, labelled):
            features = super().__call__(input_ids, labelled)
            bad = (input_ids[:, :17] == torch.tensor(samples[9].input_ids[:17])).all(dim=1)
            taps = features.taps.clone()
            taps[bad, 3] = torch.nan
            return TargetFeatures(taps, features.last_hidden_states, features.log_normalizers, features.best_ids)

    for batch_size in (1, 3):
        trainer = make_trainer(
            target,
            samples,
            tmp_path,
            save_strategy="no",
            max_steps=18 // batch_size,
            per_device_train_batch_size=batch_size,
        )
        trainer.extractor = Broken(target, trainer.drafter.config.target_layer_ids)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dspark_hf"):
            trainer.train()
        assert [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()] == [
            "The target's features of text:9 are not finite: skipped."
        ]
        assert trainer.skipped_samples == 1
        assert trainer.state.log_history[-2]["skipped_samples"] == 1
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


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
        ("samples.jsonl:1", 15, 3),
        ("samples.jsonl:3", 20, 3),
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
