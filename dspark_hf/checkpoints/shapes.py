"""What a drafter's tensors say about it. Configs in the wild are copies with stray fields; shapes do not lie."""

import re
from collections.abc import Mapping
from typing import Any


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""`{name: (safetensors dtype, shape)}`."""

LAYER = re.compile(r"layers\.(\d+)\.")
NEEDED = (
    "fc.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.up_proj.weight",
)
BUILT_FROM = (
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "markov_rank",
    "enable_confidence_head",
    "attention_bias",
    "attention_gate",
    "attention_sinks",
    "has_embedding",
    "has_lm_head",
)
"""Fields from which publishers' own code builds the weights; where one differs, config and weights do not belong together."""
OTHER_NAMES = {
    "attention_gate": "enable_qwen35_gated_q_proj",
    "attention_sinks": "attention_sink_bias",
    "enable_confidence_head": "use_confidence_head",
    "has_embedding": "has_embed_tokens",
}


def renamed(tensors: Tensors, key_mapping: Mapping[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors under the names that `key_mapping`, regular expressions and replacements, gives them."""
    return {_rename(name, key_mapping): value for name, value in tensors.items()}


def fields_of_tensors(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Any]:
    r"""
    Fields of [`DSparkConfig`] that the tensors decide.

    Args:
        tensors (`Tensors`): Under the names of this package.
        config (`Mapping`): The published config of the draft layers, for what no tensor says: the width of a head without
            norms, the vocabulary where all that depends on it is borrowed, and the kind of the sequential head.

    Returns:
        `dict[str, Any]`: Widths, layers, attention, vocabularies, heads, and which tables the checkpoint brings.

    Raises:
        ValueError: If tensors that every drafter has, or such a field, are missing.
    """
    missing = [name for name in NEEDED if len(tensors.get(name, ("", ()))[1]) != 2]
    if missing:
        raise ValueError(f"This checkpoint is no DSpark drafter: missing keys: {', '.join(missing)}.")
    attention = "layers.0.self_attn"
    width = _shape(tensors, "fc.weight")[0]
    norm = tensors.get(f"{attention}.q_norm.weight")
    head_dim = norm[1][0] if norm else _head_dim(config, width)
    queries = _shape(tensors, f"{attention}.o_proj.weight")[1]
    projected = tensors.get(f"{attention}.q_proj.weight", ("", (queries,)))[1][0]
    return {
        "hidden_size": width,
        "intermediate_size": _shape(tensors, "layers.0.mlp.up_proj.weight")[0],
        "num_hidden_layers": 1 + max(int(found[1]) for name in tensors if (found := LAYER.match(name))),
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": _shape(tensors, f"{attention}.k_proj.weight")[0] // head_dim,
        "head_dim": head_dim,
        "attention_bias": f"{attention}.q_proj.bias" in tensors,
        "qk_norm": norm is not None,
        "attention_gate": projected == 2 * queries,
        "attention_sinks": f"{attention}.attention_sink_bias" in tensors,
        "has_embedding": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
        **_vocabularies(tensors, config),
        **_heads(tensors, config, width),
    }


def check_agreement(config: Mapping[str, Any], fields: Mapping[str, Any], but: tuple[str, ...] = ()) -> None:
    r"""
    Check that a published config and its tensors belong together.

    Args:
        config (`Mapping`): Published config; fields that it leaves out agree with anything.
        fields (`Mapping`): From [`fields_of_tensors`].
        but (`tuple[str, ...]`): Fields of [`BUILT_FROM`] that mean something else in this packaging.

    Raises:
        ValueError: Naming the first field that differs.
    """
    for name in BUILT_FROM:
        said = config.get(name, config.get(OTHER_NAMES.get(name, name)))
        if said is not None and name not in but and said != fields[name]:
            raise ValueError(f"The config says {name} {said}, the tensors say {fields[name]}.")


def first_slot(config: Mapping[str, Any], default: int) -> int:
    r"""
    First input slot that predicts, 0 or 1, from what a config says about its proposals.

    Files that leave `sample_from_anchor` out were written before the field was, so its absence means what the packaging
    meant then, never the field's default in later code.

    Args:
        config (`Mapping`): Published config, hoisted: `block_size`, `speculators_config`, `sample_from_anchor`,
            `dspark_bonus_anchor`.
        default (`int`): What the packaging means when it says nothing.
    """
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposals = methods[0].get("speculative_tokens")
    # Another number is one that somebody recommends for serving.
    if proposals is not None and config["block_size"] - proposals in (0, 1):
        return config["block_size"] - proposals
    if config.get("sample_from_anchor") is not None:
        return 0 if config["sample_from_anchor"] else 1
    if config.get("dspark_bonus_anchor") is not None:
        return 1 if config["dspark_bonus_anchor"] else 0
    return default


def _head_dim(config: Mapping[str, Any], width: int) -> int:
    if config.get("head_dim") is None and config.get("num_attention_heads") is None:
        raise ValueError("Neither the config nor a norm on the queries says how wide a head is: add `head_dim`.")
    return config.get("head_dim") or width // config["num_attention_heads"]


def _vocabularies(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, int]:
    whole = _rows(tensors, "markov_head.markov_w1.weight", "embed_tokens.weight", "t2d") or config.get("vocab_size")
    if whole is None:
        raise ValueError("Neither the config nor a tensor says how large the vocabulary is: add `vocab_size`.")
    drafted = _rows(tensors, "markov_head.markov_w2.weight", "d2t", "lm_head.weight")
    return {"vocab_size": whole, "draft_vocab_size": drafted or whole}


def _rows(tensors: Tensors, *names: str) -> int | None:
    """Rows of the first of these tensors that is there."""
    return next((tensors[name][1][0] for name in names if name in tensors), None)


def _heads(tensors: Tensors, config: Mapping[str, Any], width: int) -> dict[str, Any]:
    markov = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    return {
        "markov_rank": markov[1][1] if markov else 0,
        "markov_head_type": config.get("markov_head_type") or "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and markov is not None and confidence[1][1] > width,
    }


def _shape(tensors: Tensors, name: str) -> tuple[int, ...]:
    return tensors[name][1]


def _rename(name: str, key_mapping: Mapping[str, str]) -> str:
    for pattern, replacement in key_mapping.items():
        name = re.sub(pattern, replacement, name)
    return name
