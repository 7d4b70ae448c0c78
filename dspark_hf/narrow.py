"""Linear layers on a few rows, on CPUs where they are slow.

Without AVX-512 instructions a float32 product of 2 to 16 rows with a weight takes almost twice as long as one of a single
row, although both read the weight once: the library packs the weight first. As `(W x^T)^T` nothing is packed, and a
verification of 8 tokens took 127 ms instead of 166 where one token takes 86 (docs/log.md). The numbers are equal up to
float32 rounding, as those of forwards of different widths are anyway.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


MOST_ROWS = 16


@contextlib.contextmanager
def narrow_linears(*models: nn.Module) -> Iterator[None]:
    r"""
    Inside the block linear layers of the models compute a few rows in the order that is fast here; none where it is not.

    Args:
        models (`nn.Module`): Models that only run inference. Layers whose forward somebody else has replaced, quantised
            ones, and those that are not float32 on a slow CPU stay as they are.
    """
    changed: list[Any] = [module for model in models for module in model.modules() if is_slow(module)]
    for module in changed:
        module.forward = functools.partial(narrow_linear, module)
    try:
        yield
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


def is_plain(module: Any) -> bool:
    """Whether a module's weight is an ordinary parameter: not packed, and no quantised tensor that passes for one."""
    weight = getattr(module, "weight", None)
    # Float8 means nothing without its scales.
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.itemsize > 1


def is_slow(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer that gains from another order."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and is_plain(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and "AVX512" not in torch.backends.cpu.get_cpu_capability()
        and "forward" not in module.__dict__
    )


def narrow_linear(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """`inputs` `(..., D)` through a linear layer; up to 16 rows, but not one, as `(W x^T)^T + b`."""
    rows = inputs.numel() // inputs.shape[-1]
    if not 1 < rows <= MOST_ROWS or inputs.dtype != torch.float32:
        return F.linear(inputs, module.weight, module.bias)
    product = (module.weight @ inputs.reshape(rows, -1).T).T
    if module.bias is not None:
        product = product + module.bias
    return product.reshape(*inputs.shape[:-1], -1)
