"""The cost curve: seconds of a target forward by its number of tokens, measured on the live pair and kept on disk.

    dspark-hf profile --target T --drafter D --rows 1 2 4 8 --context 256 1024 --output curve.png

What a policy weighs a draft token against is the time that its verification takes (section 3.2.2). That time depends on
everything in [`curve_key`], so each key has a file of its own, filled as rows and contexts are first asked for. Measured
are the loop's own pieces, the `Verifier` and the `Drafting`, on random tokens behind a cache of noise, which takes as long
to read as a text and needs no prefill. Curves are kept as measured: real ones are jagged.

Invariants: measuring changes neither the models nor any global random state, and a curve's file is whole at any time.
"""

import argparse
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from dspark_hf.caches import SlotCache
from dspark_hf.drafting import Context, Drafting
from dspark_hf.host import TargetModel
from dspark_hf.loading import load_target
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.narrow import narrow_linears
from dspark_hf.recurrent import has_recurrent_states
from dspark_hf.reference_pair import default_cache_dir
from dspark_hf.sampling import Sampler
from dspark_hf.taps import check_target
from dspark_hf.transfer import upload
from dspark_hf.verification import Verifier, check_verifiable


logger = logging.getLogger(__name__)

SMALLEST_BUCKET = 256
REPEATS = 9
ENOUGH_REPEATS = 3  # A median of fewer deserves a warning.
TIME_LIMIT_S = 20.0
SILENT_S = 3.0  # A measurement that takes longer shows a progress bar.

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    r"""
    Seconds of the passes of a round, for one number of rows and one context bucket.

    Args:
        target_seconds (`list[float]`): Entry `w - 1` is one target forward over w tokens of every row, w = 1..block_size + 1.
        draft_seconds (`float`): One drafting pass over every row: the parallel stage, and the sequential one for the whole
            block.
    """

    target_seconds: list[float]
    draft_seconds: float


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
                draft = {"color": line.get_color(), "linestyle": ":", "label": f"rows = {rows}, draft"}
                panel.plot(tokens, [1000 * costs.draft_seconds] * len(tokens), **draft)
            panel.set(title=f"context {bucket} (measured at {_context(bucket)})", xlabel="tokens in the forward")
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
        with _quietly(self.target, self.drafter), _passes(self.target, self.drafter, rows, _context(bucket)) as passes:
            times = _time(passes, self.drafter.device, self.clock, f"cost curve, {rows} rows, context {bucket}")
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
        draft, *target = [statistics.median(seconds[1:] or seconds) for seconds in times]
        return ForwardCosts(target_seconds=target, draft_seconds=draft)

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
        seconds = [*costs.target_seconds, costs.draft_seconds]
        if len(seconds) != self.drafter.config.block_size + 2:
            raise ValueError(f"{len(seconds)} costs for a block of {self.drafter.config.block_size}")
        if not all(math.isfinite(value) and value >= 0 for value in seconds):
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


@contextmanager
def _quietly(target: TargetModel, drafter: DSparkDraftModel) -> Iterator[None]:
    """Run the target as the loop does; dropout of one in training mode takes nothing from the global random state."""
    devices = {parameter.device for parameter in target.parameters() if parameter.device.type == "cuda"}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        target._optimize_model_for_decode(),
        narrow_linears(target, drafter),
    ):
        yield


