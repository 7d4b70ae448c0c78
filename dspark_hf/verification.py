"""One target forward over an anchor and draft tokens for each row, with keys and values in slots.

Attention gets an explicit additive mask, `slot of key <= slot of query` (and the window of sliding layers): rows may
then stand at different lengths, and what was rejected is never seen. Recurrent layers get no mask, since nothing is
padding after the prompt; [`Verifier.keep`] takes what was rejected out of their states.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils import ModelOutput

from dspark_hf.caches import SlotCache
from dspark_hf.grouped import grouped_queries, reads_groups
from dspark_hf.host import TargetModel, cache_argument
from dspark_hf.quantised import check_quantisation
from dspark_hf.recurrent import LAYERS_WITHOUT_MASK, RecurrentStates, check_recurrent, has_recurrent_states
from dspark_hf.transfer import upload


MASKED_IMPLEMENTATIONS = ("sdpa", "eager")
STREAM_FIELDS = ("altup_num_inputs", "hc_mult", "hc_count")
"""Fields of targets whose layers pass on several residual streams: Gemma 3n, DeepSeek V4 and others, Qwen 4."""
LEARNED_POSITION_NAMES = ("wpe", "embed_positions", "position_embeddings")
NOT_FOR_VERIFICATION = ("attention_mask", "position_ids", "logits_to_keep", "inputs_embeds", "next_sequence_length")


@dataclass(frozen=True, slots=True)
class Verification:
    r"""
    Args:
        logits (`torch.FloatTensor` of shape `(R, W, V)`): float32, the target's raw logits after each input token.
        outputs (`ModelOutput`): What the target returned; in prefill W is 1, and these cover the whole prompt.
    """

    logits: torch.Tensor
    outputs: ModelOutput


class Verifier:
    r"""
    Runs the target after prefill.

    Args:
        target (`PreTrainedModel`): The target.
        cache ([`SlotCache`]): Its keys and values, the prompt's already in it.
        prompt_mask (`torch.BoolTensor` of shape `(R, P)`): False for padding; P is the number of columns in the cache.
        model_kwargs (`dict`): What the host passes to every forward.
    """

    def __init__(self, target: TargetModel, cache: SlotCache, prompt_mask: torch.Tensor, model_kwargs: dict[str, Any]):
        self.target = target
        self.cache = cache
        self.prompt_mask = prompt_mask
        self.last_position = model_kwargs["position_ids"][..., -1:]
        self.mask_dtype = target.dtype
        self.config = target.config.get_text_config(decoder=True)
        skipped = (*NOT_FOR_VERIFICATION, cache_argument())
        self.model_kwargs = {name: value for name, value in model_kwargs.items() if name not in skipped}
        self.recurrent = RecurrentStates(cache) if cache.recurrent_states else None
        self.reads_groups = reads_groups(target)
        self._last_inputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, tokens: torch.Tensor, slots: torch.Tensor, used: int, widths: torch.Tensor) -> Verification:
        r"""
        Args:
            tokens (`torch.LongTensor` of shape `(R, W)`): Anchors, then draft tokens.
            slots (`torch.LongTensor` of shape `(R, W)`): Their slots, consecutive in each row.
            used (`int`): Slots that attention reads; larger than every entry of `slots`.
            widths (`torch.LongTensor` of shape `(R,)`): Input tokens of each row that matter. The others' outputs are
                meaningless, and their positions stay within the row's text.

        Returns:
            [`Verification`] with W logits for each row.
        """
        self.cache.prepare(slots, used)
        if self.recurrent is not None:
            self.recurrent.save()
            self._last_inputs = tokens, slots
        inputs = self._inputs(tokens, slots, used, widths)
        inputs.pop("logits_to_keep", None)  # some targets ask for the last logits alone
        with grouped_queries(self.reads_groups and tokens.shape[1] > 1):
            outputs = self.target(**inputs, return_dict=True)
        return Verification(outputs.logits.float().to(tokens.device), outputs)

    def keep(self, counts: list[int]) -> int:
        r"""
        Take rejected tokens out of recurrent states; a target without them has nothing to do.

        Args:
            counts (`list[int]`): Input tokens of the last call that each row keeps, from the first on; 0 for none.

        Returns:
            `int`: Target forwards that it took. They write the same keys and values again.
        """
        if self.recurrent is None or self._last_inputs is None:
            return 0
        tokens, slots = self._last_inputs
        used, kept = self.cache.used, upload(counts, tokens.device)

        def run(first: int, end: int) -> None:
            self.cache.prepare(slots[:, first:end], used)
            inputs = self._inputs(tokens[:, first:end], slots[:, first:end], used, kept - first)
            if self.target._supports_logits_to_keep():
                inputs["logits_to_keep"] = 1  # none is needed
            self.target(**inputs, return_dict=True)

        return self.recurrent.rewind(counts, tokens.shape[1], run)

    def _inputs(self, tokens: torch.Tensor, slots: torch.Tensor, used: int, widths: torch.Tensor) -> dict[str, Any]:
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        within = slots[:, :1] + torch.minimum(columns, widths[:, None] - 1)
        position_ids = self.last_position + 1 + within - self.prompt_mask.shape[1]
        return self.target.prepare_inputs_for_generation(
            tokens,
            attention_mask=self._masks(slots, used),
            position_ids=position_ids,
            is_first_iteration=False,
            **{cache_argument(): self.cache},
            **self._other_arguments(tokens.shape),
        )

    def _masks(self, slots: torch.Tensor, used: int) -> torch.Tensor | dict[str, torch.Tensor]:
        keys = torch.arange(used, device=slots.device)
        prompt = self.prompt_mask
        valid = torch.cat([prompt, prompt.new_ones(prompt.shape[0], used - prompt.shape[1])], dim=1)
        visible = valid[:, None] & (keys <= slots[..., None])  # (R, W, used)
        lowest = torch.finfo(self.mask_dtype).min

        def additive(window: int | None) -> torch.Tensor:
            seen = visible if window is None else visible & (keys > slots[..., None] - window)
            mask = torch.zeros(seen.shape, dtype=self.mask_dtype, device=seen.device)
            return mask.masked_fill_(~seen, lowest)[:, None]

        windows = mask_windows(self.config)
        if isinstance(windows, dict):
            return {layer_type: additive(window) for layer_type, window in windows.items()}
        return additive(windows)

    def _other_arguments(self, shape: torch.Size) -> dict[str, Any]:
        """The host's other arguments of a forward, token types continued as the host continues them."""
        kwargs = dict(self.model_kwargs)
        if kwargs.get("token_type_ids") is not None:
            kwargs["token_type_ids"] = kwargs["token_type_ids"][:, -1:].expand(shape)
        if kwargs.get("mm_token_type_ids") is not None:
            kwargs["mm_token_type_ids"] = kwargs["mm_token_type_ids"].new_zeros(shape)
        return kwargs


