"""What the frozen target says about samples: taps for the drafter, and what its soft labels are made from.

Features are computed while training, or once before and kept on disk ([`FeatureCache`]), which pays as soon as the
drafter sees a sample twice and the target costs more than the drafter. On disk taps and hidden states are rounded to
bfloat16, which is exact for a bfloat16 target.

The target's probability of any token is `exp(logit - log_normalizer)`, so with a reduced draft vocabulary training needs
the kept rows of the head alone, and the whole head was applied once.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dspark_hf.host import TargetModel
from dspark_hf.taps import TapRecorder
from dspark_hf.training.disk import writing
from dspark_hf.training.manifest import check_manifest, describe_target, write_manifest
from dspark_hf.training.samples import Sample, digest
from dspark_hf.training.target_head import TargetHead, last_hidden_states


HEAD_CHUNK = 512
"""Positions that go through the target's head at once: a large vocabulary's logits take much memory."""

STORED_DTYPE = torch.bfloat16
SAMPLES_PER_FILE = 32
ROWS_PER_FORWARD = 8


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    r"""
    What the target says about one sequence or, with a batch dimension in front, about several padded ones.

    Args:
        taps (`torch.FloatTensor` of shape `(T, len(ids) * D_target)`): In the target's dtype.
        last_hidden_states (`torch.FloatTensor` of shape `(T, D_target)`): After the final norm, in the target's dtype.
        log_normalizers (`torch.FloatTensor` of shape `(T,)`): float32, log of the sum of exp over all logits; 0 where
            no label is needed.
        best_ids (`torch.LongTensor` of shape `(T,)`): The target's best token; 0 where no label is needed.
    """

    taps: torch.Tensor
    last_hidden_states: torch.Tensor
    log_normalizers: torch.Tensor
    best_ids: torch.Tensor

    def to(self, device: torch.device) -> "TargetFeatures":
        """Return the same on another device."""
        return TargetFeatures(*(getattr(self, field.name).to(device) for field in fields(self)))

    def row(self, index: int, length: int) -> "TargetFeatures":
        """Return one row of a batch without its padding."""
        return TargetFeatures(*(getattr(self, field.name)[index, :length].clone() for field in fields(self)))

    def where_rows(self, keep: torch.Tensor) -> "TargetFeatures":
        """Return the batch with zeros in the rows where `keep` `(B,)` is False."""
        masked = {}
        for field in fields(self):
            values = getattr(self, field.name)
            masked[field.name] = values.masked_fill(~keep.view(-1, *[1] * (values.dim() - 1)), 0)
        return TargetFeatures(**masked)


class FeatureExtractor:
    r"""
    Runs the frozen target.

    Args:
        target (`PreTrainedModel`): The target, in evaluation mode.
        layer_ids (`list[int]`): Layers to tap.
    """

    def __init__(self, target: TargetModel, layer_ids: list[int]):
        self.target = target
        self.layer_ids = layer_ids
        self.head = TargetHead(target)

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, labelled: torch.Tensor, dtype: torch.dtype | None = None
    ) -> TargetFeatures:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(B, T)`): Tokens, padded on the right.
            labelled (`torch.BoolTensor` of shape `(B, T)`): Columns whose next token may be supervised.
            dtype (`torch.dtype`, *optional*): Round taps and hidden states to it, these before the head reads them, so that
                labels made from them later still sum to 1. `None` means the target's.

        Returns:
            [`TargetFeatures`] of the batch.
        """
        dtype = self.target.dtype if dtype is None else dtype
        with TapRecorder(self.target, self.layer_ids, input_ids.device, dtype) as recorder:
            hidden = last_hidden_states(self.target, input_ids).to(dtype)
            taps = recorder.take()
        log_normalizers = hidden.new_zeros(input_ids.shape, dtype=torch.float32)
        best_ids = torch.zeros_like(input_ids)
        rows, columns = labelled.nonzero(as_tuple=True)
        for row, column in zip(rows.split(HEAD_CHUNK), columns.split(HEAD_CHUNK), strict=True):
            logits = self.head(hidden[row, column])
            log_normalizers[row, column] = logits.logsumexp(dim=-1)
            best_ids[row, column] = logits.argmax(dim=-1)
        return TargetFeatures(taps, hidden, log_normalizers, best_ids)


def pad_features(features: Sequence[TargetFeatures]) -> TargetFeatures:
    """Stack sequences of different lengths, with zeros on the right."""
    return TargetFeatures(
        *(
            pad_sequence([getattr(each, field.name) for each in features], batch_first=True)
            for field in fields(TargetFeatures)
        )
    )


