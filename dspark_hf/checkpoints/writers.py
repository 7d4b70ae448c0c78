"""Our drafters in the layouts that serving engines read: DeepSpec's (SGLang) and speculators' (vLLM).

A writer makes a config and tensors, and [`check_round_trip`] reads them back with this package's own reader: what the other
layout cannot say is refused by name instead of being lost.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dspark_hf.host import TargetModel
from dspark_hf.modeling.configuration_dspark import FINAL_NORM, DSparkConfig
from dspark_hf.modeling.modeling_dspark import CHECKPOINT_READERS, DSparkDraftModel
from dspark_hf.narrow import is_plain


BACKBONES = {"qwen3": ("Qwen3DSparkModel", "qwen3"), "gemma4": ("Gemma4DSparkModel", "gemma4_text")}
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "tie_word_embeddings",
)
NOT_OF_THE_WEIGHTS = (
    "attention_dropout",
    "confidence_calibration",
    "confidence_temperatures",
    "embedding_scale",
    "has_embedding",
    "has_lm_head",
    "initializer_range",
    "normed_last_tap",
    "num_target_layers",
    "target_model_type",
    "target_name",
)
"""Fields of [`DSparkConfig`] that may differ after a round trip: they describe the files, the target, the training or the
calibration, or are compared in another way."""


@dataclass(frozen=True, slots=True)
class ExportedDrafter:
    r"""
    A drafter in another layout.

    Args:
        config (`dict[str, Any]`): Content of `config.json`.
        tensors (`dict[str, torch.Tensor]`): Content of `model.safetensors`.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def to_deepspec(drafter: DSparkDraftModel, target: TargetModel | None = None) -> ExportedDrafter:
    r"""
    Write a drafter as DeepSpec does; SGLang and vLLM read that.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`, *optional*): Lends the embedding and head that this layout carries, where the drafter has
            none.

    Returns:
        [`ExportedDrafter`]

    Raises:
        ValueError: If the drafter has no embedding or head and no target is given.
        NotImplementedError: If the layout cannot say what the drafter computes; the message names the fields. If the
            target's head has a bias, or what it lends is quantised.
    """
    config: DSparkConfig = drafter.config
    if config.draft_vocab_size < config.vocab_size:
        raise NotImplementedError(
            f"DeepSpec's layout has no reduced vocabulary, and this drafter proposes {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens. Convert it to 'speculators'."
        )
    if FINAL_NORM in config.target_layer_ids or (
        _last_layer(config) in config.target_layer_ids and not config.normed_last_tap
    ):
        raise NotImplementedError(
            "DeepSpec's layout names layers alone, and reads the target's last one after the final norm. This drafter taps "
            f"{config.target_layer_ids} (-2 is the final norm's output), the last layer before it."
        )
    architecture, model_type = BACKBONES[config.backbone]
    published = {name: getattr(config, name) for name in SHARED} | {
        "architectures": [architecture],
        "model_type": model_type,
        "rope_parameters": config.rope_parameters,
        "block_size": config.num_block_inputs,
        **_task_fields(config),
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": config.target_layer_ids,
        "num_anchors": 512,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    if config.backbone == "gemma4":
        published |= _gemma4_fields(config)
    else:
        published["hidden_act"] = config.hidden_act
    if config.first_prediction_slot:
        published["sample_from_anchor"] = False
    causal = [layer_type in config.causal_layer_types for layer_type in config.layer_types]
    if all(causal) or not any(causal):
        published["is_causal"] = all(causal)  # said aloud: engines take sliding layers for causal ones
    if config.attention_sinks:
        published["attention_sink_bias"] = True
    exported = ExportedDrafter(published, _with_tables(drafter, target))
    check_round_trip(config, exported, "DeepSpec")
    return exported


def to_speculators(drafter: DSparkDraftModel, target_name: str) -> ExportedDrafter:
    r"""
    Write a drafter as vLLM's `speculators` library does.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target_name (`str`): Name of the target, which vLLM loads with it.

    Returns:
        [`ExportedDrafter`]

    Raises:
        NotImplementedError: If the layout cannot say what the drafter computes; the message names the fields.
    """
    config: DSparkConfig = drafter.config
    ids = config.target_layer_ids
    if FINAL_NORM in ids or (_last_layer(config) in ids and config.normed_last_tap):
        raise NotImplementedError(
            "speculators reads the target's last layer before the final norm, which this drafter reads after it. It taps "
            f"{config.target_layer_ids}; convert it to 'deepspec'."
        )
    foreign = [name for name in ("attention_sinks", "attention_gate") if getattr(config, name)]
    if foreign:
        raise NotImplementedError(f"speculators has no draft layers with {' and '.join(foreign)}.")
    causal = "sliding_attention" in config.causal_layer_types
    published = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "block_size": config.num_block_inputs,
        **_task_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.first_prediction_slot == 0,
        "sliding_window_non_causal": not causal,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": {name: getattr(config, name) for name in SHARED}
        | {
            "model_type": "qwen3",
            "hidden_act": config.hidden_act,
            "rope_parameters": config.rope_parameters,
            "use_sliding_window": "sliding_attention" in config.layer_types,
        },
        "tie_word_embeddings": False,
        "dtype": str(drafter.dtype).removeprefix("torch."),
    }
    tensors = _tensors(drafter)
    kept = drafter.kept_token_ids
    if kept is not None:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, kept.cpu(), True)
    exported = ExportedDrafter(published, tensors)
    check_round_trip(config, exported, "speculators")
    return exported


