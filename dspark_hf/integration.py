"""The only file that touches classes of transformers: it routes `generate(assistant_model=<DSpark drafter>)` here.

[`enable`], called on import, wraps two methods of `GenerationMixin` and gives the `transformers` module one name:

* `_assisted_decoding` runs [`Decoding`] when the assistant is a DSpark drafter and the original otherwise;
* `_validate_generation_mode`, which refuses too much for such an assistant, is replaced by this package's checks;
* `transformers.DSparkDraftModel` lets pipelines find the class when the assistant is given as a string.

[`disable`] undoes all three. The drafter is also registered with the Auto classes, which stays.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers.processing_utils  # noqa: F401  # re-executes transformers/__init__, so it must run before `enable`
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)

from dspark_hf.decoding import Decoding
from dspark_hf.host import TargetModel
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.options import check_mode, read_options
from dspark_hf.taps import check_target
from dspark_hf.verification import check_verifiable


_originals: dict[str, Callable] = {}
_attached: weakref.WeakKeyDictionary[Any, Callable | None] = weakref.WeakKeyDictionary()


def is_dspark_drafter(model: object) -> bool:
    """Whether a model is a DSpark drafter, also one whose class came with its checkpoint."""
    return getattr(getattr(model, "config", None), "model_type", None) == DSparkConfig.model_type


def register_auto_classes() -> None:
    """Let `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the drafter."""
    AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
    AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
    AutoModelForCausalLM.register(DSparkConfig, DSparkDraftModel, exist_ok=True)


def enable() -> None:
    """Let `generate(assistant_model=<DSpark drafter>)` run DSpark. Nothing else changes; a second call does nothing."""
    if _originals:
        return
    for name, wrap in WRAPPERS.items():
        _originals[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, wrap(_originals[name]))
    setattr(sys.modules["transformers"], DSparkDraftModel.__name__, DSparkDraftModel)


def disable() -> None:
    """Undo [`enable`]. The registrations with the Auto classes stay: they only name a model type."""
    for name, original in _originals.items():
        setattr(GenerationMixin, name, original)
    if _originals:
        delattr(sys.modules["transformers"], DSparkDraftModel.__name__)
    _originals.clear()


def attach(target: TargetModel, drafter: DSparkDraftModel) -> None:
    r"""
    Make `target.generate(...)` use a drafter without being told, for code that cannot pass `assistant_model`.

    Args:
        target (`PreTrainedModel`): The target; only this instance changes.
        drafter ([`DSparkDraftModel`]): The drafter. A call may still pass another `assistant_model`.

    Raises:
        RuntimeError: If the package is disabled; a later `generate` raises it too.
        TypeError: If `drafter` is no loaded DSpark drafter.
        ValueError: If the drafter was made for another target, or is on another device.
        NotImplementedError: If the target cannot be verified, see `verification.check_verifiable`.
    """
    if not _originals:
        raise RuntimeError("dspark_hf is disabled; call dspark_hf.enable() before attach().")
    if not is_dspark_drafter(drafter):
        raise TypeError(f"attach() needs a loaded DSpark drafter, got {type(drafter).__name__}.")
    check_target(drafter, target)
    check_verifiable(target)
    detach(target)
    generate = target.generate

    @functools.wraps(generate)
    def generate_with_drafter(*args: Any, assistant_model: Any = drafter, **kwargs: Any) -> Any:
        if not _originals:
            raise RuntimeError("dspark_hf is disabled: call dspark_hf.enable(), or dspark_hf.detach(target).")
        return generate(*args, assistant_model=assistant_model, **kwargs)

    _attached[target] = target.__dict__.get("generate")
    target.__dict__["generate"] = generate_with_drafter


def detach(target: TargetModel) -> None:
    """Undo [`attach`]."""
    if target not in _attached:
        return
    previous = _attached.pop(target)
    if previous is None:
        del target.__dict__["generate"]
    else:
        target.__dict__["generate"] = previous


def _wrap_assisted_decoding(original: Callable) -> Callable:
    @functools.wraps(original)  # the host looks the argument `inputs_tensor` up by inspection
    def _assisted_decoding(
        self: TargetModel,
        input_ids: torch.Tensor,
        assistant_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> Any:
        if not is_dspark_drafter(assistant_model):
            return original(self, input_ids, assistant_model=assistant_model, **kwargs)
        own = {
            name: kwargs.pop(name)
            for name in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
            if name in kwargs
        }
        for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        return Decoding(self, assistant_model, input_ids, **own, model_kwargs=kwargs).run()

    return _assisted_decoding


def _wrap_validation(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(
        self: TargetModel,
        generation_mode: str,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        drafter = generation_mode_kwargs.get("assistant_model")
        if not is_dspark_drafter(drafter):
            original(self, generation_mode, generation_config, generation_mode_kwargs)
            return
        check_mode(generation_config, generation_mode_kwargs)
        check_verifiable(self)
        check_target(drafter, self)
        read_options(drafter, generation_config)

    return _validate_generation_mode


WRAPPERS = {"_assisted_decoding": _wrap_assisted_decoding, "_validate_generation_mode": _wrap_validation}
