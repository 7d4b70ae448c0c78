"""Configuration of a DSpark drafter (arXiv 2607.05147, section 3.1).

Published next to the weights of every drafter, so it imports nothing but `transformers`.
"""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig


BACKBONES = ("qwen3", "gemma4")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
EMBEDDING, FINAL_NORM = -1, -2
"""Taps that are no layer's output: the input of layer 0, and what the final norm makes of the last layer's."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
)


class DSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DSparkDraftModel`].

    Layer ids count the target's decoder layers from 0; `-1` is the embedding output, the input of layer 0, and `-2` the
    output of the final norm. Positions inside a block are 1-based in prose and index `k - 1` in tensors.

    The defaults are the drafter of the paper. What differs in other publishers' drafters (docs/checkpoints.md) is a field
    each, so that their weights compute here what they were trained to compute.

    Args:
        vocab_size (`int`): Vocabulary of the target, `V`.
        draft_vocab_size (`int`, *optional*): Tokens the drafter can propose, `V_d <= V`. `None` means all `V`. With
            fewer, the buffer `d2t` maps draft ids to target ids: `target_id = draft_id + d2t[draft_id]`.
        backbone (`str`): `"qwen3"` or `"gemma4"`: the family a draft layer is built like. Gemma 4's has norms on both
            sides of attention and feed-forward, values that are normed, and a scale for each layer.
        hidden_size (`int`): Width of the drafter, `D`.
        intermediate_size (`int`): Width of the feed-forward layers.
        num_hidden_layers (`int`): Number of draft layers.
        num_attention_heads, num_key_value_heads, head_dim (`int`): Attention shape of a draft layer.
        hidden_act (`str`): Activation of the feed-forward layers.
        rms_norm_eps (`float`): Epsilon of every RMS norm.
        zero_centered_norms (`bool`): Norm weights are stored as their difference from 1.
        rope_parameters (`dict`, *optional*): Rotary embedding, in transformers' form.
        rope_interleaved (`bool`): Pairs of the rotary embedding are neighbours (GPT-J) instead of halves (NeoX).
        max_position_embeddings (`int`): Length the rotary embedding is meant for.
        attention_bias (`bool`): Biases in the attention projections.
        qk_norm (`bool`): RMS norms on queries and keys, as in Qwen3.
        attention_k_eq_v (`bool`): Values are made from the keys' projection; Gemma 4's layers only.
        attention_gate (`bool`): `q_proj` gives each head a gate beside its query, and the sigmoid of it scales the head's
            output, as in Qwen3.5.
        attention_sinks (`bool`): Each head has a learned logit that takes part in the softmax and has no value.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each draft layer.
        sliding_window (`int`, *optional*): Window of the sliding layers, in positions, counted back from each query.
        window_from_anchor (`bool`): The window is counted back from the anchor instead, and is context alone: the anchor
            and the block come on top.
        causal_layer_types (`list[str]`): Layer types in which a block position sees only earlier positions of its block.
            DSpark's blocks are bidirectional.
        target_hidden_size (`int`, *optional*): Width of the target. `None` means `hidden_size`.
        num_target_layers (`int`, *optional*): Decoder layers of the target; `None` when the publisher does not say.
        target_layer_ids (`list[int]`): Tapped layers; the taps are concatenated in this order (eq. 2).
        normed_last_tap (`bool`): A tap on the target's last layer is read after the final norm.
        block_size (`int`): Draft tokens of a block, γ, the anchor excluded.
        first_prediction_slot (`int`): First input slot whose output predicts a token: 0 when the anchor's own slot
            does (DSpark; a block has γ inputs), 1 when it only conditions (DFlash; γ + 1 inputs).
        mask_token_id (`int`): Token that fills the block after the anchor.
        markov_rank (`int`): Rank `r` of the sequential head; 0 means none.
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"` (eqs. 5 and 6).
        enable_confidence_head (`bool`): Whether the drafter predicts the acceptance of its tokens (eq. 7).
        confidence_head_with_markov (`bool`): Whether that head also reads `W_1[x_{k-1}]`.
        confidence_temperatures (`list[float]`, *optional*): One calibration temperature per position (section 3.2.1).
        confidence_calibration (`dict`, *optional*): Decoding setting and number of rounds that
            `confidence_temperatures` were fitted for.
        has_embedding, has_lm_head (`bool`): Whether the checkpoint carries its own; otherwise the target's is used,
            which needs equal widths.
        embedding_scale (`float`, *optional*): Factor on rows of the embedding's table. `None` leaves it to the module: the
            target's may scale its rows itself, as Gemma's does.
        final_logit_softcapping (`float`, *optional*): Soft cap on the base logits, before the transition bias.
        target_model_type (`str`, *optional*): `model_type` of the target, for messages.
        target_name (`str`, *optional*): Hub name of the target. A folder's name is not kept: it means nothing elsewhere.
    """

    model_type = "dspark"

    vocab_size: int = 32000
    draft_vocab_size: int = None  # type: ignore[assignment]  # given a value below
    backbone: str = "qwen3"
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    rope_parameters: dict | None = None
    rope_interleaved: bool = False
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    attention_dropout: float = 0.0
    qk_norm: bool = True
    attention_k_eq_v: bool = False
    attention_gate: bool = False
    attention_sinks: bool = False
    layer_types: list[str] = None  # type: ignore[assignment]  # given a value below
    sliding_window: int = None  # type: ignore[assignment]  # needed by sliding layers only
    window_from_anchor: bool = False
    causal_layer_types: list[str] = None  # type: ignore[assignment]  # given a value below
    target_hidden_size: int = None  # type: ignore[assignment]  # given a value below
    num_target_layers: int | None = 12
    target_layer_ids: list[int] = None  # type: ignore[assignment]  # given a value below
    normed_last_tap: bool = False
    block_size: int = 7
    first_prediction_slot: int = 0
    mask_token_id: int = 0
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[float] | None = None
    confidence_calibration: dict | None = None
    has_embedding: bool = False
    has_lm_head: bool = False
    embedding_scale: float | None = None
    final_logit_softcapping: float | None = None
    target_model_type: str | None = None
    target_name: str | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = (
                [] if self.num_target_layers is None else spread_layer_ids(self.num_target_layers, 5)
            )
        if self.causal_layer_types is None:
            self.causal_layer_types = []
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        self._check_task()
        self._check_shape()
        self._check_layers()
        super().__post_init__(**kwargs)

    def _check_sizes(self) -> None:
        """Raise `ValueError` for a size that counts nothing."""
        for name in SIZES:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            _check(whole and value > 0, f"`{name}` must be a positive whole number, got {value!r}.")

    def _check_task(self) -> None:
        """Raise `ValueError` for a block, taps or heads that no drafter can have."""
        _check(
            self.block_size <= self.max_position_embeddings,
            f"`block_size` must lie in [1, max_position_embeddings = {self.max_position_embeddings}], "
            f"got {self.block_size}.",
        )
        last = "its last" if self.num_target_layers is None else self.num_target_layers - 1
        out_of_range = [
            i
            for i in self.target_layer_ids
            if not isinstance(i, int) or i < FINAL_NORM or (isinstance(last, int) and i > last)
        ]
        _check(
            not out_of_range and len(self.target_layer_ids) > 0,
            f"`target_layer_ids` must name layers in [-1, {last}] of the target (-1 is the embedding output, -2 the final "
            f"norm's), got {self.target_layer_ids}.",
        )
        _check(
            self.first_prediction_slot in (0, 1),
            f"`first_prediction_slot` must be 0 or 1, got {self.first_prediction_slot}.",
        )
        _check(
            self.markov_head_type in MARKOV_HEAD_TYPES,
            f"`markov_head_type` must be one of {MARKOV_HEAD_TYPES}, got {self.markov_head_type!r}.",
        )
        _check(self.markov_rank >= 0, f"`markov_rank` must be 0 (no sequential head) or more, got {self.markov_rank}.")
        _check(
            not (self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0),
            "a confidence head with the Markov feature needs `markov_rank` > 0; set "
            "`confidence_head_with_markov=False` or `enable_confidence_head=False`.",
        )

    def _check_shape(self) -> None:
        """Raise `ValueError` for a vocabulary or layers that no drafter can have."""
        _check(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
            f"({self.num_key_value_heads}).",
        )
        _check(
            1 <= self.draft_vocab_size <= self.vocab_size,
            f"`draft_vocab_size` must lie in [1, vocab_size = {self.vocab_size}], got {self.draft_vocab_size}.",
        )
        _check(
            0 <= self.mask_token_id < self.vocab_size,
            f"`mask_token_id` must lie in [0, vocab_size = {self.vocab_size}), got {self.mask_token_id}.",
        )
        temperatures = self.confidence_temperatures
        _check(
            temperatures is None or (len(temperatures) == self.block_size and min(temperatures) > 0),
            f"`confidence_temperatures` must give {self.block_size} positive numbers, one per position, "
            f"got {temperatures}.",
        )
        _check(
            self.hidden_size == self.target_hidden_size or (self.has_embedding and self.has_lm_head),
            f"a drafter of width {self.hidden_size} cannot borrow the embedding or head of a target of width "
            f"{self.target_hidden_size}; set `has_embedding=True` and `has_lm_head=True`, or equal widths.",
        )

    def _check_layers(self) -> None:
        """Raise `ValueError` for draft layers that cannot be built."""
        _check(self.backbone in BACKBONES, f"`backbone` must be one of {BACKBONES}, got {self.backbone!r}.")
        _check(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= set(LAYER_TYPES),
            f"`layer_types` must give one of {LAYER_TYPES} for each of the {self.num_hidden_layers} draft layers, "
            f"got {self.layer_types}.",
        )
        _check(
            set(self.causal_layer_types) <= set(LAYER_TYPES),
            f"`causal_layer_types` must name some of {LAYER_TYPES}, got {self.causal_layer_types}.",
        )
        _check(
            "sliding_attention" not in self.layer_types or (self.sliding_window or 0) > 0,
            f"sliding layers need a positive `sliding_window`, got {self.sliding_window}.",
        )
        _check(
            self.backbone == "gemma4" or not self.attention_k_eq_v,
            "`attention_k_eq_v` is for the layers of backbone 'gemma4'.",
        )

    @property
    def num_block_inputs(self) -> int:
        """Input slots of a block: the anchor and the mask tokens."""
        return self.block_size + self.first_prediction_slot

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, num_hidden_layers: int = 5, **overrides: Any
    ) -> "DSparkConfig":
        r"""
        Build the configuration of a drafter for a decoder-only target.

        Width, attention shape, rotary embedding and special tokens follow the target; taps are spread over its depth
        and leave out the last layer (section 5.1); embedding and head are borrowed.

        Args:
            target_config (`PreTrainedConfig`): Configuration of the target, or of a model that contains it.
            num_hidden_layers (`int`, *optional*, defaults to 5): Draft layers, and number of taps unless
                `target_layer_ids` is given.
            overrides: Any field of [`DSparkConfig`].

        Raises:
            ValueError: If the target is an encoder-decoder, or a field has an impossible value.
        """
        text = target_config.get_text_config(decoder=True)
        if target_config.is_encoder_decoder:
            raise ValueError(
                f"DSpark drafts for decoder-only targets; {target_config.model_type!r} is an encoder-decoder."
            )
        heads = overrides.get("num_attention_heads") or _field(text, "num_attention_heads")
        if heads is None:
            raise ValueError(
                f"{text.model_type!r} gives no single `num_attention_heads`: pass num_attention_heads, num_key_value_heads "
                "and head_dim for the drafter."
            )
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _field(text, "intermediate_size") or 4 * text.hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _field(text, "num_key_value_heads") or heads,
            "head_dim": _field(text, "head_dim") or text.hidden_size // heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
            "max_position_embeddings": _positive(_field(text, "max_position_embeddings")) or 32768,
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "target_layer_ids": spread_layer_ids(text.num_hidden_layers, num_hidden_layers),
            "mask_token_id": text.vocab_size - 1,
            "final_logit_softcapping": _field(text, "final_logit_softcapping"),
            "target_model_type": text.model_type,
            "target_name": hub_name(target_config.name_or_path),
            "pad_token_id": _field(text, "pad_token_id"),
            "bos_token_id": _field(text, "bos_token_id"),
            "eos_token_id": _field(text, "eos_token_id"),
        }
        return cls(**(fields | overrides))


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"DSparkConfig: {message}")


def spread_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Spread `count` taps evenly over layers 1 to `num_target_layers` - 3, as the released drafters do."""
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, 0)
    first = min(first, last)
    count = min(count, last - first + 1)
    if count == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def hub_name(name_or_path: str | None) -> str | None:
    """The name of a Hub repository, or `None` for a folder or nothing."""
    is_name = name_or_path and re.fullmatch(r"([\w.-]+/)?[\w.-]+", name_or_path) and not Path(name_or_path).exists()
    return name_or_path if is_name else None


def _field(config: PreTrainedConfig, name: str) -> Any:
    """A field, or `None` when there is none or a list for the layers; the first layer's where they differ (Gemma 4)."""
    try:
        value = getattr(config, name)
    except AttributeError:
        return None
    except RuntimeError:  # newer releases of transformers name no single value where layers differ
        value = getattr(config.per_layer_config[0], name)
    return None if isinstance(value, list | tuple) and name != "eos_token_id" else value


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _rope_theta(text_config: PreTrainedConfig) -> float:
    """Base of the target's rotary embedding, or 10000 when it has none or one per layer type without a full one."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return parameters.get("rope_theta") or 10000.0
