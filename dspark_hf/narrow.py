"""Linear layers on a few rows, from weights that were packed before.

A CPU's matrix library packs a weight before it multiplies several rows with it, which costs more than the product when the rows
are few: on two AVX2 cores the linear layers of SmolLM2-135M took 24 ms for one row, 50 ms for 2 to 8, and 27 to 32 ms
with weights packed in advance (docs/log.md). Verifications and drafts are such products. The numbers are equal up to
float32 rounding, as those of forwards of different widths are anyway.

Packed weights are kept as long as their layer, and take as much memory as the weights themselves.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn


MOST_ROWS = 32
"""Packing in advance gains up to here."""
MEMORY_SHARE = 0.5
"""Nothing is packed unless the packed weights fit into this share of the memory that the system calls available."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    r"""
    A weight `(out, in)` as the library wants it, and how to find out whether it is still the layer's.

    Args:
        weight (`torch.Tensor`): Opaque.
        fingerprint (`tuple[torch.Tensor, torch.Tensor]`): What [`_fingerprint`] said of the layer's weight.
    """

    weight: torch.Tensor
    fingerprint: tuple[torch.Tensor, torch.Tensor]


_packed: weakref.WeakKeyDictionary[nn.Module, PackedWeight] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def narrow_linears(*models: nn.Module) -> Iterator[None]:
    r"""
    Inside the block linear layers of the models use packed weights for 2 to 32 rows.

    Args:
        models (`nn.Module`): Models that only run inference, and whose weights do not change inside the block. Layers whose
            forward somebody else has replaced, quantised ones, and those that are not float32 on a CPU stay as they are.
    """
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        forward = module.__dict__.get("forward")
        if isinstance(forward, NarrowLinear):
            forward.packed = None  # of a call that is not over yet, after whose look the weight may have changed
    changed: list[Any] = [module for module in modules if can_pack(module)] if _packs() else []
    if _fit_in_memory(changed):
        for module in changed:
            module.forward = NarrowLinear(module)
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


def can_pack(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer that gains from a packed weight."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and is_plain(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.is_contiguous()
        and module.weight.numel() > 0
        and "forward" not in module.__dict__
    )


def _packs() -> bool:
    """Whether torch has MKL's packed products, and its own float32 products are as exact as these."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None) or torch.get_float32_matmul_precision()
    exact = precision not in ("bf16", "tf32", "medium")
    return exact and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


class NarrowLinear:
    """The forward of a linear layer: for a few rows with its packed weight, which is made or looked at when first needed."""

    def __init__(self, module: nn.Linear):
        self.module = module
        self.packed: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` `(..., in)` to `(..., out)`."""
        module, rows = self.module, inputs.numel() // max(1, inputs.shape[-1])
        fits = 1 < rows <= MOST_ROWS and inputs.shape[-1] == module.in_features and inputs.dtype == torch.float32
        if not fits or torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
            return F.linear(inputs, module.weight, module.bias)
        packed = self.packed
        if packed is None:
            packed = self.packed = packed_weight(module)
        return torch.ops.mkl._mkl_linear(inputs, packed, module.weight, module.bias, rows)

    def __reduce__(self) -> Any:
        """A copy of the layer that is made while a call runs outlives the call, so it gets a linear layer's own forward."""
        return types.MethodType, (nn.Linear.forward, self.module)


def packed_weight(module: nn.Linear) -> torch.Tensor:
    """The packed weight of a layer, made again if the weight has changed since."""
    fingerprint = _fingerprint(module.weight)
    known = _packed.get(module)
    if known is None or not all(map(torch.equal, known.fingerprint, fingerprint)):
        packed = torch.ops.mkl._mkl_reorder_linear_weight(module.weight.detach(), MOST_ROWS)
        known = _packed[module] = PackedWeight(packed, fingerprint)
    return known.weight


def _fingerprint(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tells a changed weight `(out, in)`: sums of its bits, modulo 2^32, and its product with random numbers, `(out,)` each.

    Address and version of a tensor do not: `weight.data` may be written to. The sums notice every change of one entry, the
    product those that only change the order, or many entries at once.
    """
    bits = weight.detach().view(torch.int32).sum(dim=1, dtype=torch.int32)
    return bits, F.linear(_probe(weight.shape[1]), weight.detach())


@functools.cache
def _probe(size: int) -> torch.Tensor:
    """Random numbers `(size,)`, always the same."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _fit_in_memory(modules: list[nn.Linear]) -> bool:
    missing = sum(module.weight.nbytes for module in modules if module not in _packed)
    return missing <= MEMORY_SHARE * psutil.virtual_memory().available
