"""Loading of a target for the commands, with messages that name their options."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load_target(name: str, dtype: str, device: str | torch.device) -> Any:
    r"""
    Load a target in evaluation mode.

    Args:
        name (`str`): Folder or Hub name.
        dtype (`str`): `"auto"` or a torch dtype's name.
        device (`str` or `torch.device`): Where to.

    Raises:
        ValueError: If there is no such dtype or device.
    """
    if dtype != "auto":
        check_dtype(dtype)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device. Use --device cpu.")
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval()


def check_dtype(dtype: str) -> None:
    """Raise `ValueError` unless this is the name of a torch dtype."""
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{dtype!r} is no torch dtype. Give one such as float32 or bfloat16 (or auto for --dtype).")
