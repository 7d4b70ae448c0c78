"""Packagings that nest the drafter's fields in `dflash_config`: SpecForge and RadixArk, NVIDIA ModelOpt, LiquidAI, z-lab DFlash.

The four look alike and differ in what their tensors are called, in which slot predicts first and in how blocks are masked.
None brings an embedding or a head unless its tensors say so.
"""

from dataclasses import dataclass, field
from typing import Any

from dspark_hf.checkpoints.fields import block_fields, drafter_fields, hoisted
from dspark_hf.checkpoints.shapes import Tensors, first_slot, renamed
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


@dataclass(frozen=True, slots=True)
class Packaging:
    r"""
    What tells one packaging from the others.

    Args:
        name (`str`): For messages.
        key_mapping (`dict[str, str]`): Renames its tensors.
        default_slot (`int`): First slot that predicts, where the config is silent.
        fields (`dict[str, Any]`): Fields of [`DSparkConfig`] that are always so.
    """

    name: str
    key_mapping: dict[str, str] = field(default_factory=dict)
    default_slot: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


SPECFORGE = Packaging("SpecForge", {r"^logit_head\.": ""})
MODELOPT = Packaging(
    "ModelOpt",
    {
        r"^(markov_w[12]|gate_proj|joint_proj)\.": r"markov_head.\1.",
        r"^confidence_proj\.": "confidence_head.proj.",
    },
)
LIQUID = Packaging("LiquidAI", {r"^model\.": ""})
# z-lab's code takes the taps out of transformers' `hidden_states`, whose last entry is normed.
DFLASH = Packaging("z-lab DFlash", default_slot=1, fields={"normed_last_tap": True})


def read_marked(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter that fields or tensor names mark as one of these, whatever its class is called.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
    """
    if "markov_w1.weight" in tensors:
        return _read(MODELOPT, config, tensors)
    projector = (config.get("dflash_config") or {}).get("projector_type")
    if projector == "dspark" or any(name.startswith("logit_head.") for name in tensors):
        return _read(SPECFORGE, config, tensors)
    return None


def read_named(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter that its class name alone gives away, after everything that is told by a mark.

    Raises:
        ValueError: As above, or if nothing says which slot predicts first.
        NotImplementedError: If the logits have a scale of their own.
    """
    architectures = " ".join(config.get("architectures") or [])
    for name, packaging in (("Lfm2DSpark", LIQUID), ("DSparkDraftModel", SPECFORGE), ("DFlashDraftModel", DFLASH)):
        if name in architectures:
            return _read(packaging, config, tensors)
    return None


def _read(packaging: Packaging, config: dict, tensors: Tensors) -> CheckpointFormat:
    config = hoisted(config)
    fields = drafter_fields(config, renamed(tensors, packaging.key_mapping), packaging.name)
    return CheckpointFormat(
        DSparkConfig(
            **fields,
            **block_fields(config, _first_slot(packaging, config, fields["markov_rank"])),
            **packaging.fields,
            **(_scales(config) if packaging is DFLASH else {}),
            target_model_type=config.get("target_model_type"),
        ),
        key_mapping=packaging.key_mapping or None,
    )


def _first_slot(packaging: Packaging, config: dict, markov_rank: int) -> int:
    shifted = config.get("shift_label")  # ModelOpt's word for it
    default = packaging.default_slot if shifted is None else 0 if shifted else 1
    unstated = shifted is None and first_slot(config, 0) != first_slot(config, 1)
    if packaging is DFLASH and markov_rank > 0 and unstated:
        raise ValueError(
            "This is a DFlash drafter with a Markov head, and its config does not say whether the anchor's slot predicts. Add "
            '`"sample_from_anchor": true` to config.json if its publisher proposes `block_size` tokens a round, '
            "`false` if one fewer."
        )
    return first_slot(config, default)


def _scales(config: dict) -> dict[str, Any]:
    """z-lab's code embeds with the bare table, past the scale of a Gemma target's module, and has a scale and a cap of its own."""
    if config.get("output_multiplier", 1.0) != 1.0:
        raise NotImplementedError("A DFlash drafter with an `output_multiplier` on its logits is not supported.")
    return {
        "embedding_scale": float(config.get("input_embedding_scale", 1.0)),
        "final_logit_softcapping": config.get("final_logit_softcapping") or None,
    }
