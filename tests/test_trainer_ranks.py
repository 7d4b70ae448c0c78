"""Training on two CPU ranks equals training on one with twice the batch, also where a rank has nothing to learn from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import make_samples, make_target

from dspark_hf.host import cache_argument


RUN = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from test_trainer import losses, make_samples, make_target, make_trainer
from dspark_hf.training.features import FeatureCache, FeatureExtractor

output, batch_size, broken, cached = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4] == "True"
target = make_target(num_hidden_layers=2).requires_grad_(False)
samples = make_samples(target)
cache = FeatureCache(__import__("pathlib").Path(output) / "features", samples) if cached else None
# Every candidate becomes an anchor, so nothing hangs on each rank's random numbers; SGD does not blow up rounding.
options = dict(per_device_train_batch_size=batch_size, per_device_eval_batch_size=1, num_anchors=24, optim="sgd")
trainer = make_trainer(target, samples, output, cache=cache, learning_rate=0.5, max_steps=5, save_steps=5, **options)
if cache is not None:
    cache.fill(trainer.extractor, trainer.args.process_index, trainer.args.world_size)
    trainer.accelerator.wait_for_everyone()

class Broken(FeatureExtractor):
    def __call__(self, input_ids, labelled):
        features = super().__call__(input_ids, labelled)
        features.taps[(input_ids[:, :4] == torch.tensor(samples[9].input_ids[:4])).all(dim=1), 2] = torch.nan
        return features

if broken:
    trainer.extractor = Broken(target, trainer.drafter.config.target_layer_ids)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    trainer.save_model()
    found = {{name: value for name, value in metrics.items() if "second" not in name and "runtime" not in name}}
    open(output + "/found.json", "w").write(json.dumps([losses(trainer), found]))
"""


def run(tmp_path, ranks: int, batch_size: int, broken: bool, cached: bool) -> Path:
    script, output = tmp_path / "run.py", tmp_path / f"ranks-{ranks}"
    script.write_text(RUN.format(tests=str(Path(__file__).parent)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), str(output), str(batch_size), str(broken), str(cached)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "cached"), [(False, False), (True, False), (False, True)])
def test_two_ranks_train_like_one_with_twice_the_batch(tmp_path, broken, cached):
    one, two = run(tmp_path, 1, 2, broken, cached), run(tmp_path, 2, 1, broken, cached)
    for name, tensor in load_file(one / "model.safetensors").items():
        torch.testing.assert_close(load_file(two / "model.safetensors")[name], tensor, atol=2e-5, rtol=1e-4)
    (losses, metrics), (expected_losses, expected_metrics) = (
        json.loads((folder / "found.json").read_text()) for folder in (two, one)
    )
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    cache_argument() != "cache",
    reason="transformers 5.10.2 loads checkpoints of CPU ranks to cpu:0, which torch does not know",
)
def test_the_command_trains_on_two_ranks_and_goes_on(tmp_path):
    target = make_target(num_hidden_layers=2)
    target.save_pretrained(tmp_path / "target")
    rows = [{"prompt_ids": s.input_ids[:4], "response_ids": s.input_ids[4:]} for s in make_samples(target)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"--target {tmp_path}/target --data {tmp_path}/samples.jsonl --feature-cache {tmp_path}/features --held-out 4"
    )
    options += " --small-budget --draft-vocab-size 40 --markov-rank 6 --block-size 4 --num-anchors 4 --use-cpu True"
    options += " --per-device-train-batch-size 2 --save-steps 3 --logging-steps 1"

    def run_command(output: Path, max_steps: int) -> None:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "dspark_hf.cli",
        ]
        command = [*launcher, "train", *options.split(), "--output", str(output), "--max-steps", str(max_steps)]
        command += ["--lr-scheduler-type", "constant"]  # one that does not depend on the number of steps
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr

    run_command(tmp_path / "whole", 6)
    run_command(tmp_path / "stopped", 3)
    run_command(tmp_path / "stopped", 6)
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert [name for name in whole if not torch.equal(whole[name], stopped[name])] == []
    log = json.loads((tmp_path / "stopped" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, 7))
