"""Taps: hidden states of target layers, read by forward hooks while the target runs.

Hooks see the raw output of a layer on every release of transformers, which `output_hidden_states` does not: there the
last entry is normed, and the meaning of a list changed between releases. Tap -1 is the input of the first layer, tap -2
what the decoder returns, after its final norm.
"""

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from dspark_hf.host import TargetModel
from dspark_hf.modeling.configuration_dspark import EMBEDDING, FINAL_NORM, DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


DRAFTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYER_LIST_NAMES = ("layers", "h", "blocks")
MOST_PADDING = 1024
"""Rows that a target's vocabulary may have beyond the drafter's: what padding to a multiple or added tokens come to."""


def decoder_layers(target: TargetModel) -> nn.ModuleList:
    """Return the target's decoder layers.

    Raises:
        NotImplementedError: If the target keeps them where no known family does.
    """
    decoder = target.get_decoder()
    for name in LAYER_LIST_NAMES:
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise NotImplementedError(
        f"Cannot find the decoder layers of {type(target).__name__}: {type(decoder).__name__} has none of the lists "
        f"{LAYER_LIST_NAMES}. Call generate() without `assistant_model` for this target."
    )


def tapped_layers(config: DSparkConfig, target: TargetModel) -> list[int]:
    """The drafter's `target_layer_ids` on this target, with -2 for a last layer that is to be read after the final norm."""
    last = len(decoder_layers(target)) - 1
    return [FINAL_NORM if config.normed_last_tap and i == last else i for i in config.target_layer_ids]


class TapRecorder:
    r"""
    Records the taps of every target forward inside a `with` block, but for those of other threads.

    Args:
        target (`PreTrainedModel`): The model to read.
        layer_ids (`list[int]`): Layers to tap, -1 for the embedding output, -2 for the final norm's.
        device (`torch.device`): Where the taps are needed.
        dtype (`torch.dtype`): What they are cast to.
    """

    def __init__(self, target: TargetModel, layer_ids: list[int], device: torch.device, dtype: torch.dtype):
        self.decoder = target.get_decoder()
        self.layers = decoder_layers(target)
        self.layer_ids = layer_ids
        self.device = device
        self.dtype = dtype
        self._recorded: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in layer_ids}
        self._thread = threading.get_ident()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "TapRecorder":
        for layer_id in self._recorded:
            if layer_id == EMBEDDING:
                handle = self.layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                module = self.decoder if layer_id == FINAL_NORM else self.layers[layer_id]
                handle = module.register_forward_hook(self._output_hook(layer_id))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> torch.Tensor:
        """Return the taps since the last call, `(B, T, len(layer_ids) * D_target)`; several forwards are joined along T."""
        if not all(self._recorded.values()):
            raise RuntimeError(
                "The target ran without calling the hooks on its layers, so there are no taps. Is it compiled? Pass the model "
                "as it was before torch.compile."
            )
        taps = [
            torch.cat([part.to(device=self.device, dtype=self.dtype) for part in self._recorded[layer_id]], dim=1)
            for layer_id in self.layer_ids
        ]
        self.clear()
        return torch.cat(taps, dim=-1)

    def clear(self) -> None:
        """Forget what was recorded: a forward that somebody else ran."""
        for parts in self._recorded.values():
            parts.clear()

    def _output_hook(self, layer_id: int) -> Callable[[nn.Module, tuple, Any], None]:
        def record(_module: nn.Module, _args: tuple, output: Any) -> None:
            # A decoder returns a `ModelOutput`, a layer a tensor or, before transformers 5, a tuple.
            self._record(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return record

    def _record_input(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._record(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    def _record(self, layer_id: int, hidden_states: torch.Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._recorded[layer_id].append(hidden_states)


def check_target(drafter: DSparkDraftModel, target: TargetModel) -> None:
    r"""
    Check that a drafter was made for targets of this shape.

    Raises:
        ValueError: If width, depth or vocabulary differ (the target's vocabulary may be padded), or the two are on devices
            that cannot meet; the message names both sides.
    """
    check_shape(drafter.config, target.config)
    if drafter.dtype not in DRAFTER_DTYPES:
        raise ValueError(
            f"The drafter is in {drafter.dtype}, which cannot meet the target's {target.dtype}. Load it with dtype='auto', "
            "or call drafter.to(target.dtype)."
        )
    head = target.get_output_embeddings()
    tensor = next(itertools.chain(head.parameters(), head.buffers()), None)
    head_device = target.device if tensor is None else tensor.device
    if head_device.type == "meta" and drafter.device.type != "meta":
        raise ValueError(
            "The target's head is offloaded, and drafting needs it in every round. Keep 'lm_head' out of the offloaded part of "
            "the device_map, and the embedding too when the two are tied."
        )
    if drafter.device != head_device:
        raise ValueError(
            f"The drafter is on {drafter.device}, the target's head on {head_device}. Move the drafter: "
            f"drafter.to({str(head_device)!r})."
        )
    num_layers = len(decoder_layers(target))  # LongCat's config counts each of them twice
    missing = [i for i in drafter.config.target_layer_ids if i >= num_layers]
    if missing:
        raise ValueError(
            f"This drafter taps layers {missing}, but the decoder of {type(target).__name__} has a list of {num_layers}, counted "
            "from 0. Train a drafter with other `target_layer_ids`."
        )


def check_shape(config: DSparkConfig, target_config: PreTrainedConfig) -> None:
    """Do the part of [`check_target`] that needs no loaded models.

    Raises:
        ValueError: If width, depth or vocabulary differ.
    """
    text = target_config.get_text_config(decoder=True)
    pairs = [
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("number of layers", config.num_target_layers, text.num_hidden_layers),
        ("vocabulary size", config.vocab_size, text.vocab_size),
    ]
    padded = 0 < text.vocab_size - config.vocab_size <= MOST_PADDING
    differences = [
        f"{name} {expected} (the target has {got})"
        for name, expected, got in pairs
        if expected not in (got, None) and not (padded and name == "vocabulary size")
    ]
    too_deep = [i for i in config.target_layer_ids if i >= text.num_hidden_layers]
    if too_deep and not differences:
        differences = [f"layers {too_deep} (the target has {text.num_hidden_layers}, counted from 0)"]
    if differences:
        made_for = f" ({config.target_model_type})" if config.target_model_type else ""
        raise ValueError(
            f"This drafter was made for another target{made_for}: it expects {', '.join(differences)}. Load the drafter "
            f"that was trained for {text.model_type!r} of this size."
        )
