"""The cost curve: what is measured, what is kept on disk under which key, and that measuring changes nothing."""

import argparse
import copy
import gc
import importlib.metadata
import json
import platform
import random
import sys
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from conftest import make_drafter, make_target

from dspark_hf import passes
from dspark_hf.caches import SlotLayer
from dspark_hf.cost_curve import CostCurve, context_bucket, curve_key
from dspark_hf.grouped import SWITCH
from dspark_hf.passes import TIME_LIMIT_S
from dspark_hf.profiling import add_profile_arguments, run_profile


BLOCK = 3
WIDTHS = range(1, BLOCK + 2)
DRAFT_S, TOKEN_S = 0.005, 0.001  # of the parallel stage, and of each drafted token
JAGGED_S = {1: 0.04, 2: 0.10, 3: 0.06, 4: 0.07}  # seconds of one row by width, as CPUs have them


class Bench:
    """A pair whose passes move a clock by hand; a forward of R rows takes R times as long as one row's."""

    def __init__(self, folder, seconds=None):
        self.folder, self.seconds = folder, seconds or JAGGED_S
        self.target = make_target(num_hidden_layers=1)
        self.drafter = make_drafter(self.target, num_hidden_layers=1, block_size=BLOCK)
        self.now = 0.0
        self.forwards = []  # (rows, width, slots that attention reads), one for each target forward
        self.drafts = 0
        self.extra = lambda: 0.0
        self.target.register_forward_pre_hook(self._run_target, with_kwargs=True)
        self.drafter.register_forward_pre_hook(self._run_drafter)
        self.drafter.markov_head.markov_w2.register_forward_pre_hook(self._draft_token)

    def _run_target(self, _module, _args, kwargs):
        rows, width = kwargs["input_ids"].shape
        self.forwards.append((rows, width, kwargs["attention_mask"].shape[-1]))
        self.now += rows * self.seconds[width] + self.extra()

    def _run_drafter(self, _module, _args):
        self.drafts += 1
        self.now += DRAFT_S

    def _draft_token(self, _module, _args):
        self.now += TOKEN_S

    def open(self):
        return CostCurve.open(self.target, self.drafter, self.folder, clock=lambda: self.now)

    def is_silent(self, rows, context):
        """Whether a curve opened now knows these costs."""
        before = len(self.forwards)
        self.open().costs(rows, context)
        return len(self.forwards) == before


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch):
    """One timing a width, to be quick; the tests that need more set their number."""
    monkeypatch.setattr(passes, "REPEATS", 0)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def expected(rows):
    return pytest.approx([rows * JAGGED_S[width] for width in WIDTHS])


@pytest.mark.parametrize("rows", [1, 3])
def test_measures_every_width_of_the_loop_and_keeps_a_jagged_curve_jagged(bench, monkeypatch, rows):
    monkeypatch.setattr(passes, "REPEATS", 3)
    costs = bench.open().costs(rows, 300)
    assert costs.target_seconds == expected(rows)
    assert costs.draft_seconds == pytest.approx([DRAFT_S + number * TOKEN_S for number in range(1, BLOCK + 1)])
    context = 512 * 3 // 4
    assert set(bench.forwards) == {(rows, width, context + width) for width in WIDTHS}
    assert len(bench.forwards) == 1 + len(WIDTHS) * (1 + 3)  # the first gives the cache its buffers
    assert bench.drafts == 1 + BLOCK * (1 + 3)


def test_widths_are_interleaved_in_changing_order(bench, monkeypatch):
    monkeypatch.setattr(passes, "REPEATS", 3)
    bench.open().costs(1, 1)
    widths = [width for _, width, _ in bench.forwards[1:]]
    sweeps = [tuple(widths[start : start + len(WIDTHS)]) for start in range(0, len(widths), len(WIDTHS))]
    assert all(sorted(sweep) == list(WIDTHS) for sweep in sweeps)
    assert len(set(sweeps)) > 1


def test_a_slow_start_and_single_outliers_do_not_count(bench, monkeypatch):
    monkeypatch.setattr(passes, "REPEATS", 9)
    bench.extra = lambda: 1.5 if len(bench.forwards) <= 1 + len(WIDTHS) or len(bench.forwards) % 9 == 0 else 0.0
    assert bench.open().costs(1, 1).target_seconds == expected(1)


def test_contexts_share_a_bucket_up_to_a_power_of_two():
    contexts = [1, 255, 256, 257, 512, 513, 1024, 1025]
    assert [context_bucket(context) for context in contexts] == [256, 256, 256, 512, 512, 1024, 1024, 2048]


