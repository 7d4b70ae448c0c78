"""DeepSpec's packaging of Qwen3 drafters: `deepseek-ai/dspark_qwen3_*_block7` and `dflash_qwen3_*_block7`.

The config is a copy of the target's config, `model_type` included, with the drafter's fields beside it at top level; weights
have the names that this package uses. Relatives use the same class name: NVIDIA Nemotron's (causal sliding layers, sinks, an
anchor slot that only conditions, fields nested too), MiniCPM's (no embedding or head of its own), NeMo's.
"""

from dspark_hf.checkpoints.fields import block_fields, drafter_fields, hoisted
from dspark_hf.checkpoints.shapes import Tensors, first_slot
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


# The second class is the first under another name; where it has layers of its own, `ornith` reads it.
CLASSES = {"Qwen3DSparkModel", "Qwen35DSparkModel"}


def read(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter of this packaging, or return `None` for another.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    if not _is_deepspec(config, tensors):
        return None
    nests = bool(config.get("dflash_config"))
    config = hoisted(config)
    return CheckpointFormat(
        DSparkConfig(
            **drafter_fields(config, tensors, "DeepSpec Qwen3"),
            **block_fields(config, first_slot(config, default=0)),
            # DeepSpec refuses the last layer and NeMo, which follows it, reads what transformers returns; NVIDIA's engines
            # give Nemotron's drafters the last layer's own output.
            normed_last_tap=not nests,
            target_model_type=config.get("target_model_type") or config.get("model_type"),
        )
    )


def _is_deepspec(config: dict, tensors: Tensors) -> bool:
    architectures = set(config.get("architectures") or [])
    # A fork exports its heads under the class name of DFlash; DeepSpec's training leaves `num_anchors` in the config.
    relabelled = "DFlashDraftModel" in architectures and "num_anchors" in config
    return bool(CLASSES & architectures) or (relabelled and "markov_head.markov_w1.weight" in tensors)
