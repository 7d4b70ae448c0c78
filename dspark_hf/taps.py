"""Taps: hidden states of target layers, read by forward hooks while the target runs.

Hooks see the raw output of a layer on every release of transformers, which `output_hidden_states` does not: there the
last entry is normed, and the meaning of a list changed between releases. Tap -1 is the input of the first layer.
"""

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dspark_hf.host import TargetModel
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


DRAFTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYER_LIST_NAMES = ("layers", "h", "blocks")


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


class TapRecorder:
    r"""
    Records the taps of every target forward inside a `with` block, but for those of other threads.

    Args:
        target (`PreTrainedModel`): The model to read.
        layer_ids (`list[int]`): Layers to tap, -1 for the embedding output.
        device (`torch.device`): Where the taps are needed.
        dtype (`torch.dtype`): What they are cast to.
    """

    def __init__(self, target: TargetModel, layer_ids: list[int], device: torch.device, dtype: torch.dtype):
        self.layers = decoder_layers(target)
        self.layer_ids = layer_ids
        self.device = device
        self.dtype = dtype
        self._recorded: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in layer_ids}
        self._thread = threading.get_ident()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "TapRecorder":
        for layer_id in self._recorded:
            if layer_id == -1:
                handle = self.layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                handle = self.layers[layer_id].register_forward_hook(self._output_hook(layer_id))
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
            self._record(layer_id, output[0] if isinstance(output, tuple) else output)

        return record

    def _record_input(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._record(-1, args[0] if args else kwargs["hidden_states"])

    def _record(self, layer_id: int, hidden_states: torch.Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._recorded[layer_id].append(hidden_states)


def check_target(drafter: DSparkDraftModel, target: TargetModel) -> None:
    r"""
    Check that a drafter was made for targets of this shape.

    Raises:
        ValueError: If width, depth or vocabulary differ, or the two are on devices that cannot meet; the message names
            both sides.
    """
    config: DSparkConfig = drafter.config
    text = target.config.get_text_config(decoder=True)
    pairs = [
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("number of layers", config.num_target_layers, text.num_hidden_layers),
        ("vocabulary size", config.vocab_size, text.vocab_size),
    ]
    differences = [f"{name} {expected} (the target has {got})" for name, expected, got in pairs if expected != got]
    if differences:
        made_for = f" ({config.target_model_type})" if config.target_model_type else ""
        raise ValueError(
            f"This drafter was made for another target{made_for}: it expects {', '.join(differences)}. Load the drafter "
            f"that was trained for {text.model_type!r} of this size."
        )
    if drafter.dtype not in DRAFTER_DTYPES:
        raise ValueError(
            f"The drafter is in {drafter.dtype}, which cannot meet the target's {target.dtype}. Load it with dtype='auto', "
            "or call drafter.to(target.dtype)."
        )
    head = target.get_output_embeddings()
    head_device = next(itertools.chain(head.parameters(), head.buffers())).device
    if head_device.type == "meta" and drafter.device.type != "meta":
        raise ValueError(
            "The target's head is offloaded. Load the target onto one device, without offloading its head."
        )
    if drafter.device != head_device:
        raise ValueError(
            f"The drafter is on {drafter.device}, the target's head on {head_device}. Move the drafter: "
            f"drafter.to({str(head_device)!r})."
        )
    decoder_layers(target)
