"""Manifests: small JSON files beside what a command writes, which say what it was made with.

A command that goes on with files asks for the same, or is refused.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark_hf.host import TargetModel


SAMPLED_ENTRIES = 64
"""Entries of each weight that tell a target from one trained further, which changes nearly all of them."""


def describe_target(target: TargetModel) -> dict[str, Any]:
    """What tells a target from others wherever it lies: its dtype, and a digest of the first entries of its weights."""
    sha256 = hashlib.sha256()
    for name, weight in target.named_parameters():
        if type(weight) is nn.Parameter and weight.device.type != "meta":
            sha256.update(name.encode())
            sha256.update(weight.detach().reshape(-1)[:SAMPLED_ENTRIES].cpu().view(torch.uint8).numpy().tobytes())
    return {"dtype": str(target.dtype), "sha256_of_first_weights": sha256.hexdigest()}


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write or replace a manifest in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_manifest(path: Path, asked: dict[str, Any], instead: str) -> None:
    """Refuse to go on with the files of a folder whose manifest says something else, or is missing ([`refuse_other`])."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    refuse_other(path.parent, found, asked, instead)


def refuse_other(files: Path, made_with: dict[str, Any], asked: dict[str, Any], instead: str) -> None:
    r"""
    Refuse to go on with files that were made with something else.

    Args:
        files (`Path`): They, for the message.
        made_with (`dict[str, Any]`): What their manifest says.
        asked (`dict[str, Any]`): What is asked for now; values that JSON knows, or tuples of them.
        instead (`str`): A sentence that says what to do.

    Raises:
        ValueError: If anything differs, naming it.
    """
    asked = json.loads(json.dumps(asked))
    names = [name for name in {**made_with, **asked} if made_with.get(name) != asked.get(name)]
    if names:
        what = "; ".join(f"{name} was {made_with.get(name)}, is now {asked.get(name)}" for name in names)
        raise ValueError(f"{files} was made with other settings: {what}. {instead}")
