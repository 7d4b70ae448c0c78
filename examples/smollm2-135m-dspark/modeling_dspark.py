"""DSpark drafter (arXiv 2607.05147, section 3.1): a parallel backbone and a light sequential head.

    taps    = concat over l in target_layer_ids of H_l                   [T, len(ids) * D_target]
    ctx     = hidden_norm(fc(taps))                                      [T, D]           eq. 2
    block   = embed([anchor, MASK, ..., MASK])                           [K, D]
    layer:    q from the block; keys and values from [ctx ; block]                        eq. 3
    h       = norm(block)                                                [K, D]
    U       = lm_head(h)                                                 [K, V]           base logits
    q_k     = softmax(U_k + B_k(x_0, x_<k)), drawn left to right                          eqs. 4-6
    c_k     = sigmoid(w . [h_k ; W_1[x_{k-1}]] + b)                                       eq. 7

The context comes from the target alone, strictly before the anchor; the block's own keys and values are dropped after
the round. The files of this folder are published with every checkpoint and need only torch and
transformers. Decoding with them is the work of the package `dspark_hf`.

Shape letters: B batch, T context, K block size, V vocabulary, D hidden size, r Markov rank.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput, cached_file

from .configuration_dspark import DSparkConfig
from .layers_dspark import DECODER_LAYERS, DSparkRMSNorm, DSparkRotaryEmbedding


Choose = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`choose(index, logits (B, V) float32, drafted (B, index)) -> (tokens (B,), probs (B, V) float32)`."""


@dataclass(frozen=True)
class CheckpointFormat:
    """What a reader makes of a foreign checkpoint: our config, regular expressions that rename its weights, and names of
    tensors that say nothing the config does not say."""

    config: DSparkConfig
    key_mapping: dict[str, str] | None = None
    redundant: tuple[str, ...] = ()


CHECKPOINT_READERS: list[Callable[[dict, dict], CheckpointFormat | None]] = []
"""Readers of other packagings, `(config dict, {name: (dtype, shape)}) -> CheckpointFormat or None`; `dspark_hf` fills it."""


PUBLISHERS: list[Callable[..., Any]] = []
"""What uploads a drafter as a whole repository, `(drafter, repo_id, **kwargs)`: none, or the one `dspark_hf` puts in."""


@dataclass
class DSparkDraft(ModelOutput):
    r"""
    What one drafting pass returns.

    Args:
        tokens (`torch.LongTensor` of shape `(B, K)`): Drafted tokens, ids of the target's vocabulary.
        probs (`torch.FloatTensor` of shape `(B, K, V)`): float32, the distributions the tokens were drawn from.
        confidence_logits (`torch.FloatTensor` of shape `(B, K)`, *optional*): float32, before calibration and sigmoid;
            entry `k - 1` is conditional on the k-1 tokens before it and known before token k is drawn.
    """

    tokens: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


class MarkovHead(nn.Module):
    """Vanilla Markov head (eq. 5): `B_k = W_1[x_{k-1}] W_2`. The other heads change `step` alone."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def step(
        self, features: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the transition bias of one position, `(B, V_d)`, and the next state.

        `features` `(B, r)` is `W_1[x_{k-1}]`, `hidden_states` `(B, D)` is h_k, `state` `(B, r)` is s_{k-1}.
        """
        return self.markov_w2(features), state