def mask_windows(config: PreTrainedConfig) -> dict[str, int | None] | int | None:
    """Windows of the masks that a target takes: one for each layer type, or a single one; `None` is full attention.

    The cases are those of `transformers.masking_utils.create_masks_for_generate`, whose result every target accepts.

    Raises:
        NotImplementedError: For kinds of attention that no such mask describes.
    """
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is not None:
        known = {"full_attention": None, "sliding_attention": window}
        recurrent = has_recurrent_states(config)
        if recurrent:
            # Hybrid targets take one mask for all of their attention layers, and make none for the others from it.
            known = {"full_attention": None} | dict.fromkeys(LAYERS_WITHOUT_MASK)
        unknown = sorted(set(layer_types) - set(known))
        if unknown:
            raise NotImplementedError(
                f"DSpark cannot mask the layer types {unknown} of {config.model_type!r}. Call generate() without "
                "`assistant_model` for this target."
            )
        return None if recurrent else {layer_type: known[layer_type] for layer_type in set(layer_types)}
    if window is None and getattr(config, "attention_chunk_size", None) is not None:
        raise NotImplementedError(
            f"DSpark cannot mask the chunked attention of {config.model_type!r}. Call generate() without "
            "`assistant_model` for this target."
        )
    return window


def learned_positions(target: TargetModel) -> int | None:
    """Size of the target's table of learned positions, or `None` when it computes them."""
    decoder = target.get_decoder()
    if not any(isinstance(getattr(decoder, name, None), nn.Embedding) for name in LEARNED_POSITION_NAMES):
        return None
    return target.config.get_text_config(decoder=True).max_position_embeddings


