"""Targets of many families, sharded and quantised: output equals plain generation for any drafter, or they are refused.

Each target meets a random drafter, a perfect one and one that is always wrong, alone and as rows behind left padding; texts
grow past the sliding windows of 8. Families that a release of transformers does not have are skipped.
"""

import functools
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import (
    MIXED_LAYERS,
    SHAPE,
    VOCAB,
    left_padded,
    make_drafter,
    make_scripted,
    make_target,
    oracle_script,
    spread_logits,
)

from dspark_hf.drafting import Drafting, check_lending
from dspark_hf.host import skips_prompt
from dspark_hf.narrow import can_pack
from dspark_hf.quantised import check_quantisation
from dspark_hf.taps import check_target, decoder_layers
from dspark_hf.training.target_head import TargetHead, check_target_head, last_hidden_states
from dspark_hf.verification import check_verifiable


BLOCK, NEW_TOKENS = 4, 12
BATCHES = {"one row": (6,), "padded rows": (5, 12, 7)}
IMAGE_TOKEN = 60

SLIDING = {"layer_types": MIXED_LAYERS, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GEMMA4 = SLIDING | {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 6.0,
}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8}
NO_GROUPS = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None}

# Class name and fields beside those of `SHAPE`; `None` takes a field away.
FAMILIES = {
    "cohere2": ("Cohere2", SLIDING | {"logit_scale": 0.5}),
    "gemma3, soft cap": ("Gemma3", SLIDING | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 6.0}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4, keys are values": ("Gemma4", GEMMA4 | {"attention_k_eq_v": True}),
    "gemma4, shared keys": ("Gemma4", GEMMA4 | PER_LAYER_INPUTS | {"num_kv_shared_layers": 2}),
    "glm4": ("Glm4", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "granite": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "ministral": ("Ministral", SLIDING),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1]}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "deepseek_v3": ("DeepseekV3", LATENT_ATTENTION | ROUTED_EXPERTS),
    "gemma4, experts": (
        "Gemma4",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": ("GptOss", SLIDING | LOCAL_EXPERTS),
    "mixtral": ("Mixtral", LOCAL_EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 24}),
}
MORE_FAMILIES = {
    "afmoe": ("Afmoe", SLIDING | EXPERTS | {"num_dense_layers": 1}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "bitnet": ("BitNet", {}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "deepseek_v2": ("DeepseekV2", LATENT_ATTENTION | ROUTED_EXPERTS | {"head_dim": 8}),
    "diffllama": ("DiffLlama", {}),
    "doge": ("Doge", {}),
    "dots1": ("Dots1", ROUTED_EXPERTS),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    ),
    "exaone4": ("Exaone4", SLIDING),
    "exaone_moe": ("ExaoneMoe", SLIDING | EXPERTS),
    "falcon": ("Falcon", NO_GROUPS | {"alibi": False}),
    "flex_olmo": ("FlexOlmo", EXPERTS),
    "gemma": ("Gemma", {}),
    "glm": ("Glm", {}),
    "glm4_moe": ("Glm4Moe", ROUTED_EXPERTS),
    "gpt_bigcode": ("GPTBigCode", NO_GROUPS | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "gptj": ("GPTJ", NO_GROUPS | {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 256}),
    "granitemoe": ("GraniteMoe", LOCAL_EXPERTS),
    "helium": ("Helium", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}),
    "jetmoe": ("JetMoe", LOCAL_EXPERTS | {"kv_channels": 8}),
    "longcat_flash": (
        "LongcatFlash",
        LATENT_ATTENTION
        | {"head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 24}
        | {"ffn_hidden_size": 48, "num_layers": 2},
    ),
    "mimo_v2_flash": ("MiMoV2Flash", SLIDING | ROUTED_EXPERTS),
    "minicpm3": ("MiniCPM3", LATENT_ATTENTION | {"head_dim": 8}),
    "minimax_m2": ("MiniMaxM2", LOCAL_EXPERTS),
    "ministral3": ("Ministral3", {}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", SLIDING),
    "opt": ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "phimoe": ("Phimoe", LOCAL_EXPERTS),
    "seed_oss": ("SeedOss", {}),
    "stablelm": ("StableLm", {}),
    "vaultgemma": ("VaultGemma", SLIDING | {"query_pre_attn_scalar": 8}),
    "youtu": ("Youtu", LATENT_ATTENTION | {"head_dim": 8}),
}


def classes(name: str, *suffixes: str):
    """Return a family's class for each suffix, or skip the test when this release of transformers lacks it."""
    missing = [name + suffix for suffix in suffixes if not hasattr(transformers, name + suffix)]
    if missing:
        pytest.skip(f"transformers {transformers.__version__} has no {missing[0]}")
    return [getattr(transformers, name + suffix) for suffix in suffixes]


def text_config(name: str, fields: dict):
    kind = "TextConfig" if hasattr(transformers, f"{name}TextConfig") else "Config"
    merged = {key: value for key, value in (SHAPE | fields).items() if value is not None}
    return classes(name, kind)[0](**merged)


@functools.cache
def build(family: str):
    """Return a tiny random target."""
    name, fields = (FAMILIES | MORE_FAMILIES)[family]
    config = text_config(name, fields)
    torch.manual_seed(0)
    return with_varied_text(classes(name, "ForCausalLM")[0](config).eval())


def with_varied_text(target):
    """Give a target random weights, larger in its layers than elsewhere, so that it does not repeat one token."""
    spread_logits(target)
    with torch.no_grad():
        for name, parameter in decoder_layers(target).named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
            elif "sink" in name:
                parameter.normal_()
    return target


def check_equal(target, lengths: tuple[int, ...], inputs: dict | None = None) -> torch.Tensor:
    """Compare three drafters' runs with plain generation; return what that gives."""
    inputs = inputs or left_padded(list(lengths))
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False}
    plain = target.generate(**inputs, **options)
    right = oracle_script(plain, list(lengths), max(lengths))

    def rounds(drafter) -> int:
        run = target.generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(run.sequences, plain), f"plain {plain.tolist()}\n with drafter {run.sequences.tolist()}"
        return run.statistics.rounds

    shape = {"num_hidden_layers": 1, "target_layer_ids": [-1, 0, len(decoder_layers(target)) - 1]}
    rounds(make_drafter(target, **shape))
    drafter = make_scripted(target, right, **shape)
    assert rounds(drafter) == len(lengths) * math.ceil((NEW_TOKENS - 1) / (BLOCK + 1))
    drafter.script = lambda row, position: (right(row, position) + 1) % VOCAB
    assert rounds(drafter) == len(lengths) * (NEW_TOKENS - 1)
    return plain


all_batches = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())


@all_batches
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_the_output(family, lengths):
    plain = check_equal(build(family), lengths)
    assert len(plain[:, max(lengths) :].unique()) > 2 * len(lengths)  # the texts say something


@pytest.mark.slow
@all_batches
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_no_drafter_changes_the_output_of_less_common_families(family, lengths):
    check_equal(build(family), lengths)


@pytest.mark.parametrize("family", ["cohere2", "gemma3, soft cap", "gemma4", "granite"])
def test_scales_and_caps_of_the_head_reach_the_verified_logits(family):
    target, inputs = build(family), left_padded([5, 12])
    options = {"max_new_tokens": 8, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    run = target.generate(**inputs, **options, assistant_model=make_drafter(target, num_hidden_layers=1))
    logits = torch.stack(run.logits)
    torch.testing.assert_close(logits, torch.stack(plain.logits), atol=1e-4, rtol=0)
    if "gemma" in family:
        assert logits.abs().max() < 6.0
        raw = target.get_output_embeddings()(last_hidden_states(target, inputs["input_ids"]))
        assert raw.abs().max() > 8.0  # so the cap did something


@pytest.mark.parametrize("family", [*FAMILIES, "cohere"])
def test_training_knows_the_heads_of_these_families(family):
    target = build(family)
    check_target_head(target)
    kept = torch.tensor([5, 1, 33])
    hidden = last_hidden_states(target, torch.arange(3, 12)[None])
    torch.testing.assert_close(TargetHead(target, kept)(hidden), TargetHead(target)(hidden)[..., kept])


def test_gpt_oss_keeps_its_attention_sinks():
    """Its sinks are part of the softmax that the additive mask goes into; other attention drops them."""
    target = build("gpt_oss")
    assert target.config._attn_implementation == "eager"
    assert all(layer.self_attn.sinks.abs().max() > 0.5 for layer in decoder_layers(target))
    target.config._attn_implementation_internal = "flash_attention_3"
    try:
        with pytest.raises(NotImplementedError, match=r"additive mask.*GptOss.*set_attn_implementation\('eager'\)"):
            check_verifiable(target)
    finally:
        target.config._attn_implementation_internal = "eager"


# Layers that share keys and values


def test_layers_that_share_keys_see_the_whole_prompt(monkeypatch):
    """Gemma 4 runs them on the prompt's last token alone, unless the drafter wants to read the others."""
    target, inputs, contexts = build("gemma4, shared keys"), left_padded([5, 12]), []
    observe = Drafting.observe
    monkeypatch.setattr(Drafting, "observe", lambda self, context: contexts.append(context) or observe(self, context))
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[1, 2])
    target.generate(**inputs, max_new_tokens=4, assistant_model=drafter)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        states = target(**inputs, position_ids=positions, output_hidden_states=True).hidden_states
    expected = torch.cat(states[2:4], dim=-1)
    torch.testing.assert_close(contexts[0].taps[0, -5:], expected[0, -5:], atol=1e-4, rtol=0)
    torch.testing.assert_close(contexts[0].taps[1], expected[1], atol=1e-4, rtol=0)
    assert not skips_prompt(build("gemma4"))


# Text inside multimodal wrappers

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = VISION | {"image_size": 16, "patch_size": 4}
GEMMA_TOKENS = {"boi_token_id": 61, "eoi_token_id": 62}


def rope(**fields) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **fields}}