def test_nothing_is_measured_twice(bench):
    curve = bench.open()
    first = curve.costs(2, 200)
    count = len(bench.forwards)
    assert curve.costs(2, 256) is first
    assert bench.open().costs(2, 10) == first
    assert len(bench.forwards) == count
    assert not bench.is_silent(1, 200)
    assert not bench.is_silent(2, 257)
    assert bench.is_silent(1, 256)


def test_two_curves_of_one_file_add_to_it(bench):
    here, there = bench.open(), bench.open()
    here.costs(1, 1)
    there.costs(2, 1)
    assert bench.is_silent(1, 1)
    assert bench.is_silent(2, 1)


def change_target_config(bench, _monkeypatch):
    bench.target.config.rms_norm_eps = 1e-5


def change_drafter_config(bench, _monkeypatch):
    bench.drafter.config.sliding_window = 64


def change_name(bench, _monkeypatch):
    bench.target.name_or_path = "org/other"


def change_commit(bench, _monkeypatch):
    bench.target.config._commit_hash = "0" * 40


def change_weights(bench, _monkeypatch):
    bench.target.adapter = torch.nn.Linear(2, 2)


def change_attention(bench, _monkeypatch):
    bench.target.set_attn_implementation("eager")


def change_drafter_attention(bench, _monkeypatch):
    bench.drafter.set_attn_implementation("eager")


def change_dtype(bench, _monkeypatch):
    bench.target = copy.deepcopy(bench.target).bfloat16()


def change_drafter_dtype(bench, _monkeypatch):
    bench.drafter.bfloat16()


def change_device(_bench, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "another")


def change_threads(_bench, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)


