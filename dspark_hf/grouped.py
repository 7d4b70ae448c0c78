"""Grouped-query attention that reads keys and values as they are, on the CPU.

With a mask, "sdpa" attention in transformers copies keys and values once for every query head of a group before each
product: the whole cache, in every layer of every forward. The CPU's kernel does not need that and gives the same
numbers. Releases of transformers from 5.24 on have a switch for it; older ones copy.
"""

import contextlib
import os
from collections.abc import Iterator

import torch


SWITCH = "TRANSFORMERS_SDPA_FORCE_GQA"


@contextlib.contextmanager
def grouped_queries(device: torch.device) -> Iterator[None]:
    r"""
    Inside the block, attention on the CPU does not copy the keys of a group. A user's own setting of the switch stands.

    Args:
        device (`torch.device`): Where the model runs. Kernels of other devices want the copies, or fall back to slow ones.
    """
    if device.type != "cpu" or SWITCH in os.environ:
        yield
        return
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
