"""Ornith's `Qwen35DSparkModel`: draft layers like Qwen3.5's, with gated queries, norms around zero and a partial rotary embedding.

The one packaging known to carry calibration temperatures, under the name that this package uses.
"""

from dspark_hf.checkpoints.fields import block_fields, drafter_fields, hoisted
from dspark_hf.checkpoints.shapes import Tensors, first_slot
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


def read(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter of this packaging, or return `None` for another.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    if not _is_ornith(config):
        return None
    config = hoisted(config)
    return CheckpointFormat(
        DSparkConfig(
            **drafter_fields(config, tensors, "Ornith (Qwen3.5)", partial=True),
            **block_fields(config, first_slot(config, default=0)),
            zero_centered_norms=True,
            normed_last_tap=True,
            confidence_temperatures=config.get("confidence_temperatures"),
            target_model_type=config.get("target_model_type") or "qwen3_5",
        )
    )


def _is_ornith(config: dict) -> bool:
    """An older fork has a class of the same name with plain layers; it keeps the `model_type` of the target's text model."""
    named = "Qwen35DSparkModel" in (config.get("architectures") or [])
    return bool(config.get("enable_qwen35_gated_q_proj")) or (named and config.get("model_type") == "qwen3_5")