def qwen_vision(**fields) -> dict:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, **fields}
    tokens = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 59,
        "vision_start_token_id": 58,
        "vision_end_token_id": 57,
    }
    return {"vision_config": vision, **tokens}


def gemma4_wrapper(**fields) -> dict:
    vision = {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    tokens = {"image_token_id": IMAGE_TOKEN, "audio_token_id": 59, "video_token_id": 58, **GEMMA_TOKENS}
    return {
        "text_config": text_config("Gemma4", GEMMA4 | fields),
        "vision_config": VISION | vision | {"position_embedding_size": 16},
        "audio_config": None,
        **tokens,
    }


WRAPPERS = {
    "gemma3": (
        "Gemma3",
        lambda: {
            "text_config": text_config("Gemma3", SLIDING | {"query_pre_attn_scalar": 8}),
            "vision_config": PATCHES,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        },
    ),
    "gemma4": ("Gemma4", lambda: gemma4_wrapper(use_bidirectional_attention="vision")),
    "gemma4, shared keys": ("Gemma4", lambda: gemma4_wrapper(**PER_LAYER_INPUTS, num_kv_shared_layers=2)),
    "llava": (
        "Llava",
        lambda: {
            "text_config": text_config("Llama", {}),
            "vision_config": transformers.CLIPVisionConfig(**PATCHES),
            "image_token_index": IMAGE_TOKEN,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        lambda: {
            "text_config": SHAPE | rope(mrope_interleaved=True),
            **qwen_vision(deepstack_visual_indexes=[0], num_position_embeddings=16),
        },
    ),
}
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "gemma4, shared keys": "mm_token_type_ids"}


@functools.cache
def build_wrapper(name: str):
    family, fields = WRAPPERS[name]
    config_class, model_class = classes(family, "Config", "ForConditionalGeneration")
    torch.manual_seed(0)
    return with_varied_text(model_class(config_class(**fields())).eval())


@all_batches
@pytest.mark.parametrize("name", WRAPPERS)
def test_no_drafter_changes_the_text_of_a_multimodal_target(name, lengths):
    inputs = left_padded(list(lengths))
    if name in TYPES:  # as a processor gives them for a prompt without images
        inputs[TYPES[name]] = torch.zeros_like(inputs["input_ids"])
    check_equal(build_wrapper(name), lengths, inputs)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llava"])
def test_image_tokens_in_a_draft_are_tokens_like_others(name):
    target, inputs = build_wrapper(name), left_padded([5, 12])
    drafter = make_scripted(target, lambda row, position: IMAGE_TOKEN, num_hidden_layers=1)
    options = {"max_new_tokens": 8, "eos_token_id": None}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)