class GatedMarkovHead(MarkovHead):
    """`B_k = (sigmoid(W_gate [h_k ; W_1[x_{k-1}]] + b) * W_1[x_{k-1}]) W_2`."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, features: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden_states, features], dim=-1)))
        return self.markov_w2(gate * features), state


class RNNMarkovHead(MarkovHead):
    """Recurrent head (eq. 6): one projection of `[s ; W_1[x] ; h]`, split into gate, candidate and output."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(
        self, features: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint = self.joint_proj(torch.cat([state, features, hidden_states], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """Acceptance of token k given its prefix, as a logit (eq. 7)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        inputs = (
            hidden_states if features is None or not self.with_markov else torch.cat([hidden_states, features], -1)
        )
        return self.proj(inputs).squeeze(-1)


class DSparkDraftModel(PreTrainedModel):
    r"""
    The drafter. Decoding options travel on its `generation_config`: `num_assistant_tokens` caps the tokens verified in
    a round (`None` = `block_size`), `num_assistant_tokens_schedule` names the policy, `assistant_confidence_threshold`
    is the threshold of the policy `"threshold"`.

    Args:
        config ([`DSparkConfig`]): Shape of the drafter.
    """

    config: DSparkConfig
    d2t: torch.Tensor
    config_class = DSparkConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ["DSparkDecoderLayer", "Gemma4DSparkDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.has_embedding else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = DSparkRMSNorm(config, width)
        make_layer = DECODER_LAYERS[config.backbone]
        self.layers = nn.ModuleList([make_layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DSparkRMSNorm(config, width)
        self.rotary_emb = DSparkRotaryEmbedding(config)  # type: ignore[arg-type]  # reads the fields they share
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.has_lm_head else None
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank > 0 else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.gradient_checkpointing = False
        self.generation_config = GenerationConfig()
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    @property
    def kept_token_ids(self) -> torch.Tensor | None:
        """Target ids of the draft vocabulary, `(V_d,)`, or `None` when the drafter proposes from the whole vocabulary."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def project_context(self, taps: torch.Tensor) -> torch.Tensor:
        """Turn concatenated taps `(B, T, len(ids) * D_target)` into context features `(B, T, D)` (eq. 2)."""
        return self.hidden_norm(self.fc(taps))

    def block_input_ids(self, anchor: torch.Tensor) -> torch.Tensor:
        """The block's inputs, `(B, num_block_inputs)`: the anchors `(B,)` and mask tokens."""
        block = anchor.new_full((anchor.shape[0], self.config.num_block_inputs), self.config.mask_token_id)
        block[:, 0] = anchor
        return block

    def embed(self, input_ids: torch.Tensor, lent: Any = None) -> torch.Tensor:
        """Embed a block's inputs `(B, K)` with the drafter's own table or the target's, `lent`: `(B, K, D)`."""
        table = self.embed_tokens if lent is None else lent
        if table is None:
            raise ValueError("This drafter has no embedding of its own: pass the target's.")
        if self.config.embedding_scale is None:
            return table(input_ids)
        rows = nn.functional.embedding(input_ids, table.weight)
        # On the CPU, where a lone number costs no copy to the device; rounded as the rows are, as in Gemma.
        return rows * torch.tensor(self.config.embedding_scale, dtype=rows.dtype)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        context: torch.Tensor,
        position_ids: torch.Tensor,
        context_position_ids: torch.Tensor,
        attention_mask: dict[str, torch.Tensor] | None = None,
        cache: Any = None,
    ) -> BaseModelOutput:
        r"""
        The parallel stage: one pass over the block.

        Args:
            inputs_embeds (`torch.FloatTensor` of shape `(B, K, D)`): Embedded anchor and masks.
            context (`torch.FloatTensor` of shape `(B, T, D)`): From [`project_context`]; only what is new when a
                `cache` holds the rest.
            position_ids (`torch.LongTensor` of shape `(B, K)`): Positions of the block; the anchor at its own.
            context_position_ids (`torch.LongTensor` of shape `(B, T)`): Positions of the context.
            attention_mask (`dict[str, torch.Tensor]`, *optional*): One additive mask `(B, 1, K, keys)` per layer type,
                over the keys that attention sees: `[context ; block]`, or what `cache.update` returns. Made by
                [`draft_attention_mask`] from the positions when there is no cache.
            cache (*optional*): Holds the context's keys and values; `update(keys, values, layer_idx)` stores these and
                returns all.

        Returns:
            `BaseModelOutput` with `last_hidden_state` `(B, K, D)` after the final norm.
        """
        all_position_ids = torch.cat([context_position_ids, position_ids], dim=1)
        if attention_mask is None:
            if cache is not None:
                raise ValueError("With a cache the caller knows the order of its keys: pass `attention_mask`.")
            attention_mask = draft_attention_mask(self.config, position_ids, all_position_ids, self.dtype)
        cos, sin = self.rotary_emb(context, all_position_ids)
        rotary = (cos.unsqueeze(1), sin.unsqueeze(1))
        block = inputs_embeds.to(self.dtype)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            block = layer(block, context, rotary, attention_mask[layer_type], cache)
        return BaseModelOutput(last_hidden_state=self.norm(block))

    def base_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """Base logits `U` `(B, K, V_d)` of the positions that predict, from `(B, num_block_inputs, D)`."""
        return self.head_logits(hidden_states[:, self.config.first_prediction_slot :], lm_head)

    def head_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """What the drafter's own head or `lm_head` makes of hidden states `(..., D)`: `(..., V_d)`."""
        head = self.lm_head if lm_head is None else lm_head
        if head is None:
            raise ValueError("This drafter has no head of its own: pass `lm_head`, the target's output embeddings.")
        weight = getattr(head, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.itemsize > 1:  # not float8
            hidden_states = hidden_states.to(weight.dtype)
        logits, cap = head(hidden_states), self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def initial_state(self, hidden_states: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """State `(B, r)` of the sequential head before the first token, from `(B, num_block_inputs, D)` and the anchors.

        A recurrent head runs over every slot, so that one which only conditions is read first, with the anchor before it.
        """
        state = hidden_states.new_zeros(anchor.shape[0], self.config.markov_rank)
        if self.markov_head is not None and self.config.markov_head_type == "rnn":
            for slot in range(self.config.first_prediction_slot):
                _, state = self.markov_head.step(self.markov_head.markov_w1(anchor), hidden_states[:, slot], state)
        return state

    def to_target_vocabulary(self, logits: torch.Tensor, vocab_size: int | None = None) -> torch.Tensor:
        """Scatter `(B, V_d)` logits to `(B, vocab_size)`, `V` unless given, with -inf for what cannot be drafted."""
        size = self.config.vocab_size if vocab_size is None else vocab_size
        kept = self.kept_token_ids
        if kept is None:
            return nn.functional.pad(logits, (0, size - logits.shape[1]), value=-torch.inf)
        return logits.new_full((logits.shape[0], size), -torch.inf).index_copy_(1, kept, logits)

    def draft(
        self,
        hidden_states: torch.Tensor,
        anchor: torch.Tensor,
        choose: Choose,
        num_tokens: int | None = None,
        lm_head: nn.Module | None = None,
        vocab_size: int | None = None,
    ) -> DSparkDraft:
        r"""
        The sequential stage (eq. 4): draw the block's tokens from left to right.

        Args:
            hidden_states (`torch.FloatTensor` of shape `(B, num_block_inputs, D)`): From [`forward`].
            anchor (`torch.LongTensor` of shape `(B,)`): x_0.
            choose (`Choose`): Draws a token; called once for each position, in order.
            num_tokens (`int`, *optional*): Draw only so many tokens. `None` means `block_size`.
            lm_head (`nn.Module`, *optional*): Head to use instead of the drafter's own, giving `V_d` logits.
            vocab_size (`int`, *optional*): Vocabulary of the target, where that is padded beyond the drafter's.

        Returns:
            [`DSparkDraft`]
        """
        num_tokens = self.config.block_size if num_tokens is None else num_tokens
        first = self.config.first_prediction_slot
        predicting = hidden_states[:, first:]
        base_logits = self.base_logits(hidden_states[:, : first + num_tokens], lm_head).float()
        drafted, probs, confidences = anchor.new_zeros(anchor.shape[0], 0), [], []
        previous, features = anchor, None
        bias: Any = 0.0
        state = self.initial_state(hidden_states, anchor)
        for k in range(num_tokens):
            if self.markov_head is not None:
                features = self.markov_head.markov_w1(previous)
                bias, state = self.markov_head.step(features, predicting[:, k], state)
            if self.confidence_head is not None:
                confidences.append(self.confidence_head(predicting[:, k], features))
            previous, distribution = choose(
                k, self.to_target_vocabulary(base_logits[:, k] + bias, vocab_size), drafted
            )
            drafted = torch.cat([drafted, previous[:, None]], dim=1)
            probs.append(distribution)
        return DSparkDraft(
            tokens=drafted,
            probs=torch.stack(probs, dim=1),
            confidence_logits=torch.stack(confidences, dim=1).float() if confidences else None,
        )

    # Loading and saving

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        r"""
        Load a drafter as [`PreTrainedModel.from_pretrained`] does, in this layout or in any that `dspark_hf` reads.
        Fields of [`DSparkConfig`] among the arguments replace those of the checkpoint.

        Raises:
            ValueError: If the packaging is not known, the weights are quantised or pickled, or any weight is missing,
                left over or of another shape.
        """
        path = str(pretrained_model_name_or_path)
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
        tensors = checkpoint_tensors(path, **hub_kwargs)
        redundant: tuple[str, ...] = ()
        if not isinstance(config, DSparkConfig):
            config_dict, _ = PreTrainedConfig.get_config_dict(path, **hub_kwargs)
            # SpecForge's own config class has the same model_type, and nests fields as ours never does.
            if config_dict.get("model_type") != DSparkConfig.model_type or "dflash_config" in config_dict:
                found = _read_foreign(path, config_dict, tensors)
                fields = {name: kwargs.pop(name) for name in DSparkConfig.__annotations__ if name in kwargs}
                config = DSparkConfig.from_dict(found.config.to_dict() | fields) if fields else found.config
                kwargs["key_mapping"], redundant = found.key_mapping, found.redundant
        refuse_quantised(tensors, path)
        return_info = kwargs.pop("output_loading_info", False)
        # Another shape is reported below, by name; transformers raises without one.
        kwargs |= {"output_loading_info": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(path, *model_args, config=config, **kwargs)
        model, info = loaded
        info["unexpected_keys"] = set(info["unexpected_keys"]) - set(redundant)
        _check_every_weight_used(path, info)
        model._check_kept_tokens(path)
        model._load_generation_config(path, hub_kwargs)
        return (model, info) if return_info else model

    def save_pretrained(  # type: ignore[override]  # the same arguments, the later ones unnamed
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as [`PreTrainedModel.save_pretrained`] does, and the decoding options in `generation_config.json`."""
        # The names that a foreign checkpoint had when it was loaded do not go with the config that is written.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process:
            self.generation_config.save_pretrained(save_directory)
        if push_to_hub:
            repo_id = kwargs.get("repo_id") or Path(save_directory).name
            hub_kwargs = {name: kwargs[name] for name in PUSH_KWARGS if name in kwargs}
            self.push_to_hub(repo_id, **hub_kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]  # hidden by a decorator
        """Upload as [`PreTrainedModel.push_to_hub`] does; where `dspark_hf` is imported, as a whole repository with more
        arguments: `dspark_hf.publishing.push_to_hub`."""
        if PUBLISHERS:
            return PUBLISHERS[0](self, repo_id, **kwargs)
        return super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]  # as above

    def _check_kept_tokens(self, path: str) -> None:
        kept, size = self.kept_token_ids, self.config.vocab_size
        if kept is None or kept.is_meta:
            return
        if int(kept.min()) < 0 or int(kept.max()) >= size or len(kept.unique()) < len(kept):
            raise ValueError(
                f"`d2t` in {path} must map draft ids to different target ids in [0, {size}); it maps to "
                f"[{int(kept.min())}, {int(kept.max())}], {len(kept.unique())} of {len(kept)} different."
            )

    def _load_generation_config(self, path: str, hub_kwargs: dict) -> None:
        try:
            self.generation_config = GenerationConfig.from_pretrained(path, **hub_kwargs)
        except OSError:  # checkpoints of other tools have none
            self.generation_config = GenerationConfig()


PUSH_KWARGS = (
    "commit_message",
    "commit_description",
    "private",
    "token",
    "revision",
    "create_pr",
    "tags",
    "max_shard_size",
)
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def draft_attention_mask(
    config: DSparkConfig,
    block_slots: torch.Tensor,
    key_slots: torch.Tensor,
    dtype: torch.dtype,
    valid: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    r"""
    Additive masks of the block for each layer type.

    A slot is the place of a token in its sequence: of two keys in one slot only the one that is valid may be visible.

    Args:
        config ([`DSparkConfig`]): Gives the layer types, the window and whether the block is causal.
        block_slots (`torch.LongTensor` of shape `(B, K)`): Slots of the block, the anchor's first.
        key_slots (`torch.LongTensor` of shape `(B, N)` or `(1, N)`): Slots of the keys.
        dtype (`torch.dtype`): dtype of the masks.
        valid (`torch.BoolTensor` of shape `(B, N)`, *optional*): False for keys that nobody may see.

    Returns:
        `dict[str, torch.Tensor]`: Masks `(B, 1, K, N)` with 0 where a key is visible and the dtype's minimum elsewhere.
    """
    keys, queries = key_slots[:, None, :], block_slots[..., None]
    anchors, last = queries[:, :1], queries[:, -1:].expand_as(queries)
    masks = {}
    for layer_type in set(config.layer_types):
        seen = keys <= (queries if layer_type in config.causal_layer_types else last)
        if layer_type == "sliding_attention":
            first = (
                anchors - config.sliding_window if config.window_from_anchor else queries - config.sliding_window + 1
            )
            seen = seen & (keys >= first)
        if valid is not None:
            seen = seen & valid[:, None, :]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[layer_type] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    return masks


def checkpoint_tensors(path: str, **hub_kwargs: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    r"""
    Read names, dtypes and shapes of a checkpoint's tensors from its safetensors headers.

    Args:
        path (`str`): Folder or Hub repository.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder`.

    Returns:
        `dict[str, tuple[str, tuple[int, ...]]]`: `{name: (safetensors dtype, shape)}`.

    Raises:
        OSError: If there is no such folder or repository.
        ValueError: If there are no safetensors files, or one is damaged.
    """
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, **hub_kwargs}
    index = cached_file(path, "model.safetensors.index.json", **optional)
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in names:
        file = cached_file(path, name, **optional)
        if file is None:
            cached_file(
                path, "config.json", **hub_kwargs
            )  # raises what transformers raises where there is no repository
            if "gguf" in path.lower() or any(Path(path).glob("*.gguf")):
                raise ValueError(
                    f"{path} holds GGUF files, which are for llama.cpp. Load the publisher's safetensors repository instead."
                )
            raise ValueError(
                f"{path} has no {name}. DSpark drafters are read from safetensors only; pickled weights can run code "
                "when they are loaded. Convert them with safetensors.torch.save_file."
            )
        tensors |= _header(file)
    return tensors


def _header(file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of a safetensors file's tensors."""
    try:
        with safe_open(file, framework="pt") as handle:
            parts = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118  # it cannot be iterated
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}. Download or copy it again.") from error


def refuse_quantised(tensors: dict[str, tuple[str, tuple[int, ...]]], path: str = "The checkpoint") -> None:
    """Raise `ValueError` for weights that are not plain numbers."""
    quantised = [f"{key} ({dtype})" for key, (dtype, _) in tensors.items() if dtype not in _PLAIN_DTYPES]
    quantised += [key for key in tensors if key.endswith(_SCALES)]
    if quantised:
        raise ValueError(
            f"{path} holds quantised drafter weights: {', '.join(quantised[:3])}. A drafter must be float32, bfloat16 "
            "or float16; dequantise it, or use the publisher's unquantised drafter."
        )


_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
_SCALES = (".weight_scale", ".qweight", ".weight_packed")


def _read_foreign(path: str, config_dict: dict, tensors: dict) -> CheckpointFormat:
    for reader in CHECKPOINT_READERS:
        found = reader(config_dict, tensors)
        if found is not None:
            return found
    hint = "" if CHECKPOINT_READERS else " `import dspark_hf` reads more packagings than this file alone."
    raise ValueError(
        f"{path} is not a DSpark drafter that can be read: model_type {config_dict.get('model_type')!r}, architectures "
        f"{config_dict.get('architectures')}. Expected model_type {DSparkConfig.model_type!r} or a known packaging.{hint}"
    )


def _check_every_weight_used(path: str, info: dict) -> None:
    problems = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    problems = {name: keys for name, keys in problems.items() if keys}
    if problems:
        listed = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in problems.items())
        raise ValueError(
            f"The weights in {path} do not fit its config, so they would draft nonsense. {listed}. Check that "
            "config.json and the weights belong together."
        )


DSparkConfig.register_for_auto_class()
DSparkDraftModel.register_for_auto_class("AutoModel")
