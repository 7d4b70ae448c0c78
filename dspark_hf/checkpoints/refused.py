"""Drafters that are known and cannot be run here, each refused by name with the reason."""

import re
from typing import NoReturn

from dspark_hf.checkpoints.fields import hoisted
from dspark_hf.checkpoints.shapes import Tensors
from dspark_hf.checkpoints.speculators import KINDS
from dspark_hf.modeling.modeling_dspark import refuse_quantised


# Other drafters have fields of this prefix too: Nemotron's `dspark_bonus_anchor`, `dspark_markov_rank`.
IN_CHECKPOINT = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids")
DRAFTER_INSIDE = re.compile(
    r"(model\.)?mtp\.\d+\.(main_proj|markov_head)\."
)  # other targets have `mtp.*` of another kind
LATENT_ATTENTION = ("K3DSparkModel", "Glm5_2DSparkModel", "MLA")
LATENT_TENSORS = (".kv_a_proj", ".kv_b_proj", ".wkv.")
REASONS = {
    "dflash2": "its draft layers have convolutions and its candidates come from a selector",
    "xpress": "it refines a block by Jacobi iterations",
    "eagle3": "EAGLE-3 drafts token by token; transformers and vLLM run it",
    "peagle": "P-EAGLE drafts with layers of another kind; vLLM runs it",
    "mtp": "its head is part of the target; transformers and vLLM run it",
    "domino": "its tokens are corrected by a recurrent network over the prefix",
    "lilicorr": "its candidates are ranked by a second network",
    "kda": "its draft layers are recurrent (Kimi delta attention)",
    "mla": "only grouped-query draft layers are built here",
}


def refuse_known(config: dict, tensors: Tensors) -> None:
    """Return `None` for everything that is not listed here, as a reader that finds nothing does.

    Raises:
        NotImplementedError: Naming the drafter and why it is out of reach.
        ValueError: If the weights are quantised.
    """
    architectures = " ".join(config.get("architectures") or [])
    if any(name in config for name in IN_CHECKPOINT) or any(DRAFTER_INSIDE.match(name) for name in tensors):
        _refuse(
            "A DeepSeek-V4 checkpoint with its drafter inside (`mtp.*`)",
            "that drafter is a mixture of experts with latent attention and hyper-connections; SGLang and vLLM run it",
        )
    if config.get("model_type") == "muse_glimmer_assistant":
        _refuse("A Muse Glimmer assistant", "transformers runs it itself: pass it to generate() as it is")
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in KINDS:
        _refuse(
            f"A speculators drafter of the kind {kind!r}", REASONS.get(kind, f"only {' and '.join(KINDS)} are read")
        )
    if config.get("log_snr_conditioning") or any(name.startswith("log_snr_embed.") for name in tensors):
        _refuse("A drafter with log_snr_conditioning (Bonsai, GIDD)", "its embedding depends on a noise level")
    if "DFlash2" in architectures or any("candidate_selector." in name for name in tensors):
        _refuse("A DFlash 2 drafter", REASONS["dflash2"])
    _refuse_other_layers(config, tensors, architectures)
    refuse_quantised(tensors)


def _refuse_other_layers(config: dict, tensors: Tensors, architectures: str) -> None:
    fields = hoisted(config)
    latent = any(part in name for name in tensors for part in LATENT_TENSORS)
    if latent or any(name in architectures for name in LATENT_ATTENTION):
        _refuse("A drafter with multi-head latent attention (Kimi-K3, GLM 5.2)", REASONS["mla"])
    modes = {str(mode).lower() for mode in [fields.get("attention_mode"), *fields.get("attention_modes", [])]}
    for mode in sorted(modes & {"kda", "mla"}):
        _refuse(f"A drafter with attention_mode {mode!r}", REASONS[mode])
    projector = fields.get("projector_type")
    if projector not in (None, *KINDS):
        _refuse(
            f"A drafter with projector_type {projector!r}",
            REASONS.get(projector, "that kind of head is not known here"),
        )


def _refuse(what: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{what} cannot be loaded as a DSpark drafter: {why}.")
