"""What differs between releases of transformers, in one place."""

import functools
import inspect
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin, PreTrainedModel


if TYPE_CHECKING:
    TargetModel = Any  # no class of transformers declares both the model and what generation calls on it
else:
    TargetModel = PreTrainedModel


@functools.cache  # asked in every round
def cache_argument() -> str:
    """Name of the cache argument: `cache`, or `past_key_values` before transformers 5.24."""
    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in known else "past_key_values"


def skips_prompt(target: TargetModel) -> bool:
    """Whether the last layers run on the prompt's last token alone, as Gemma 4's do where they share keys and values.

    They do if `logits_to_keep` is a number, which generation passes, and not if it is a tensor.
    """
    shares = getattr(target.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    return bool(shares) and "logits_to_keep" in inspect.signature(target.get_decoder().forward).parameters


def was_passed_by_user(cache: Any) -> bool:
    """Whether the user holds this cache. Before transformers 5.24 the host does not say, so it is assumed."""
    return getattr(cache, "_is_user_defined", cache_argument() != "cache")