def image_inputs(name: str) -> dict[str, torch.Tensor]:
    """A prompt with an image, of 4 tokens for the Gemmas and 16 for LLaVA."""
    count = 16 if name == "llava" else 4
    input_ids = torch.tensor([[5, 9, *[IMAGE_TOKEN] * count, 7, 11, 30]])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    torch.manual_seed(0)
    if name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
        inputs |= {"pixel_values": torch.rand(1, 16, 3 * 4 * 4), "image_position_ids": places[None]}
    else:
        inputs["pixel_values"] = torch.randn(1, 3, 16, 16)
    if name in TYPES:
        inputs[TYPES[name]] = (input_ids == IMAGE_TOKEN).long()
    return inputs


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llava"])
def test_no_drafter_changes_the_text_about_an_image(name):
    """Prefill is the host's own, with the image; after it there is text alone."""
    target, inputs = build_wrapper(name), image_inputs(name)
    plain = check_equal(target, (inputs["input_ids"].shape[1],), inputs)
    other = target.generate(**inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}, max_new_tokens=1)
    assert not torch.equal(
        target(**inputs).logits[:, -1],
        target(**inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}).logits[:, -1],
    )
    assert plain.shape[1] == other.shape[1] + NEW_TOKENS - 1


def test_a_wrapper_that_leaves_the_soft_cap_out_is_not_trained_on():
    """Gemma 3's multimodal class ignores the cap that its text class applies; released configs have none."""
    fields = WRAPPERS["gemma3"][1]()
    fields["text_config"].final_logit_softcapping = 6.0
    target = spread_logits(transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**fields)).eval())
    with pytest.raises(NotImplementedError, match="Gemma3ForConditionalGeneration are not its head applied"):
        check_target_head(target)


