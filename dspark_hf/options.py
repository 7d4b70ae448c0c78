"""Options of a `generate()` call that concern drafting, and what is refused before any work starts."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.scheduling import Policy, make_policy


THRESHOLD = "assistant_confidence_threshold"
HOST_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    THRESHOLD: 0.4,
}
"""What transformers fills in where a call says nothing. These values in a call count as not given."""


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    r"""
    Args:
        max_draft_tokens (`int`): Cap of the verification length.
        policy ([`Policy`]): Chooses it.
    """

    max_draft_tokens: int
    policy: Policy


def read_options(drafter: DSparkDraftModel, generation_config: GenerationConfig) -> DraftingOptions:
    r"""
    Read the options from the call's generation config, and from the drafter's where the call says nothing.

    Raises:
        ValueError: If an option is out of range, unknown, or makes no sense with another.
    """
    values = {}
    for name, default in HOST_DEFAULTS.items():
        given = getattr(generation_config, name, None)
        values[name] = getattr(drafter.generation_config, name, None) if given in (None, default) else given
    if generation_config.num_assistant_tokens_schedule == "threshold" and values[THRESHOLD] is None:
        # A call that chooses this schedule chooses its threshold too, be it the host's default.
        values[THRESHOLD] = generation_config.assistant_confidence_threshold
    cap = values["num_assistant_tokens"]
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        raise ValueError(f"num_assistant_tokens must be a positive integer or None (= block_size), got {cap!r}.")
    policy = make_policy(
        values["num_assistant_tokens_schedule"] or "constant",
        values[THRESHOLD],
        drafter.config.enable_confidence_head,
        greedy=not generation_config.do_sample,
    )
    return DraftingOptions(min(cap or drafter.config.block_size, drafter.config.block_size), policy)


def check_mode(generation_config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    r"""
    Refuse what cannot run together with a DSpark drafter.

    Raises:
        NotImplementedError: Naming the option and the alternative.
        ValueError: If `assistant_tokenizer` is given and not of the target's size.
    """

    def refuse(name: str, value: object, instead: str) -> None:
        raise NotImplementedError(f"{name}={value!r} does not work with a DSpark drafter: {instead}")

    alone = "leave it out, or call generate() without `assistant_model`."
    if (generation_config.num_beams or 1) > 1:
        refuse(
            "num_beams", generation_config.num_beams, "use num_beams=1, or call generate() without `assistant_model`."
        )
    if generation_config.use_cache is False:
        refuse("use_cache", False, "speculative decoding keeps a cache; leave use_cache out.")
    if generation_config.penalty_alpha:
        refuse("penalty_alpha", generation_config.penalty_alpha, f"contrastive search has its own loop; {alone}")
    if (generation_config.guidance_scale or 1) != 1:
        refuse(
            "guidance_scale",
            generation_config.guidance_scale,
            f"guidance runs the model in a logits processor; {alone}",
        )
    for name in (
        "assistant_ensemble_weight",
        "use_mtp",
        "speculation_type",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "dola_layers",
        "constraints",
        "force_words_ids",
    ):
        value = getattr(generation_config, name, None)
        if value:
            refuse(name, value, alone)
    # Pipelines pass one where special ids differ, or the target's vocabulary is padded. The target decides every token, so
    # a wrong one costs speed only: sizes are compared, not all tokens in every call.
    tokenizers = [mode_kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer")]
    own, other = (getattr(tokenizer, "vocab_size", None) for tokenizer in tokenizers)
    if tokenizers[1] is not None and (other is None or own != other):
        raise ValueError("A DSpark drafter shares the target's tokenizer: leave out `assistant_tokenizer`.")


def check_prompt(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, drafter: DSparkDraftModel) -> None:
    r"""
    Check the prompt before the first forward.

    Args:
        input_ids (`torch.LongTensor` of shape `(R, P)`): The prompt.
        attention_mask (`torch.Tensor` of shape `(R, P)`, *optional*): 0 for padding.
        drafter ([`DSparkDraftModel`]): On the device where the prompt must be.

    Raises:
        ValueError: If the batch is empty, padded on the right, or on another device.
    """
    if input_ids.shape[0] == 0:
        raise ValueError(
            f"The batch is empty: input_ids has shape {tuple(input_ids.shape)}. Pass at least one prompt."
        )
    if attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
        raise ValueError(
            "The batch is padded on the right: some rows of attention_mask end in 0. Decoder-only models generate from the "
            "last column; tokenize with padding_side='left'."
        )
    if input_ids.device != drafter.device:
        raise ValueError(
            f"input_ids is on {input_ids.device}, drafter and target are on {drafter.device}. Move the inputs: "
            f"inputs.to({str(drafter.device)!r})."
        )