def change_precision(_bench, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")


def change_torch(_bench, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.0")


def change_transformers(_bench, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "99.0")


def change_switch(_bench, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")


def change_package(_bench, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"99.0 of {name}")


CHANGES = {
    "target": change_name,
    "target_commit": change_commit,
    "target_config": change_target_config,
    "target_parameters": change_weights,
    "drafter_config": change_drafter_config,
    "dtype": change_dtype,
    "drafter_dtype": change_drafter_dtype,
    "attention": change_attention,
    "drafter_attention": change_drafter_attention,
    "devices": change_device,
    "threads": change_threads,
    "float32_matmul_precision": change_precision,
    "torch": change_torch,
    "transformers": change_transformers,
    "dspark_hf": change_package,
    "forced_gqa": change_switch,
}


@pytest.mark.parametrize("field", CHANGES)
def test_each_ingredient_changes_the_key_and_its_file(bench, monkeypatch, field):
    before, path = curve_key(bench.target, bench.drafter), bench.open().path
    assert set(before) == {*CHANGES, "verifier"}
    CHANGES[field](bench, monkeypatch)
    after = curve_key(bench.target, bench.drafter)
    # A config says in which dtype its model is.
    follows = {"dtype": {"target_config"}, "drafter_dtype": {"drafter_config"}, "target": {"target_config"}}
    changed = {name for name in before if before[name] != after[name]}
    assert field in changed
    assert changed <= {field} | follows.get(field, set())
    assert bench.open().path != path


def test_a_changed_key_is_measured_anew_and_the_old_curve_stays(bench, monkeypatch):
    bench.open().costs(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert not bench.is_silent(1, 1)
    assert bench.is_silent(1, 1)


def test_a_call_of_generate_does_not_change_the_key(bench):
    before = curve_key(bench.target, bench.drafter)
    options = {"max_new_tokens": 6, "do_sample": True, "return_dict_in_generate": True}
    bench.seconds = dict.fromkeys(range(20), 0.0)
    del bench.target._forward_pre_hooks[next(iter(bench.target._forward_pre_hooks))]  # it reads masks of verification
    bench.target.generate(torch.tensor([[5, 9, 11]]), assistant_model=bench.drafter, **options)
    assert curve_key(bench.target, bench.drafter) == before


def test_the_file_says_in_clear_what_it_was_measured_for(bench):
    curve = bench.open()
    curve.costs(2, 300)
    record = json.loads(curve.path.read_text())
    assert record["key"] == curve_key(bench.target, bench.drafter)
    (entry,) = record["costs"]
    assert (entry["rows"], entry["bucket"]) == (2, 512)
    assert entry["target_seconds"] == expected(2)


def test_a_kill_while_writing_leaves_the_file_as_it_was(bench, monkeypatch):
    curve = bench.open()
    curve.costs(1, 1)
    before = curve.path.read_text()

    def die(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            curve.costs(2, 1)
    assert list(bench.folder.iterdir()) == [curve.path]
    assert curve.path.read_text() == before
    assert bench.is_silent(1, 1)


def test_a_kill_while_measuring_stores_nothing(bench):
    def die():
        raise KeyboardInterrupt

    bench.extra = die
    with pytest.raises(KeyboardInterrupt):
        bench.open().costs(1, 1)
    assert list(bench.folder.iterdir()) == []


GOOD = {"rows": 1, "bucket": 256, "draft_seconds": [0.1] * BLOCK, "target_seconds": [0.1] * len(WIDTHS)}
BROKEN = {
    "empty": b"",
    "cut": b'{"costs": [{"rows": 1,',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "no costs": b"{}",
    "no entries": b'{"costs": [1]}',
    "another field": json.dumps({"costs": [GOOD | {"more": 1}]}).encode(),
    "other widths": json.dumps({"costs": [GOOD | {"target_seconds": [0.1]}]}).encode(),
    "one draft": json.dumps({"costs": [GOOD | {"draft_seconds": 0.1}]}).encode(),
    "no number": json.dumps({"costs": [GOOD | {"draft_seconds": [None] * BLOCK}]}).encode(),
    "not finite": json.dumps({"costs": [GOOD | {"draft_seconds": [float("nan")] * BLOCK}]}).encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_measured_again_with_a_warning(bench, caplog, content):
    path = bench.open().path
    path.write_bytes(content)
    curve = bench.open()
    assert "measured again" in caplog.text
    assert curve.costs(1, 1).target_seconds == expected(1)
    assert bench.is_silent(1, 1)


def test_a_folder_that_cannot_be_written_costs_a_warning(bench, caplog):
    bench.folder = bench.folder / "file" / "folder"
    bench.folder.parent.write_text("in the way")
    assert bench.open().costs(1, 1).target_seconds == expected(1)
    assert "Cannot keep" in caplog.text


def test_a_slow_machine_gets_a_curve_from_one_pass_of_each_width(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(passes, "REPEATS", 9)
    bench = Bench(tmp_path, {width: TIME_LIMIT_S + width for width in WIDTHS})
    costs = bench.open().costs(1, 1)
    assert costs.target_seconds == pytest.approx([TIME_LIMIT_S + width for width in WIDTHS])
    assert len(bench.forwards) == 1 + len(WIDTHS)
    assert "--again" in caplog.text
    assert bench.is_silent(1, 1)


def test_the_time_limit_ends_a_measurement_between_two_passes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(passes, "REPEATS", 1000)
    second = TIME_LIMIT_S / 22
    bench = Bench(tmp_path, dict.fromkeys(WIDTHS, second))
    assert bench.open().costs(1, 1).target_seconds == pytest.approx([second] * len(WIDTHS))
    assert 21 <= len(bench.forwards) - 1 <= 23  # drafts take a little time too
    assert not caplog.records  # four repeats are enough


@pytest.mark.parametrize("training", [False, True])
def test_measuring_leaves_the_global_random_states_alone(tmp_path, training):
    target = make_target(num_hidden_layers=1, attention_dropout=0.5).train(training)
    drafter = make_drafter(target, attention_dropout=0.5).train(training)
    torch.manual_seed(7)
    before, python = torch.get_rng_state(), random.getstate()
    CostCurve.open(target, drafter, tmp_path).costs(2, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_a_call_that_measures_first_samples_the_same_tokens(tmp_path):
    target = make_target(num_hidden_layers=1)
    drafter = make_drafter(target)
    texts = []
    for _ in ("measured now", "found on disk"):
        torch.manual_seed(7)
        CostCurve.open(target, drafter, tmp_path).costs(1, 1)
        prompt = torch.tensor([[5, 9, 11]])
        texts.append(target.generate(prompt, assistant_model=drafter, do_sample=True, max_new_tokens=12).tolist())
    assert texts[0] == texts[1]


def test_measuring_leaves_the_models_alone(tmp_path):
    target = make_target(num_hidden_layers=1).train()
    drafter = make_drafter(target)
    target.model.layers[0].eval()

    def state():
        modules = [*target.modules(), *drafter.modules()]
        parameters = [*target.parameters(), *drafter.parameters()]
        return {
            "training": [module.training for module in modules],
            "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
            "attributes": [sorted(vars(module)) for module in modules],
            "gradients": [(p.requires_grad, p.grad, p.data_ptr()) for p in parameters],
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        }

    before, weights = state(), copy.deepcopy(target.state_dict())
    CostCurve.open(target, drafter, tmp_path).costs(2, 1)
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in target.state_dict().items())


def test_the_caches_of_a_measurement_do_not_wait_for_the_garbage_collector(bench, monkeypatch):
    buffers = []
    initialise = SlotLayer.lazy_initialization

    def recorded(layer, *states):
        initialise(layer, *states)
        buffers.append(weakref.ref(layer.keys))

    monkeypatch.setattr(SlotLayer, "lazy_initialization", recorded)
    gc.disable()
    try:
        bench.open().costs(2, 1)
        assert len(buffers) == 2
        assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gemma3", "mistral", "qwen3_moe"])
def test_every_family_is_measured_at_contexts_longer_than_its_table_of_positions(tmp_path, family):
    target = make_target(family)
    curve = CostCurve.open(target, make_drafter(target), tmp_path)
    assert min(curve.costs(2, 512).target_seconds) > 0


@pytest.mark.parametrize(
    "shape",
    [{"first_prediction_slot": 1}, {"draft_vocab_size": 24}, {"markov_rank": 0, "enable_confidence_head": False}],
)
def test_every_kind_of_drafter_is_measured(tmp_path, shape):
    target = make_target(num_hidden_layers=1)
    assert CostCurve.open(target, make_drafter(target, **shape), tmp_path).costs(1, 1).draft_seconds[0] > 0


@pytest.mark.parametrize(("rows", "context"), [(0, 5), (2, 0), (-1, 5)])
def test_refuses_costs_of_nothing(bench, rows, context):
    with pytest.raises(ValueError, match="at least one row and one token of context"):
        bench.open().costs(rows, context)
    assert bench.forwards == []


def test_an_empty_curve_cannot_be_drawn(bench):
    with pytest.raises(ValueError, match="call costs"):
        bench.open().plot(bench.folder / "curve.png")


def test_a_plot_without_matplotlib_names_the_extra(bench, monkeypatch):
    curve = bench.open()
    curve.costs(1, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dspark_hf\[plots\]"):
        curve.plot(bench.folder / "curve.png")


# The command


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make_target(num_hidden_layers=1)
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    target.save_pretrained(folders[0])
    make_drafter(target, num_hidden_layers=1).save_pretrained(folders[1])
    return folders


@pytest.fixture
def profile(pair, tmp_path, monkeypatch):
    """Runs the command on a pair and a cache folder of its own; returns what it measured, as (rows, context)."""
    monkeypatch.setattr("dspark_hf.cost_curve.default_cache_dir", lambda: tmp_path / "cache")
    measured = []
    measure = CostCurve._measure

    def recorded(curve, rows, bucket):
        measured.append((rows, bucket))
        return measure(curve, rows, bucket)

    monkeypatch.setattr(CostCurve, "_measure", recorded)

    def run(*options):
        parser = argparse.ArgumentParser()
        add_profile_arguments(parser)
        models = ["--target", str(pair[0]), "--drafter", str(pair[1]), "--device", "cpu"]
        measured.clear()
        run_profile(parser.parse_args([*models, *options]))
        return list(measured)

    return run


def test_the_command_prints_a_table_and_draws_it(profile, tmp_path, capsys):
    png = tmp_path / "curve.png"
    assert profile("--rows", "1", "2", "--context", "256", "300", "--output", str(png)) == [
        (1, 256),
        (2, 256),
        (1, 512),
        (2, 512),
    ]
    header, *table = capsys.readouterr().out.splitlines()[1:6]
    assert header.split() == ["rows", "context", "draft", "1", "2", "3", "4", "5"]
    assert [line.split()[:2] for line in table] == [["1", "256"], ["2", "256"], ["1", "512"], ["2", "512"]]
    assert all(float(cell) >= 0 for line in table for cell in line.split())
    assert png.read_bytes().startswith(b"\x89PNG")
    (file,) = (tmp_path / "cache" / "cost_curves").iterdir()
    assert file.suffix == ".json"


def test_the_command_measures_what_is_missing_or_everything_again(profile):
    assert profile("--rows", "1", "--context", "200") == [(1, 256)]
    assert profile("--rows", "1", "2", "--context", "256") == [(2, 256)]
    assert profile("--rows", "1", "--context", "256", "--again") == [(1, 256)]
    assert profile("--rows", "2", "--context", "256") == [(2, 256)]


def test_the_command_has_defaults_that_cover_small_batches():
    parser = argparse.ArgumentParser()
    add_profile_arguments(parser)
    args = parser.parse_args(["--target", "t", "--drafter", "d"])
    assert (args.rows, args.context, args.output, args.again) == ([1, 2, 4, 8], [256, 1024], None, False)


def test_the_command_refuses_rows_and_drafters_that_do_not_fit(profile, tmp_path):
    with pytest.raises(ValueError, match="at least one row"):
        profile("--rows", "0")
    other = make_target(num_hidden_layers=3)
    make_drafter(other).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="number of layers 3"):
        profile("--drafter", str(tmp_path))
