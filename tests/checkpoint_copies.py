"""Copies of the golden drafters that tests may spoil."""

import json
import shutil

from conftest import GOLDEN
from safetensors.torch import load_file, save_file

from dspark_hf import DSparkDraftModel


CASES = ["deepspec-qwen3-vanilla", "deepspec-qwen3-rnn"]


class Checkpoint:
    """A copy of a released drafter that tests may spoil."""

    def __init__(self, folder, source=GOLDEN / CASES[0] / "drafter"):
        self.folder = folder
        shutil.copytree(source, folder)

    @property
    def weights(self):
        return load_file(self.folder / "model.safetensors")

    def save(self, weights) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            self.folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    def change_weights(self, drop=(), **new) -> None:
        weights = {name: tensor for name, tensor in self.weights.items() if name not in drop}
        self.save(weights | new)

    def change_config(self, drop=(), **new) -> None:
        path = self.folder / "config.json"
        config = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
        path.write_text(json.dumps(config | new))

    def load(self, **kwargs) -> DSparkDraftModel:
        return DSparkDraftModel.from_pretrained(self.folder, **kwargs)
