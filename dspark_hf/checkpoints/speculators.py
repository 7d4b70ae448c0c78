"""The packaging of vLLM's `speculators` library, for DSpark and DFlash: RedHatAI's, novita's and others' drafters.

Draft layers are described in `transformer_layer_config`. Layer ids count entries of `hidden_states`, one more than the layers
whose output they are; the library trains on what vLLM records, which for the last layer is its output before the final norm.
With a reduced vocabulary `d2t` holds offsets as here; `t2d` says the same again. Windows are counted back from the anchor.
Files from before `sample_from_anchor` was written were trained with an anchor slot that predicts nothing.
"""

from typing import Any

from dspark_hf.checkpoints.fields import attention_fields, copied_fields, require, rotary_fields
from dspark_hf.checkpoints.shapes import Tensors, check_agreement, fields_of_tensors, first_slot
from dspark_hf.modeling.configuration_dspark import FINAL_NORM, DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


KINDS = ("dspark", "dflash")
REQUIRED = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "transformer_layer_config")
OF_THE_DRAFTER = ("draft_vocab_size", "markov_rank", "markov_head_type", "enable_confidence_head")


def read(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter of this packaging, or return `None` for another.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    kind = config.get("speculators_model_type")
    if kind not in KINDS:
        return None
    require(config, REQUIRED, f"speculators {kind}")
    layers = config["transformer_layer_config"] | {name: config.get(name) for name in OF_THE_DRAFTER}
    shapes = fields_of_tensors(tensors, layers)
    check_agreement(layers, shapes)
    slot = first_slot(config, default=1)
    reduced = shapes["draft_vocab_size"] < shapes["vocab_size"]
    return CheckpointFormat(
        DSparkConfig(
            **copied_fields(layers),
            # One embedding serves all layers; where there is an entry for each type, the library takes this one.
            **rotary_fields(layers, "sliding_attention"),
            **attention_fields(layers, shapes["num_hidden_layers"]) | _causality(config, layers),
            **shapes,
            **_taps(config, tensors, shapes["hidden_size"]),
            block_size=config["block_size"] - slot,
            first_prediction_slot=slot,
            mask_token_id=config["mask_token_id"],
            num_target_layers=None,
        ),
        redundant=("t2d",) if reduced else ("t2d", "d2t"),
    )


def _causality(config: dict, layers: dict) -> dict[str, Any]:
    """Full layers are always bidirectional, sliding ones causal unless it is denied."""
    slides = "sliding_attention" in (layers.get("layer_types") or [])
    causal = slides and not config.get("sliding_window_non_causal", False)
    return {"window_from_anchor": slides, "causal_layer_types": ["sliding_attention"] if causal else []}


def _taps(config: dict, tensors: Tensors, width: int) -> dict[str, Any]:
    """Tapped layers and their width. One more in `fc` than in the list is what the target's head reads."""
    ids = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    inputs = tensors["fc.weight"][1][1]
    target_width = config.get("target_hidden_size") or width
    if inputs == (len(ids) + 1) * target_width:
        ids.append(FINAL_NORM)
    return {"target_layer_ids": ids, "target_hidden_size": target_width}
