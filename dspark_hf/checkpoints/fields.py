"""What publishers' configs have in common: nested fields, rotary embeddings in old and new form, attention, the block.

A config in the wild is a copy of the target's with the drafter's fields on top. What is read here builds the drafter in its
publisher's own code; what that code never looks at (a partial rotary embedding, sections of a multimodal one, gates of the
target's layers) is left where it is.
"""

from collections.abc import Mapping
from typing import Any

from dspark_hf.checkpoints.shapes import Tensors, check_agreement, fields_of_tensors
from dspark_hf.modeling.configuration_dspark import LAYER_TYPES


REQUIRED = ("block_size", "mask_token_id", "target_layer_ids")
COPIED = ("rms_norm_eps", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
NOT_THE_DRAFTERS = ("type", "mrope_section", "mrope_interleaved")


def drafter_fields(
    config: Mapping[str, Any], tensors: Tensors, packaging: str, partial: bool = False, but: tuple[str, ...] = ()
) -> dict[str, Any]:
    r"""
    Fields of [`DSparkConfig`] that packagings with layer ids counted from 0 write alike: all but the block's.

    Args:
        config (`Mapping`): Published config, [`hoisted`].
        tensors (`Tensors`): Under the names of this package.
        packaging (`str`): For messages.
        partial (`bool`): See [`rotary_fields`].
        but (`tuple[str, ...]`): See `shapes.check_agreement`.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    require(config, REQUIRED, packaging)
    shapes = fields_of_tensors(tensors, config)
    check_agreement(config, shapes, but)
    return {
        **copied_fields(config),
        **rotary_fields(config, partial=partial),
        **attention_fields(config, shapes["num_hidden_layers"]),
        **shapes,
    }


def copied_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of [`DSparkConfig`] that a published config has under the same names, and its activation."""
    fields = {name: config[name] for name in COPIED if config.get(name) is not None}
    activation = config.get("hidden_act") or config.get("hidden_activation")
    return fields | ({"hidden_act": activation} if activation else {})


def hoisted(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields of `dflash_config` at top level, where they replace what says otherwise."""
    nested = config.get("dflash_config") or {}
    return dict(config) | {name: value for name, value in nested.items() if value is not None}


def require(config: Mapping[str, Any], names: tuple[str, ...], packaging: str) -> None:
    """Raise `ValueError` for fields that a packaging cannot do without."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"A {packaging} drafter needs the config fields {missing}, which are not there.")


def block_fields(config: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """The block and the taps of a config whose layer ids count from 0 as here; `slot` is the first that predicts."""
    return {
        "block_size": config["block_size"] - slot,
        "first_prediction_slot": slot,
        "mask_token_id": config["mask_token_id"],
        "num_target_layers": config.get("num_target_layers"),
        "target_layer_ids": config["target_layer_ids"],
        "target_hidden_size": config.get("target_hidden_size"),
    }


def rotary_fields(
    config: Mapping[str, Any], layer_type: str = "full_attention", partial: bool = False
) -> dict[str, Any]:
    r"""
    The rotary embedding in transformers' form.

    Args:
        config (`Mapping`): Published config: `rope_parameters`, flat or one for each layer type, or `rope_theta` and
            `rope_scaling` as transformers 4 wrote them.
        layer_type (`str`): Which entry to take where there is one for each layer type.
        partial (`bool`): Whether a `partial_rotary_factor` is the drafter's own. In most files it is a copy of the
            target's that the drafter was trained without.

    Returns:
        `dict[str, Any]`: `{"rope_parameters": ...}`.

    Raises:
        ValueError: If the config says nothing of a base: guessing one would cost most of the acceptance.
    """
    parameters = config.get("rope_parameters") or {}
    by_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if by_type:
        parameters = by_type.get(layer_type) or next(iter(by_type.values()))
    stated = {**(config.get("rope_scaling") or {}), **parameters}
    rope = {name: value for name, value in stated.items() if value is not None}
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise ValueError(
            "The config gives no base of the rotary embedding: neither `rope_theta` nor `rope_parameters`."
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    rope = {name: value for name, value in rope.items() if name not in NOT_THE_DRAFTERS}
    # For text a multimodal embedding turns by the same angles as the default one.
    rope |= {"rope_theta": theta, "rope_type": "default" if kind == "mrope" else kind}
    return {"rope_parameters": rope | ({"partial_rotary_factor": share} if partial and share else {})}


def attention_fields(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    r"""
    Layer types, window, causality and the form of the rotary pairs, by the rules of vLLM, SGLang, SpecForge and z-lab.

    Args:
        config (`Mapping`): Published config, hoisted. `use_swa` makes every layer slide, whatever `layer_types` says.
            `is_causal`, `causal` or `dflash_query_causal` decides for every layer; when none is there, blocks are causal
            in sliding layers alone.
        num_layers (`int`): Draft layers.
    """
    types = ["sliding_attention"] * num_layers if config.get("use_swa") else config.get("layer_types")
    fields: dict[str, Any] = {
        "layer_types": types or ["full_attention"] * num_layers,
        "rope_interleaved": not config.get("rope_is_neox_style", config.get("is_neox_style", True)),
    }
    if "sliding_attention" in fields["layer_types"]:
        fields["sliding_window"] = config.get("swa_window_size") or config.get("sliding_window")
    stated = [config.get(name) for name in ("is_causal", "causal", "dflash_query_causal")]
    causal = next((value for value in stated if value is not None), None)
    if causal is None:
        fields["causal_layer_types"] = [name for name in ("sliding_attention",) if name in fields["layer_types"]]
    else:
        fields["causal_layer_types"] = list(LAYER_TYPES) if causal else []
    return fields
