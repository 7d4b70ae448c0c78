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
    fields = {name: config[name] for name in COPIED if name in config}
    if "rope_parameters" not in fields and "rope_theta" in config:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
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
    return {
        "markov_rank": rank,
        "markov_head_type": config.get("markov_head_type") or "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None
        and rank > 0
        and confidence[1][1] > config["hidden_size"],
    }
