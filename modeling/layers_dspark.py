"""Draft layers: attention of a block over the target's context and itself, and what goes around it (eq. 3).

The paper's are Qwen3 layers. Other publishers' differ in rotary pairs, gates, sinks and norms, or are Gemma 4 layers; each
difference is a field of [`DSparkConfig`]. Published with every checkpoint, beside `modeling_dspark.py`, which uses it.

Shape letters: B batch, T context, K block size, D hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dspark import DSparkConfig


Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each `(B, 1, T + K, head_dim)`, the context's first."""


class DSparkRMSNorm(Qwen3RMSNorm):
    """RMS norm, also with weights that are stored as their difference from 1."""

    def __init__(self, config: DSparkConfig, size: int):
        super().__init__(size, config.rms_norm_eps)
        self.zero_centered = config.zero_centered_norms

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.zero_centered:
            return super().forward(hidden_states)
        exact = nn.functional.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), eps=self.variance_epsilon)
        return (exact * (1.0 + self.weight.float())).to(hidden_states.dtype)


class DSparkRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary embedding whose frequencies stay float32 when the model is cast: rounded ones drift at long positions.

    With a `partial_rotary_factor` below 1 there are fewer frequencies, and they turn the first entries of a head alone.
    """

    @staticmethod
    def compute_default_rope_parameters(config: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
        rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0

    def _apply(self, fn: Callable, recurse: bool = True) -> "DSparkRotaryEmbedding":
        exact = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            cast = getattr(self, name)
            if cast.dtype != torch.float32:
                setattr(self, name, buffer.to(cast.device))
        return self


class DSparkAttention(nn.Module):
    """Attention of the block over the context and itself (eq. 3)."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = 1.0 if config.backbone == "gemma4" else config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        with_gates = 2 * queries if config.attention_gate else queries
        self.q_proj = nn.Linear(config.hidden_size, with_gates, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DSparkRMSNorm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = DSparkRMSNorm(config, config.head_dim) if config.qk_norm else nn.Identity()
        if config.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        keys_input = torch.cat([context, block], dim=1)  # (B, T + K, D)
        queries, gates = self.q_proj(block).unflatten(-1, (self.config.num_attention_heads, -1)), None
        if self.config.attention_gate:
            queries, gates = queries.chunk(2, dim=-1)
        keys = self._heads(self.k_proj(keys_input))
        values = self._values(keys_input, keys).transpose(1, 2)
        cos, sin = rotary  # (B, 1, T + K, rotated entries), context first
        block_rotary = cos[:, :, context.shape[1] :], sin[:, :, context.shape[1] :]
        queries = self._rotate(self.q_norm(queries).transpose(1, 2), block_rotary)
        keys = self._rotate(self.k_norm(keys).transpose(1, 2), rotary)
        # Under autocast the norms leave float32; flex attention wants one dtype.
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        output = self._attend(queries, keys, values, attention_mask)
        if gates is not None:
            output = output * torch.sigmoid(gates)
        return self.o_proj(output.reshape(*block.shape[:-1], -1).contiguous())

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention output `(B, K, heads, head_dim)`."""
        if self.config.attention_sinks:
            keys, values, attention_mask = self._with_sinks(keys, values, attention_mask)
        implementation = self.config._attn_implementation
        if implementation == "flex_attention" and isinstance(attention_mask, torch.Tensor):
            implementation = "sdpa"  # Drafting's masks are dense; block masks come from packed training alone.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, is_causal=False
        )
        return output

    def _with_sinks(
        self, keys: torch.Tensor, values: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One more key and value of zeros, whose score is each head's sink: it takes weight and adds nothing."""
        if not isinstance(attention_mask, torch.Tensor):
            raise NotImplementedError("Attention sinks need dense masks: set the drafter's attention to 'sdpa'.")
        nothing = keys.new_zeros(*keys.shape[:2], 1, self.head_dim)
        batch, _, block, known = attention_mask.shape
        heads = len(self.attention_sink_bias)
        sinks = self.attention_sink_bias.to(attention_mask.dtype).view(1, heads, 1, 1).expand(batch, -1, block, -1)
        mask = torch.cat([attention_mask.expand(-1, heads, block, known), sinks], dim=-1)
        return torch.cat([keys, nothing], dim=2), torch.cat([values, nothing], dim=2), mask

    def _values(self, keys_input: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        values = keys if self.config.attention_k_eq_v else self._heads(self.v_proj(keys_input))
        if self.config.backbone == "gemma4":
            exact = nn.functional.rms_norm(values.float(), (self.head_dim,), eps=self.config.rms_norm_eps)
            values = exact.to(values.dtype)
        return values

    def _rotate(self, states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Turn heads `(B, heads, N, head_dim)`. Interleaved pairs are first brought to halves: scores do not change."""
        cos, sin = rotary
        turned, rest = states.split([cos.shape[-1], self.head_dim - cos.shape[-1]], dim=-1)
        if self.config.rope_interleaved:
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = turned * cos + rotate_half(turned) * sin
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim))  # (B, N, heads, head_dim)


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 layer whose attention also reads the context. The context is not normalised here."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DSparkRMSNorm(config, config.hidden_size)
        self.post_attention_layernorm = DSparkRMSNorm(config, config.hidden_size)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, rotary, attention_mask, cache)
        return block + self.mlp(self.post_attention_layernorm(block))


class Gemma4DSparkDecoderLayer(DSparkDecoderLayer):
    """A Gemma 4 layer: norms on both sides of attention and feed-forward, and a scale for the whole layer."""

    layer_scalar: torch.Tensor

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = DSparkRMSNorm(config, config.hidden_size)
        self.post_feedforward_layernorm = DSparkRMSNorm(config, config.hidden_size)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(block), context, rotary, attention_mask, cache)
        block = block + self.post_attention_layernorm(attended)
        block = block + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(block)))
        return block * self.layer_scalar


DECODER_LAYERS = {"qwen3": DSparkDecoderLayer, "gemma4": Gemma4DSparkDecoderLayer}