def check_positions(length: int, limit: int | None) -> None:
    r"""
    Check that the prompt fits into a table of learned positions.

    Args:
        length (`int`): Positions that the prompt takes.
        limit (`int`, *optional*): Size of the table, if there is one.

    Raises:
        ValueError: If it does not.
    """
    if limit is not None and length > limit:
        raise ValueError(
            f"The prompt has {length} tokens, the target's learned positions end at {limit}. Shorten the prompt."
        )


def check_rotary_length(target: TargetModel, longest: int) -> None:
    r"""
    Check that no text gets so long that the target's rotary frequencies depend on the length of a forward.

    Draft tokens and other rows lengthen a forward, so beyond that length the output would depend on them.

    Args:
        target (`PreTrainedModel`): The target.
        longest (`int`): Positions that the call may reach.

    Raises:
        NotImplementedError: If `longest` is beyond the length at which dynamic or longrope frequencies change.
    """
    config = target.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > limit:
            raise NotImplementedError(
                f"The {rope['rope_type']} rotary embedding of {type(target).__name__} changes with the length of a forward "
                f"beyond {limit} positions, and this call may reach {longest}. Lower max_new_tokens, or call generate() "
                "without `assistant_model`."
            )


def check_attentions(target: TargetModel, cache: Cache) -> None:
    r"""
    Check that attentions can be returned in the shapes of plain generation, which shows every key so far.

    Raises:
        NotImplementedError: If layers are sliding, or the cache has a fixed size.
    """
    windows = mask_windows(target.config.get_text_config(decoder=True))
    sliding = any(windows.values()) if isinstance(windows, dict) else windows is not None
    if sliding or any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise NotImplementedError(
            "output_attentions=True does not work with a DSpark drafter and a sliding or static cache: leave it out, or "
            "call generate() without `assistant_model`."
        )


def check_verifiable(target: TargetModel) -> None:
    r"""
    Check, before any forward, that a target can be verified in slots.

    Raises:
        NotImplementedError: If it is an encoder-decoder, keeps unknown recurrent states, has several residual streams, takes
            no positions or no cache, was compiled, its attention takes no additive mask by positions, or it is quantised so
            that tokens are rounded together; the message names the alternative.
    """
    name = type(target).__name__
    instead = "Call generate() without `assistant_model` for this target."
    if target.config.is_encoder_decoder:
        raise NotImplementedError(f"DSpark drafts for decoder-only targets; {name} is an encoder-decoder. {instead}")
    check_recurrent(target)
    known = inspect.signature(target.forward).parameters
    if "position_ids" not in known or cache_argument() not in known:
        raise NotImplementedError(
            f"{name} takes no `position_ids` or no cache, so its rows cannot advance separately. {instead}"
        )
    if target._compiled_call_impl is not None or hasattr(target.forward, "_torchdynamo_orig_callable"):
        raise NotImplementedError(
            f"{name} was compiled before the drafter's hooks were there, so its taps cannot be read. Pass the model as it was "
            "before torch.compile."
        )
    config = target.config.get_text_config(decoder=True)
    if any((getattr(config, field, None) or 1) > 1 for field in STREAM_FIELDS):
        raise NotImplementedError(
            f"The layers of {name} pass on several residual streams, of which DSpark's taps cannot choose one. {instead}"
        )
    if getattr(config, "alibi", False) or "local" in getattr(config, "attention_layers", ()):
        raise NotImplementedError(
            f"{name} biases or windows its attention by columns, not by positions, so its rows cannot advance separately. "
            f"{instead}"
        )
    implementation = config._attn_implementation
    if implementation not in MASKED_IMPLEMENTATIONS:
        raise NotImplementedError(
            f"DSpark needs an attention that takes an additive mask, {' or '.join(MASKED_IMPLEMENTATIONS)}; {name} uses "
            f"{implementation!r}. Call target.set_attn_implementation({'sdpa' if target._supports_sdpa else 'eager'!r})."
        )
    mask_windows(config)
    check_quantisation(target)
