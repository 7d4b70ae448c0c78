"""The only file that touches classes of transformers: it routes `generate(assistant_model=<DSpark drafter>)` here.

[`enable`], called on import, wraps two methods of `GenerationMixin` and gives the `transformers` module one name:

* `_assisted_decoding` runs [`Decoding`] when the assistant is a DSpark drafter and the original otherwise;
* `_validate_generation_mode`, which refuses too much for such an assistant, is replaced by this package's checks;
* `transformers.DSparkDraftModel` lets pipelines find the class when the assistant is given as a string.

[`disable`] undoes all three. The drafter is also registered with the Auto classes, which stays.
"""

import copy
import functools
import sys
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


class _AttachedGenerate:
    """`generate` of one target with a drafter. A deep copy of the target drafts too, itself and with the same drafter."""

    def __init__(self, target: TargetModel, drafter: DSparkDraftModel, previous: Callable | None):
        self.target, self.drafter, self.previous = target, drafter, previous
        functools.update_wrapper(self, type(target).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _originals:
            raise RuntimeError("dspark_hf is disabled: call dspark_hf.enable(), or dspark_hf.detach(target).")
        kwargs.setdefault("assistant_model", self.drafter)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.target).generate(self.target, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "_AttachedGenerate":
        return _AttachedGenerate(copy.deepcopy(self.target, memo), self.drafter, copy.deepcopy(self.previous, memo))


def attach(target: TargetModel, drafter: DSparkDraftModel) -> None:
    r"""
    Make `target.generate(...)` use a drafter without being told, for code that cannot pass `assistant_model`.

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`): The target; only this instance changes, and with a PEFT wrapper the
            model inside, whose `generate` runs.
        drafter ([`DSparkDraftModel`]): The drafter. A call may still pass another `assistant_model`, or `None`.

    Raises:
        RuntimeError: If the package is disabled; a later `generate` raises it too.
        TypeError: If `drafter` is no loaded DSpark drafter.
        ValueError: If the drafter was made for another target, or is on another device.
        NotImplementedError: If the target cannot be verified, see `verification.check_verifiable`, or its adapters cannot.
    """
    if not _originals:
        raise RuntimeError("dspark_hf is disabled; call dspark_hf.enable() before attach().")
    if not is_dspark_drafter(drafter):
        raise TypeError(f"attach() needs a loaded DSpark drafter, got {type(drafter).__name__}.")
    check_adapters(target)
    target = _inside_peft(target)
    check_target(drafter, target)
    check_verifiable(target)
    detach(target)
    target.__dict__["generate"] = _AttachedGenerate(target, drafter, target.__dict__.get("generate"))


def detach(target: TargetModel) -> None:
    """Undo [`attach`]."""
    target = _inside_peft(target)
    attached = target.__dict__.get("generate")
    if not isinstance(attached, _AttachedGenerate):
        return
    if attached.previous is None:
        del target.__dict__["generate"]
    else:
        target.__dict__["generate"] = attached.previous


def _inside_peft(target: TargetModel) -> TargetModel:
    """The model inside a PEFT wrapper, adapter layers included; any other model itself."""
    get_base_model = getattr(target, "get_base_model", None)
    return target if get_base_model is None else get_base_model()


def check_adapters(target: TargetModel) -> None:
    r"""
    Check that a target's PEFT adapters act on each token alone, whatever else a forward holds.

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`): With adapters or without.

    Raises:
        NotImplementedError: For prompt learning, X-LoRA and activated LoRA.
    """
    # Prompt learning leaves no mark on the model inside its wrapper but this: the wrapper prepares the inputs.
    prepares = getattr(getattr(target, "prepare_inputs_for_generation", None), "__self__", target)
    configs = [getattr(model, "peft_config", None) or {} for model in (target, prepares)]
    for config in (config for by_name in configs for config in by_name.values()):
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        activated = getattr(config, "alora_invocation_tokens", None) is not None
        if config.is_prompt_learning or kind == "XLORA" or activated:
            raise NotImplementedError(
                f"DSpark verifies several tokens in one forward, and {'activated LoRA' if activated else kind} adapters do "
                "not treat them as they would one by one. Call generate() without a drafter, or use adapters such as LoRA."
            )


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
        check_adapters(self)
        check_verifiable(self)
        check_target(drafter, self)
        read_options(drafter, generation_config)

    return _validate_generation_mode


WRAPPERS = {"_assisted_decoding": _wrap_assisted_decoding, "_validate_generation_mode": _wrap_validation}
