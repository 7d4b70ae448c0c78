"""What the benchmarks share: timing, quartiles, where a record was made, and its file."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import dspark_hf


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function; return its result and its seconds, the device's work included."""
    _synchronize()
    start = time.perf_counter()
    result = function()
    _synchronize()
    return result, time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Quartiles of the values that are numbers; a single value is all three, and NaN stands for none."""
    numbers = [value for value in values if not math.isnan(value)] or [math.nan]
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    return {"quartile_1": low, "median": median, "quartile_3": high}


def environment(module: str, target: Any) -> dict[str, Any]:
    """What a record must say about where it was made; `module` is the benchmark's dotted name."""
    return {
        "command": f"python -m {module} {shlex.join(sys.argv[1:])}",
        "commit": _commit(),
        "dspark_hf": dspark_hf.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(target.device),
        "hardware": _hardware(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "attention": target.config._attn_implementation,
    }


def _commit() -> str:
    """The commit of the package's checkout, with `-dirty` when tracked files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} {platform.machine()} cores, {torch.backends.cpu.get_cpu_capability()}"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, whole or not at all; each item of its lists is one line."""
    fields = []
    for name, value in record.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
        else:
            text = json.dumps(value, indent=1).replace("\n", "\n ")
        fields.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    partial.replace(path)