@contextmanager
def _passes(
    target: TargetModel, drafter: DSparkDraftModel, rows: int, context: int
) -> Iterator[list[Callable[[], object]]]:
    """The passes of a round behind `context` tokens: a draft, then target forwards of 1, 2, ..., block_size + 1 tokens."""
    config, device = drafter.config, drafter.device
    widest = config.block_size + 1
    context = max(context, widest)
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(config.vocab_size, (rows, widest), generator=generator, device=device)
    slots = (context + torch.arange(widest, device=device)).expand(rows, -1)
    prompt_mask = torch.ones(rows, context, dtype=torch.bool, device=device)
    # Positions start at 0 whatever the context is: tables of learned ones and dynamic frequencies are left in peace.
    kwargs = {"position_ids": torch.full((rows, 1), -1, device=device), "use_cache": True}
    verifier = Verifier(
        target, SlotCache(target.config.get_text_config(decoder=True).num_hidden_layers), prompt_mask, kwargs
    )
    drafting = Drafting(drafter, target, prompt_mask, 0)
    width_of_taps = len(config.target_layer_ids) * config.target_hidden_size
    taps = torch.randn(rows, widest, width_of_taps, generator=generator, device=device, dtype=drafter.dtype)
    # The most that a round hands over; only the committed part is kept, but all of it is computed.
    last_round = Context(taps, slots - widest, upload([widest] * rows, device))

    def draft() -> None:
        drafting.observe(last_round)
        used = context + config.num_block_inputs
        drafting.draft(tokens[:, 0], slots[:, 0], used, config.block_size, _choose)

    def verify(width: int) -> Callable[[], object]:
        return lambda: verifier(tokens[:, :width], slots[:, :width], context + width, upload([width] * rows, device))

    passes = [draft] + [verify(width) for width in range(1, widest + 1)]
    caches = (verifier.cache, drafting.cache)
    try:
        for first in (draft, passes[-1]):
            first()  # gives the caches their buffers
        for layer in (layer for cache in caches for layer in cache.layers):
            for states in (layer.keys, layer.values):
                states.normal_(generator=torch.Generator(states.device).manual_seed(0))
        yield passes
    finally:
        for cache in caches:
            cache.layers.clear()  # cache and layers point at each other: do not leave their memory to the garbage collector


def _choose(_index: int, logits: torch.Tensor, _drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = Sampler(do_sample=False)
    probs = sampler.distribution(logits)
    return sampler.draw(probs), probs


def _time(passes: list[Callable[[], object]], device: torch.device, clock: Clock, what: str) -> list[list[float]]:
    """Seconds of every pass: a first one to warm up, then more until `REPEATS` or the time limit, in a new order each."""
    times: list[list[float]] = [[] for _ in passes]
    order = list(range(len(passes)))
    shuffle = random.Random(0).shuffle
    begin = clock()
    with tqdm(total=(1 + REPEATS) * len(passes), desc=what, unit="pass", delay=SILENT_S, leave=False) as bar:
        for repeat in range(1 + REPEATS):
            shuffle(order)
            for number in order:
                if repeat > 0 and clock() - begin >= TIME_LIMIT_S:
                    return times
                _synchronize(device)
                start = clock()
                passes[number]()
                _synchronize(device)
                times[number].append(clock() - start)
                bar.update()
    return times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `dspark-hf profile`."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="batch sizes (default: 1 2 4 8)")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024], help="tokens (default: 256 1024)")
    parser.add_argument("--output", type=Path, help="PNG to draw; needs matplotlib")
    parser.add_argument("--again", action="store_true", help="forget what is on disk for this pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")


def run_profile(args: argparse.Namespace) -> None:
    """Measure what is not known yet, print it in milliseconds and draw it."""
    target = load_target(args.target, args.dtype, args.device)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=args.dtype).to(args.device)
    check_target(drafter, target)
    check_verifiable(target)
    curve = CostCurve.open(target, drafter)
    if args.again:
        curve.forget()
    widths = "".join(f"{width:9}" for width in range(1, drafter.config.block_size + 2))
    sys.stdout.write("ms of a drafting pass, and of a target forward over so many tokens of every row\n")
    sys.stdout.write(f" rows context    draft{widths}\n")
    for context in args.context:
        for rows in args.rows:
            costs = curve.costs(rows, context)
            cells = "".join(f"{1000 * seconds:9.2f}" for seconds in (costs.draft_seconds, *costs.target_seconds))
            sys.stdout.write(f"{rows:5}{context_bucket(context):8}{cells}\n")
    sys.stdout.write(f"kept in {curve.path}\n")
    if args.output:
        curve.plot(args.output)
        sys.stdout.write(f"drawn in {args.output}\n")
