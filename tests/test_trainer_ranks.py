"""Training on two CPU ranks equals training on one with twice the batch, also where a rank has nothing to learn from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


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