def check_round_trip(config: DSparkConfig, exported: ExportedDrafter, layout: str) -> None:
    """Raise `NotImplementedError` unless the layout's reader makes the same drafter of what was written."""
    shapes = {name: ("F32", tuple(tensor.shape)) for name, tensor in exported.tensors.items()}
    found = next(found for reader in CHECKPOINT_READERS if (found := reader(exported.config, shapes)) is not None)
    before, after = config.to_dict(), found.config.to_dict()
    ignored = set(NOT_OF_THE_WEIGHTS)
    ignored |= set() if config.enable_confidence_head else {"confidence_head_with_markov"}
    ignored |= set() if config.markov_rank else {"markov_head_type"}
    own = [name for name in DSparkConfig.__annotations__ if name in before]
    different = [name for name in own if name not in ignored and before[name] != after.get(name)]
    if not _reads_the_same_rows(config, found.config):
        different.append("embedding_scale")
    if different:
        listed = ", ".join(f"{name}={before[name]!r}" for name in different)
        raise NotImplementedError(f"The layout {layout!r} cannot say what this drafter computes: {listed}.")


def _reads_the_same_rows(before: DSparkConfig, after: DSparkConfig) -> bool:
    """Whether the scale on the embedding's rows is the same. A table that was lent for the file was made to fit."""
    if before.has_embedding:
        return (before.embedding_scale or 1.0) == (after.embedding_scale or 1.0)
    return after.has_embedding or before.embedding_scale == after.embedding_scale


def _last_layer(config: DSparkConfig) -> int | None:
    return None if config.num_target_layers is None else config.num_target_layers - 1


def _task_fields(config: DSparkConfig) -> dict[str, Any]:
    fields = {
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_rank > 0:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields


def _gemma4_fields(config: DSparkConfig) -> dict[str, Any]:
    return {
        "hidden_activation": config.hidden_act,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope_parameters": {"full_attention": config.rope_parameters},
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "target_text_model_type": config.target_model_type,
    }


def _tensors(drafter: DSparkDraftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in drafter.state_dict().items()}


def _with_tables(drafter: DSparkDraftModel, target: TargetModel | None) -> dict[str, torch.Tensor]:
    """The drafter's tensors, with the target's embedding and head where it has none."""
    tensors = _tensors(drafter)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            continue
        if target is None:
            raise ValueError(f"DeepSpec's layout carries {name}, and this drafter borrows it: pass the target.")
        lent: Any = target.get_input_embeddings() if name.startswith("embed") else target.get_output_embeddings()
        if not is_plain(lent):
            raise NotImplementedError(f"{name} would be the target's, which is quantised: pass it in full precision.")
        if getattr(lent, "bias", None) is not None:
            raise NotImplementedError("DeepSpec's layout has no bias of the head, and this target's head has one.")
        rows = _embedding_table(drafter, lent) if name.startswith("embed") else lent.weight
        tensors[name] = rows.detach().cpu()[: drafter.config.vocab_size].to(drafter.dtype).clone()
    return tensors


def _embedding_table(drafter: DSparkDraftModel, lent: Any) -> torch.Tensor:
    """The table `(V, D)` of which DeepSpec's code reads the rows that the drafter reads of its target's, which may be scaled."""
    rows = drafter.embed(torch.arange(drafter.config.vocab_size, device=lent.weight.device), lent)
    if drafter.config.backbone != "gemma4":
        return rows
    table = lent.weight[: drafter.config.vocab_size]
    if not torch.equal(table * table.new_tensor(drafter.config.hidden_size**0.5), rows):
        raise NotImplementedError(
            "DeepSpec's Gemma 4 layout scales rows of the embedding by the root of the width, and this drafter reads its "
            "target's otherwise."
        )
    return table
