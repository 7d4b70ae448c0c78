"""The cost curve: seconds of a target forward by its number of tokens, measured on the live pair and kept on disk.

What a policy weighs a draft token against is the time that its verification takes (section 3.2.2). That time depends on
everything in [`curve_key`], so each key has a file of its own, filled as rows and contexts are first asked for. Curves are
kept as measured: real ones are jagged. `dspark-hf profile` measures ahead.

Invariant: a curve's file is whole at any time.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from dspark_hf.grouped import SWITCH
from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.passes import TIME_LIMIT_S, Clock, time_passes
from dspark_hf.recurrent import has_recurrent_states
from dspark_hf.reference_pair import default_cache_dir


logger = logging.getLogger(__name__)

SMALLEST_BUCKET = 256
ENOUGH_REPEATS = 3  # A median of fewer deserves a warning.


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    r"""
    Seconds of the passes of a round, for one number of rows and one context bucket.

    Args:
        target_seconds (`list[float]`): Entry `w - 1` is one target forward over w tokens of every row, w = 1..block_size + 1.
        draft_seconds (`list[float]`): Entry `n - 1` is one drafting pass of n tokens for every row, n = 1..block_size: the
            parallel stage over the whole block, and the sequential one for so many tokens.
    """

    target_seconds: list[float]
    draft_seconds: list[float]


class CostCurve:
    r"""
    The costs of one target and drafter as they are loaded now; [`CostCurve.open`] makes one.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`DSparkDraftModel`]): Its drafter.
        key (`dict[str, Any]`): What the costs depend on.
        path (`Path`): The key's file.
        clock (`Clock`): Gives the time in seconds.
    """

    def __init__(self, target: TargetModel, drafter: DSparkDraftModel, key: dict[str, Any], path: Path, clock: Clock):
        self.target, self.drafter = target, drafter
        self.key, self.path, self.clock = key, path, clock
        self._costs = self._read()

    @classmethod
    def open(
        cls,
        target: TargetModel,
        drafter: DSparkDraftModel,
        folder: Path | None = None,
        clock: Clock = time.perf_counter,
    ) -> "CostCurve":
        r"""
        Open the pair's curve: the one on disk if there is one for its key, else an empty one. Nothing is measured yet.

        Args:
            target (`PreTrainedModel`): The target.
            drafter ([`DSparkDraftModel`]): Its drafter.
            folder (`Path`, *optional*): Where curves are kept. Defaults to `cost_curves` in the package's cache folder, see
                `reference_pair.default_cache_dir`.
            clock (`Clock`, *optional*): Gives the time in seconds.

        Raises:
            NotImplementedError: If the target has recurrent states: a rejection then costs a replay, which a curve of single
                forwards does not know.
        """
        if has_recurrent_states(target.config.get_text_config(decoder=True)):
            raise NotImplementedError(
                f"{type(target).__name__} keeps recurrent states, so a rejected draft token costs another forward, which the "
                "throughput policies do not weigh. Set num_assistant_tokens_schedule to 'constant' or 'threshold'."
            )
        key = curve_key(target, drafter)
        folder = default_cache_dir() / "cost_curves" if folder is None else folder
        return cls(target, drafter, key, folder / f"{_digest(json.dumps(key, sort_keys=True))}.json", clock)

    def costs(self, rows: int, context: int) -> ForwardCosts:
        r"""
        Look up the costs of a round, after measuring and storing them if they are not known.

        Args:
            rows (`int`): Rows of the batch.
            context (`int`): Slots in use before the round; decides the bucket.

        Raises:
            ValueError: If one of them is not positive.
        """
        if rows < 1 or context < 1:
            raise ValueError(f"A cost needs at least one row and one token of context, got {rows} and {context}.")
        bucket = context_bucket(context)
        if (rows, bucket) not in self._costs:
            measured = {(rows, bucket): self._measure(rows, bucket)}
            self._costs = self._read() | self._costs | measured  # another process may have added to the file
            self._write()
        return self._costs[rows, bucket]

    def forget(self) -> None:
        """Drop what was measured, on disk too."""
        self.path.unlink(missing_ok=True)
        self._costs = {}

    def plot(self, path: Path) -> None:
        r"""
        Draw what was measured so far, a panel for each context bucket.

        Args:
            path (`Path`): The PNG file to write.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If nothing was measured.
        """
        if not self._costs:
            raise ValueError("This cost curve is empty, so there is nothing to draw: call costs(rows, context) first.")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('Plots need matplotlib: pip install "dspark_hf[plots]".') from error
        buckets = sorted({bucket for _, bucket in self._costs})
        figure = Figure(figsize=(max(6.0, 3.6 * len(buckets)), 4.2), layout="constrained")
        panels = figure.subplots(1, len(buckets), squeeze=False, sharey=True)[0]
        for panel, bucket in zip(panels, buckets, strict=True):
            for rows in sorted(rows for rows, of_bucket in self._costs if of_bucket == bucket):
                costs = self._costs[rows, bucket]
                tokens = [rows * width for width in range(1, len(costs.target_seconds) + 1)]
                target = [1000 * seconds for seconds in costs.target_seconds]
                (line,) = panel.plot(tokens, target, marker="o", markersize=4, label=f"rows = {rows}, target")
                draft = [1000 * seconds for seconds in costs.draft_seconds]
                panel.plot(tokens[:-1], draft, color=line.get_color(), linestyle=":", label=f"rows = {rows}, draft")
            panel.set(
                title=f"context {bucket} (measured at {_context(bucket)})", xlabel="tokens in the forward, or drafted"
            )
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            panel.legend(fontsize=7)
        panels[0].set(ylabel="ms, median", ylim=(0, None))
        figure.supxlabel(self._caption(), fontsize=7)
        figure.savefig(path, dpi=150)

    def _caption(self) -> str:
        key = self.key
        return (
            f"Target {key['target'] or 'without a name'}, {key['dtype'].removeprefix('torch.')}, {key['attention']}; "
            f"{', '.join(key['devices'])}, torch threads: {key['threads']};\n"
            f"torch {key['torch']}, transformers {key['transformers']}, dspark_hf {key['dspark_hf']}"
        )

    def _measure(self, rows: int, bucket: int) -> ForwardCosts:
        times = time_passes(self.target, self.drafter, rows, _context(bucket), self.clock)
        repeats = min(map(len, times)) - 1
        if repeats < ENOUGH_REPEATS:
            logger.warning(
                "Timings behind each cost of %d rows at context %d: %d, the time limit being %g s. `dspark-hf profile --again` "
                "on an idle machine measures better.",
                rows,
                bucket,
                max(repeats, 1),
                TIME_LIMIT_S,
            )
        medians = [statistics.median(seconds[1:] or seconds) for seconds in times]
        block_size = self.drafter.config.block_size
        return ForwardCosts(target_seconds=medians[block_size:], draft_seconds=medians[:block_size])

    def _read(self) -> dict[tuple[int, int], ForwardCosts]:
        """What the file holds, by rows and bucket; nothing if there is none or it makes no sense."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            costs = {
                (int(entry.pop("rows")), int(entry.pop("bucket"))): ForwardCosts(**entry) for entry in record["costs"]
            }
            for entry in costs.values():
                self._check(entry)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("Cannot read the cost curve %s (%s): it is measured again.", self.path, error)
            return {}
        return costs

    def _check(self, costs: ForwardCosts) -> None:
        block_size = self.drafter.config.block_size
        if not isinstance(costs.draft_seconds, list):
            raise ValueError("an earlier release wrote it")
        if (len(costs.target_seconds), len(costs.draft_seconds)) != (block_size + 1, block_size):
            raise ValueError(f"other numbers of costs than for a block of {block_size}")
        if not all(math.isfinite(value) and value >= 0 for value in costs.target_seconds + costs.draft_seconds):
            raise ValueError("a cost is no number of seconds")

    def _write(self) -> None:
        """Write the file under another name and rename it, so that it is whole at any time."""
        entries = [
            {"rows": rows, "bucket": bucket} | asdict(costs) for (rows, bucket), costs in sorted(self._costs.items())
        ]
        text = json.dumps({"key": self.key, "costs": entries}, indent=1) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=self.path.parent) as scratch:
                partial = Path(scratch) / self.path.name
                partial.write_text(text, encoding="utf-8")
                partial.replace(self.path)
        except OSError as error:
            logger.warning("Cannot keep the cost curve in %s (%s): the next run measures again.", self.path, error)