# Families that are refused


REFUSED = {
    "gemma3n": (
        "Gemma3n",
        SLIDING
        | PER_LAYER_INPUTS
        | {"vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.0] * 4}
        | {"num_kv_shared_layers": 0},
        "pass on several residual streams",
    ),
    "llama4": (
        "Llama4",
        {"num_local_experts": 2, "intermediate_size_mlp": 48},
        r"layer types \['chunked_attention'\]",
    ),
    "deepseek_v3.2": (
        "DeepseekV32",
        LATENT_ATTENTION | ROUTED_EXPERTS | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
        r"layer types \['indexed_attention'\]",
    ),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 4}, "takes no `position_ids`"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_verified_are_refused_by_name(family):
    name, fields, message = REFUSED[family]
    config = text_config(name, fields)
    with torch.device("meta"):  # nothing runs
        target = classes(name, "ForCausalLM")[0](config)
    with pytest.raises(NotImplementedError, match=rf"{message}.* Call generate\(\) without `assistant_model`"):
        check_verifiable(target)


def test_taps_of_layers_that_are_not_there_are_refused():
    """LongCat's config counts the halves of its layers."""
    target = build("longcat_flash")
    assert target.config.num_hidden_layers == 2 * len(decoder_layers(target)) == 4
    with pytest.raises(ValueError, match=r"taps layers \[3\], but the decoder of LongcatFlash\w+ has a list of 2"):
        check_target(make_drafter(target, target_layer_ids=[1, 3]), target)


# Targets sharded or offloaded by a device map


def mapped(offloaded: tuple[str, ...], folder: Path):
    """A Qwen3 spread over a device map, every module on the CPU except those offloaded to disk."""
    from accelerate import dispatch_model

    target = make_target("qwen3")
    modules = [
        "model.embed_tokens",
        *[f"model.layers.{i}" for i in range(4)],
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    device_map = {name: "disk" if name in offloaded else "cpu" for name in modules}
    return dispatch_model(target, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize(
    "offloaded",
    [(), ("model.layers.1", "model.layers.3"), ("model.embed_tokens",)],
    ids=["nothing", "tapped layers", "embedding"],
)
def test_no_drafter_changes_the_output_of_a_target_with_a_device_map(offloaded, tmp_path):
    target = mapped(offloaded, tmp_path)
    for lengths in BATCHES.values():
        output = check_equal(target, lengths)
        undivided = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
        assert torch.equal(output, make_target("qwen3").generate(**left_padded(list(lengths)), **undivided))
    assert all(hasattr(layer, "_hf_hook") and not layer._forward_hooks for layer in decoder_layers(target))


def test_an_offloaded_head_is_refused_with_the_remedy(tmp_path):
    target = mapped(("lm_head",), tmp_path)
    with pytest.raises(
        ValueError, match="head is offloaded.* Keep 'lm_head' out of the offloaded part of the device_map"
    ):
        check_target(make_drafter(target), target)


def test_an_offloaded_embedding_cannot_lend_single_rows(tmp_path):
    target = mapped(("model.embed_tokens",), tmp_path)
    drafter = make_drafter(target, embedding_scale=2.0)
    with pytest.raises(NotImplementedError, match="scales rows of the target's embedding itself.*offloaded"):
        check_lending(drafter, target)
    check_lending(make_drafter(target), target)


def test_parts_on_two_devices_meet_where_the_drafter_is():
    """Tensors without data on two pretended GPUs: torch refuses any operation that would mix them.

    The layers, the embedding and the cache are spread as `device_map` spreads them, with the hooks of accelerate. In a
    process of its own, since the pretended device stays registered.
    """
    script = Path(__file__).parent / "reference" / "two_devices.py"
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    if "no pretended devices" in run.stdout:
        pytest.skip(f"torch {torch.__version__} has {run.stdout.strip()}")
    assert run.returncode == 0, run.stderr[-3000:]
    assert "taps, logits and draft met on pretended:1" in run.stdout


# Quantised targets


def int8_target(*, head: bool = False, config=None):
    """A Qwen3 with linear layers quantised by torchao, weights only unless a config says otherwise."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    target = make_target("qwen3")
    torchao.quantize_(
        target,
        config or torchao.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and (head or "lm_head" not in name),
    )
    return target


@all_batches
@pytest.mark.parametrize("head", [False, True], ids=["body", "body and head"])
def test_no_drafter_changes_the_output_of_int8_weights(head, lengths):
    target = int8_target(head=head)
    check_equal(target, lengths)
    exact = make_target("qwen3")
    assert type(target.lm_head.weight) is (
        type(target.model.layers[0].mlp.up_proj.weight) if head else torch.nn.Parameter
    )
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert 1e-3 < (target(ids).logits - exact(ids).logits).abs().max() < 2.0
    check_target_head(target)


def test_a_drafters_own_weights_are_not_shared_with_quantised_ones():
    target = int8_target(head=True)
    drafter = make_drafter(target, num_hidden_layers=1, has_lm_head=True, has_embedding=True)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    inputs = left_padded([5, 9])
    plain = target.generate(**inputs, max_new_tokens=8)
    assert torch.equal(target.generate(**inputs, max_new_tokens=8, assistant_model=drafter), plain)
    assert type(drafter.lm_head.weight) is torch.nn.Parameter
    assert drafter.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()


def test_rows_of_a_quantised_head_are_refused_before_the_first_forward():
    target = int8_target(head=True)
    drafter = make_drafter(target, draft_vocab_size=24)
    target.model.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    with pytest.raises(
        NotImplementedError, match="rows of the target's head, which cannot be done with a quantised head"
    ):
        target.generate(torch.arange(3, 13)[None], max_new_tokens=5, assistant_model=drafter)


def test_quantised_layers_keep_their_own_products():
    target = int8_target()
    assert can_pack(target.lm_head)
    assert not can_pack(target.model.layers[0].mlp.up_proj)


def test_activations_rounded_token_by_token_leave_only_near_ties():
    """A float32 rounding may push an activation to the next of 255 steps, so a choice within such a step may change."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    target = int8_target(head=True, config=torchao.Int8DynamicActivationInt8WeightConfig())
    check_verifiable(target)
    inputs = left_padded([5, 9, 7])
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    plain = target.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    output = target.generate(**inputs, **options, assistant_model=make_drafter(target))
    for row in range(3):
        different = (plain.sequences[row] != output[row]).nonzero()
        if len(different):
            column = int(different[0]) - 9
            best = plain.logits[column][row].topk(2).values
            assert best[0] - best[1] < 0.1  # of logits that spread over about 3


def per_tensor_activations():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = torchao.Int8DynamicActivationInt8WeightConfig(granularity=torchao.PerTensor())
    return int8_target(config=config)


def dynamic_by_torch():
    quantize = getattr(torch.ao.quantization, "quantize_dynamic", None)
    if quantize is None:
        pytest.skip(f"torch {torch.__version__} has no quantize_dynamic")
    return quantize(make_target("qwen3"), {torch.nn.Linear}, dtype=torch.qint8)


def eight_bits(threshold: float):
    """A Qwen3 whose layers are those of `load_in_8bit=True`."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    target = make_target("qwen3")
    for layer in target.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    eight = bitsandbytes.nn.Linear8bitLt(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        has_fp16_weights=False,
                        threshold=threshold,
                    )
                    eight.weight = bitsandbytes.nn.Int8Params(
                        linear.weight.data, requires_grad=False, has_fp16_weights=False
                    )
                    setattr(parent, name, eight.to("cpu").eval())
    return target


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        (
            per_tensor_activations,
            r"Layer 'model.layers.0.self_attn.q_proj' of Qwen3ForCausalLM.*granularity=PerRow\(\)",
        ),
        (dynamic_by_torch, "Quantise weights only, with torchao"),
        (lambda: eight_bits(6.0), "quantised Linear8bitLt.*llm_int8_threshold=0.0"),
    ],
    ids=["torchao per tensor", "quantize_dynamic", "LLM.int8"],
)
def test_activations_that_are_rounded_together_are_refused(quantised, message):
    target = quantised()
    drafter = make_drafter(make_target("qwen3"))
    with pytest.raises(NotImplementedError, match=f"draft tokens would change the output.*{message}|{message}"):
        target.generate(torch.arange(3, 13)[None], max_new_tokens=5, assistant_model=drafter)


def test_layers_that_are_refused_do_mix_tokens():
    """The reason for the refusal above: a large activation of one token changes the output of another."""
    for target in (per_tensor_activations(), eight_bits(6.0)):
        layer = target.model.layers[0].mlp.up_proj
        torch.manual_seed(0)
        inputs = torch.randn(1, 4, 32)
        louder = torch.cat([inputs[:, :1], 20 * inputs[:, 1:]], dim=1)
        with torch.no_grad():
            assert (layer(inputs)[:, 0] - layer(louder)[:, 0]).abs().max() > 1e-3


@all_batches
def test_no_drafter_changes_the_output_of_8_bits_without_outliers(lengths):
    target = eight_bits(0.0)
    check_quantisation(target)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    check_equal(target, lengths)


@all_batches
def test_no_drafter_changes_the_output_of_4_bit_weights(lengths, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    make_target("qwen3", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    options = {"quantization_config": bits, "dtype": torch.float32, "device_map": "cpu"}
    check_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options), lengths)
