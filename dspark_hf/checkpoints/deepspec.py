"""DeepSpec's Qwen3 packaging: `deepseek-ai/dspark_qwen3_*_block7` and `dflash_qwen3_*_block7`.

Its config is a copy of the target's Qwen3 config, `model_type` included, with the drafter's fields beside it; its
weights have the names that this package uses. Fields copied from the target that describe no drafter are ignored.
"""

from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


REQUIRED = ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids")
COPIED = (
    *REQUIRED,
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "attention_bias",
    "layer_types",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
UNREAD = {"sample_from_anchor": True, "dflash_query_causal": False, "attention_sink_bias": False}
"""Fields that change the computation in relatives of this packaging, with the value that changes nothing."""
MARKERS_OF_OTHERS = ("speculators_model_type", "dflash_config", "projector_type", "enable_qwen35_gated_q_proj")


def read(config: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> CheckpointFormat | None:
    """Read a DeepSpec Qwen3 drafter, or return `None` when the config is of another packaging.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    if "Qwen3DSparkModel" not in (config.get("architectures") or []) or config.get("model_type") != "qwen3":
        return None
    if any(marker in config for marker in MARKERS_OF_OTHERS):
        return None
    missing = [name for name in REQUIRED if name not in config]
    if missing:
        raise ValueError(f"A DeepSpec Qwen3 drafter needs the config fields {missing}, which are not there.")
    unread = [name for name, neutral in UNREAD.items() if config.get(name, neutral) != neutral]
    if config.get("draft_vocab_size") not in (None, config.get("vocab_size")):
        unread.append("draft_vocab_size")
    if unread:
        raise ValueError(f"The config fields {unread} change what a drafter computes; this packaging is not read yet.")
    fields = {name: config[name] for name in COPIED if name in config}
    if not fields.get("rope_parameters") and config.get("rope_theta"):  # as transformers 4 wrote it
        scaling = config.get("rope_scaling") or {}
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        fields["rope_parameters"] = scaling | {"rope_type": rope_type, "rope_theta": config["rope_theta"]}
    if "sliding_attention" in (config.get("layer_types") or []):
        fields["sliding_window"] = config.get("sliding_window")
    fields |= _heads(config, tensors) | {"target_model_type": "qwen3"}
    fields["qk_norm"] = "layers.0.self_attn.q_norm.weight" in tensors
    fields["has_embedding"] = "embed_tokens.weight" in tensors
    fields["has_lm_head"] = "lm_head.weight" in tensors
    return CheckpointFormat(DSparkConfig(**fields))


def _heads(config: dict, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict:
    """Sequential and confidence head, from the tensors where those say more than the config."""
    markov = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    rank = markov[1][1] if markov else 0
    if rank != config.get("markov_rank", rank):
        raise ValueError(f"The config says markov_rank {config['markov_rank']}, the tensors say {rank}.")
    enabled = confidence is not None
    if enabled != config.get("enable_confidence_head", enabled):
        raise ValueError(f"The config says enable_confidence_head {not enabled}, the tensors say {enabled}.")
    return {
        "markov_rank": rank,
        "markov_head_type": config.get("markov_head_type") or "vanilla",
        "enable_confidence_head": enabled,
        "confidence_head_with_markov": confidence is not None
        and rank > 0
        and confidence[1][1] > config["hidden_size"],
    }