class FeatureCache:
    r"""
    Features on disk, one safetensors file for every 32 samples, and a manifest that says whose they are.

    Args:
        folder (`Path`): Where the files are.
        samples (`Sequence[Sample]`): The samples; files hold them in the order of their length.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample]):
        self.folder = folder
        self.samples = samples
        order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
        self.groups = [order[first : first + SAMPLES_PER_FILE] for first in range(0, len(order), SAMPLES_PER_FILE)]
        self._file_of = {index: number for number, group in enumerate(self.groups) for index in group}
        self._open: dict[int, Any] = {}

    def __getitem__(self, index: int) -> TargetFeatures:
        """Return the features of sample `index`."""
        number = self._file_of[index]
        if number not in self._open:
            self._open[number] = safe_open(self._path(number), framework="pt")
        file = self._open[number]
        return TargetFeatures(*(file.get_tensor(f"{index}.{field.name}") for field in fields(TargetFeatures)))

    def fill(self, extractor: FeatureExtractor, rank: int = 0, world_size: int = 1) -> None:
        r"""
        Compute what is missing. A run that was killed goes on where it stopped.

        Args:
            extractor ([`FeatureExtractor`]): Runs the target.
            rank (`int`): Number of this process; each computes its share, and none waits for the others.
            world_size (`int`): Number of processes.

        Raises:
            ValueError: If the folder holds features of another target or of other samples; the message names the
                difference.
            OSError: If the disk has no room for them, before the target runs.
        """
        missing = [number for number in range(len(self.groups)) if not self._path(number).exists()]
        self._check_manifest(extractor, may_write=len(missing) == len(self.groups))
        needed = self._check_room(extractor, missing)
        if missing and rank == 0:
            tqdm.write(
                f"Features of {len(self.samples)} samples: {needed / 1e9:.3g} GB to write in {self.folder}", sys.stderr
            )
        own = [number for number in missing if number % world_size == rank]
        for number in tqdm(own, desc="features", unit="file", disable=rank > 0):
            self._write(number, self._compute(extractor, self.groups[number]))

    def size_bytes(self, extractor: FeatureExtractor, numbers: Sequence[int] | None = None) -> int:
        """Size of some files, or of all, in bytes."""
        target = extractor.target
        width = target.config.get_text_config(decoder=True).hidden_size
        per_token = (len(extractor.layer_ids) + 1) * width * STORED_DTYPE.itemsize + 4 + 8
        groups = self.groups if numbers is None else [self.groups[number] for number in numbers]
        return per_token * sum(len(self.samples[index].input_ids) for group in groups for index in group)

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

    def _check_room(self, extractor: FeatureExtractor, missing: list[int]) -> int:
        needed, free = self.size_bytes(extractor, missing), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                f"The features of {len(self.samples)} samples take {needed / 1e9:.2f} GB, but {self.folder} has "
                f"{free / 1e9:.2f} GB left. Use another folder, fewer samples, or train without a feature cache."
            )
        return needed

    def _check_manifest(self, extractor: FeatureExtractor, may_write: bool) -> None:
        manifest = {
            **describe_target(extractor.target),
            "target_layer_ids": list(extractor.layer_ids),
            "samples": len(self.samples),
            "sha256_of_samples": digest(self.samples),
        }
        path = self.folder / "manifest.json"
        if may_write:
            write_manifest(path, manifest)
        else:
            check_manifest(path, manifest, "Give another folder, or delete this one.")

    def _compute(self, extractor: FeatureExtractor, group: list[int]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for first in range(0, len(group), ROWS_PER_FORWARD):
            indices = group[first : first + ROWS_PER_FORWARD]
            rows = [self.samples[index] for index in indices]
            batch = pad_sequence([torch.tensor(row.input_ids) for row in rows], batch_first=True)
            lengths = torch.tensor([len(row.input_ids) for row in rows])
            prompts = torch.tensor([row.prompt_length for row in rows])
            columns = torch.arange(batch.shape[1])
            labelled = (columns >= prompts[:, None]) & (columns < lengths[:, None])
            device = extractor.target.device
            features = extractor(batch.to(device), labelled.to(device), STORED_DTYPE).to(torch.device("cpu"))
            for row, index in enumerate(indices):
                own = features.row(row, int(lengths[row]))
                tensors |= {f"{index}.{field.name}": getattr(own, field.name) for field in fields(TargetFeatures)}
        return tensors

    def _write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        path = self._path(number)
        partial = path.with_suffix(".partial")
        try:
            with writing(path, "run the same command again: it goes on with what is missing"):
                save_file(tensors, partial)
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