def context_bucket(context: int) -> int:
    """The smallest power of two from 256 up that holds a context of so many tokens."""
    return max(SMALLEST_BUCKET, 1 << (context - 1).bit_length())


def _context(bucket: int) -> int:
    """Where a bucket is measured: at three quarters, the middle of the contexts that no smaller bucket holds."""
    return bucket * 3 // 4


def curve_key(target: TargetModel, drafter: DSparkDraftModel) -> dict[str, Any]:
    """Everything known to change the costs of a pair as it is loaded now."""
    devices = {parameter.device for parameter in target.parameters()}
    return {
        "target": target.name_or_path,
        "target_commit": getattr(target.config, "_commit_hash", None),
        "target_config": _digest(target.config.to_json_string(use_diff=False)),
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "drafter_config": _digest(drafter.config.to_json_string(use_diff=False)),
        "dtype": str(target.dtype),
        "drafter_dtype": str(drafter.dtype),
        "attention": target.config.get_text_config(decoder=True)._attn_implementation,
        "drafter_attention": drafter.config._attn_implementation,
        "devices": sorted(_device_name(device) for device in devices),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dspark_hf": importlib.metadata.version("dspark_hf"),
        "forced_gqa": os.environ.get(SWITCH),
        "verifier": "padded",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        processor = platform.processor() or platform.machine()
        return f"{os.cpu_count()} {processor} cores, {torch.backends.cpu.get_cpu_capability()}"
    return device.type
