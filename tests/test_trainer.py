"""Training: it learns, resumes bit by bit, skips what is broken, and saves the drafter alone."""

import contextlib
import copy
import logging
import resource

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from safetensors import safe_open
from transformers import TrainerCallback, set_seed

from dspark_hf import DSparkDraftModel
from dspark_hf.training.command import last_checkpoint
from dspark_hf.training.features import FeatureCache, FeatureExtractor, TargetFeatures
from dspark_hf.training.samples import Sample
from dspark_hf.training.target_head import TargetHead
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


def make_trainer(target, samples, output, held_out=6, cache=None, drafter=None, **overrides) -> DSparkTrainer:
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
        (make_drafter(target) if drafter is None else drafter).train(),
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
        {"eval_strategy": "epoch", "save_steps": 6},  # a checkpoint at an epoch's end, before the evaluation
        pytest.param({"muon_learning_rate": 3e-3, "gradient_accumulation_steps": 2}, marks=needs_muon),
    ],
)
def test_a_run_that_stopped_goes_on_bit_by_bit(target, samples, tmp_path, more):
    options = {"max_steps": 9, "save_steps": 4} | more  # beyond the first epoch
    whole = make_trainer(target, samples, tmp_path / "whole", **options)
    whole.train()
    assert whole.state.epoch > 1
    stopped = make_trainer(target, samples, tmp_path / "stopped", **options)
    stopped.add_callback(StopAt(7))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(target, samples, tmp_path / "stopped", **options)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True)
    late = make_trainer(target, samples, tmp_path / "late", **options)
    late.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{9 - 9 % options['save_steps']}"))
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


@contextlib.contextmanager
def no_room_beyond(size):
    """Inside the block every file that grows beyond `size` bytes fails like one on a full disk, in whichever library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_several_gpus_in_one_process_are_not_asked_to_split_a_batch(target, samples, tmp_path):
    args = DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.n_gpu == 0
    args._n_gpu = 2
    assert DSparkTrainer(make_drafter(target), target, args, DraftDataset(samples, range(9))).args.n_gpu == 1


def test_a_checkpoint_brings_its_reduced_vocabulary(target, samples, tmp_path):
    def reduced(first_id, **options):
        drafter = make_drafter(target, draft_vocab_size=40)
        drafter.d2t.fill_(first_id)
        return make_trainer(target, samples, tmp_path, drafter=drafter, **options)

    trainer = reduced(20)
    trainer.train()
    expected = trainer.evaluate()["eval_loss"]
    other = reduced(3, max_steps=7)
    assert other.evaluate()["eval_loss"] != pytest.approx(expected, rel=1e-2)
    other._load_from_checkpoint(str(tmp_path / "checkpoint-6"))
    assert other.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_does_not_fit_is_an_error_that_says_what_to_do(target, samples, tmp_path, file):
    whole = make_trainer(target, samples, tmp_path / "whole")
    whole.train()
    size = (tmp_path / "whole" / "checkpoint-6" / file).stat().st_size
    full = make_trainer(target, samples, tmp_path / "full")
    with (
        no_room_beyond(size - 1),
        pytest.raises(OSError, match=r"full could not be written.*goes on from the last whole"),
    ):
        full.train()
    assert last_checkpoint(tmp_path / "full") is None
    make_trainer(target, samples, tmp_path / "full", max_steps=3).train()
    assert last_checkpoint(tmp_path / "full").name == "checkpoint-3"


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
        log_normalizers = features.log_normalizers[sample.prompt_length :]
        torch.testing.assert_close(log_normalizers, logits.logsumexp(dim=-1), atol=0, rtol=0.01)
        assert (features.best_ids[sample.prompt_length :] == logits.argmax(dim=-1)).float().mean() > 0.9
        # What training makes of it are probabilities, although what was stored is rounded.
        kept = TargetHead(target)(features.last_hidden_states[sample.prompt_length :].float())
        torch.testing.assert_close((kept - log_normalizers[:, None]).exp().sum(dim=-1), torch.ones(len(logits)))
        assert torch.equal(features.best_ids[sample.prompt_length :], kept.argmax(dim=-1))


def test_a_filled_cache_is_not_computed_again_and_a_killed_one_goes_on(target, samples, tmp_path, monkeypatch, capsys):
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
    size = f"{cache.size_bytes(extractor(target)) / 1e9:.3g} GB"
    assert f"Features of 72 samples: {size} to write in {tmp_path}" in capsys.readouterr().err
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
    with pytest.raises(ValueError, match=r"target_layer_ids was \[0\], is now \[1\]"):
        FeatureCache(tmp_path, samples).fill(extractor(target, [1]))
    with pytest.raises(ValueError, match=r"samples was 24, is now 23.*delete this one"):
        FeatureCache(tmp_path, samples[1:]).fill(extractor(target))
    other = copy.deepcopy(target)
    other.model.layers[1].mlp.up_proj.weight.data *= 1.01
    with pytest.raises(ValueError, match=r"sha256_of_first_weights was .*delete this one"):
        FeatureCache(tmp_path, samples).fill(extractor(other))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"samples was None, is now 24"):
        FeatureCache(tmp_path, samples).fill(extractor(target))


def test_a_full_disk_is_noticed_before_the_target_runs_and_leaves_no_torn_file(target, samples, tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, samples)
    needed = cache.size_bytes(extractor(target))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": needed - 1}))
    with pytest.raises(OSError, match=r"features of 24 samples take .* left"):
        cache.fill(extractor(target))
    monkeypatch.undo()

    with no_room_beyond(needed // 2), pytest.raises(OSError, match=r"features-00000.*too large.*same command again"):
        cache.fill(extractor(target))
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    cache.fill(extractor(target))
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert needed < on_disk < needed + 24 * 4 * 200  # headers of safetensors


def test_samples_with_broken_features_are_named_skipped_and_counted(target, samples, tmp_path, caplog):
    class Broken(FeatureExtractor):
        def __call__(self, *args):
            features, input_ids = super().__call__(*args), args[0]
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
            max_steps=2 * 18 // batch_size,  # two epochs
            per_device_train_batch_size=batch_size,
        )
        trainer.extractor = Broken(target, trainer.drafter.config.target_layer_ids)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dspark_hf"):
            trainer.train()
        assert [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()] == [
            "The target's features of text:9 are not finite: skipped."
        ] * 2
        assert trainer.skipped_samples() == {"text:9"}
        assert trainer.state.log_history[-2]["skipped_samples"] == 1
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())
