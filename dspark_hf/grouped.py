"""Grouped-query attention over several queries that reads keys and values as they are, on the CPU.

With a mask and more than one query, "sdpa" attention in transformers copies keys and values once for every query head of a
group: the whole cache, in every layer of a verification. The CPU's kernel does not need that and gives the same numbers.
Releases of transformers from 5.24 on have a switch for it; older ones copy.
"""

import contextlib
import os
from collections.abc import Iterator

from torch import nn
from transformers.utils import is_torch_greater_or_equal


SWITCH = "TRANSFORMERS_SDPA_FORCE_GQA"


def reads_groups(model: nn.Module) -> bool:
    """Whether a model's kernels read groups as they are: all of it on the CPU, and a torch whose kernel was looked at."""
    return is_torch_greater_or_equal("2.13") and {weight.device.type for weight in model.parameters()} == {"cpu"}


@contextlib.contextmanager
def grouped_queries(wanted: bool) -> Iterator[None]:
    """Inside the block nothing is copied, if that is wanted. A user's own setting of the switch stands."""
    if not wanted or SWITCH in os.environ:
        yield
        return
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
