"""Numbers on their way from Python to a device."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[bool] | Sequence[float] | Sequence[list[int]], device: torch.device
) -> torch.Tensor:
    """Bring Python numbers to a device without waiting for what is queued there."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)
