"""DeepSpec's packaging of Gemma 4 drafters: `deepseek-ai/dspark_gemma4_12b_block7`.

Draft layers are Gemma 4 layers of the global kind: `global_head_dim`, values from the keys' projection, a proportional
rotary embedding. Embedding rows are scaled by the root of the width, base logits are soft-capped before the transition bias.
"""

from dspark_hf.checkpoints.fields import block_fields, drafter_fields, hoisted
from dspark_hf.checkpoints.shapes import Tensors, first_slot
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import CheckpointFormat


OF_LOCAL_LAYERS = ("num_key_value_heads", "head_dim")


def read(config: dict, tensors: Tensors) -> CheckpointFormat | None:
    """Read a drafter of this packaging, or return `None` for another.

    Raises:
        ValueError: If a field is missing, or the tensors contradict the config.
        NotImplementedError: For mixture-of-experts or per-layer-input draft layers, which no published drafter has.
    """
    if "Gemma4DSparkModel" not in (config.get("architectures") or []):
        return None
    config = hoisted(config)
    unread = [name for name in ("enable_moe_block", "hidden_size_per_layer_input") if config.get(name)]
    if unread:
        raise NotImplementedError(f"Gemma 4 draft layers with {' and '.join(unread)} are not supported.")
    fields = drafter_fields(config, tensors, "DeepSpec Gemma 4", partial=True, but=OF_LOCAL_LAYERS)
    return CheckpointFormat(
        DSparkConfig(
            **{"hidden_act": "gelu_pytorch_tanh"} | fields,
            **block_fields(config, first_slot(config, default=0)),
            backbone="gemma4",
            attention_k_eq_v="layers.0.self_attn.v_proj.weight" not in tensors,
            embedding_scale=fields["hidden_size"] ** 0.5,
            final_logit_softcapping=config.get("final_logit_softcapping"),
            normed_last_tap=True,
            target_model_type=config.get("target_text_model_type") or "gemma4_text",
        )
    )
