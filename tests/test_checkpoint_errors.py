"""Checkpoints that do not add up, and packagings that are not known: each is refused by name."""

import json

import pytest
import torch
from checkpoint_copies import CASES, Checkpoint
from conftest import GOLDEN
from safetensors.torch import load_file
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import READERS
from dspark_hf.modeling.modeling_dspark import CHECKPOINT_READERS


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path / "drafter")


# Weights that do not add up

KEYS = sorted(load_file(GOLDEN / CASES[1] / "drafter" / "model.safetensors"))
OPTIONAL = {"embed_tokens.weight", "lm_head.weight"}
"""What a drafter may borrow from the target."""


@pytest.mark.parametrize("key", [key for key in KEYS if key not in OPTIONAL])
def test_a_missing_weight_fails_the_load_by_name(tmp_path, key):
    checkpoint = Checkpoint(tmp_path / "drafter", GOLDEN / CASES[1] / "drafter")
    checkpoint.change_weights(drop=[key])
    # A name that decides whether a part exists is missed through what is left of that part, or what the config says.
    named = {
        "markov_head.markov_w1.weight": "markov_rank 8, the tensors say 0",
        "layers.0.self_attn.q_norm.weight": "unexpected keys: layers.0.self_attn.k_norm.weight",
        "confidence_head.proj.weight": "confidence",
    }.get(key, f"missing keys: .*{key}")
    with pytest.raises(ValueError, match=named):
        checkpoint.load()


@pytest.mark.parametrize(
    "key",
    ["layers.1.mlp.up_proj.bias", "layers.1.self_attn.q_proj.bias", "markov_head.gate_proj.weight", "d2t", "x"],
)
def test_a_left_over_weight_fails_the_load_by_name(checkpoint, key):
    checkpoint.change_weights(**{key: torch.zeros(3)})
    with pytest.raises(ValueError, match=f"unexpected keys: {key}"):
        checkpoint.load()


@pytest.mark.parametrize(
    "key",
    [
        "norm.weight",
        "hidden_norm.weight",
        "layers.1.mlp.up_proj.weight",
        "lm_head.weight",
        "confidence_head.proj.weight",
    ],
)
def test_a_weight_of_another_shape_fails_the_load_by_name(checkpoint, key):
    weight = checkpoint.weights[key]
    checkpoint.change_weights(**{key: weight[:, :-1] if len(weight) == 1 else weight[:-1]})
    with pytest.raises(ValueError, match=f"mismatched keys: .*{key}"):
        checkpoint.load()


CONTRADICTING = {
    "fc.weight": ((63, 192), "hidden_size 64, the tensors say 63"),
    "layers.0.mlp.up_proj.weight": ((111, 64), "intermediate_size 112, the tensors say 111"),
    "layers.2.mlp.up_proj.weight": ((112, 64), "num_hidden_layers 2, the tensors say 3"),
    "layers.0.self_attn.k_proj.weight": ((64, 64), "num_key_value_heads 2, the tensors say 4"),
    "layers.0.self_attn.q_norm.weight": ((32,), "num_attention_heads 4, the tensors say 2"),
    "layers.0.self_attn.q_proj.weight": ((128, 64), "mismatched keys: .*layers.1.self_attn.q_proj.weight"),
    "layers.0.self_attn.q_proj.bias": ((64,), "attention_bias False, the tensors say True"),
    "layers.0.self_attn.attention_sink_bias": ((4,), "missing keys: layers.1.self_attn.attention_sink_bias"),
    "markov_head.markov_w1.weight": ((127, 8), "vocab_size 128, the tensors say 127"),
    "markov_head.markov_w2.weight": ((127, 8), "missing keys: d2t; mismatched keys: .*lm_head.weight"),
}


@pytest.mark.parametrize("key", CONTRADICTING)
def test_a_weight_that_gives_a_field_must_agree_with_config_and_other_weights(checkpoint, key):
    shape, message = CONTRADICTING[key]
    checkpoint.change_weights(**{key: torch.zeros(shape)})
    with pytest.raises(ValueError, match=message):
        checkpoint.load()


def test_taps_that_do_not_fit_the_config_fail_the_load(checkpoint):
    checkpoint.change_config(target_layer_ids=[0, 2])
    with pytest.raises(ValueError, match="mismatched keys: .*fc.weight"):
        checkpoint.load()


def test_both_heads_missing_without_a_word_in_the_config_is_no_silent_change(checkpoint):
    checkpoint.change_weights(drop=["confidence_head.proj.weight", "confidence_head.proj.bias"])
    with pytest.raises(ValueError, match="enable_confidence_head True, the tensors say False"):
        checkpoint.load()


def test_a_confidence_head_that_the_config_denies_is_no_silent_change(checkpoint):
    checkpoint.change_config(enable_confidence_head=False)
    with pytest.raises(ValueError, match="enable_confidence_head False, the tensors say True"):
        checkpoint.load()


@pytest.mark.parametrize("rank", [0, 4, 256])
def test_a_rank_that_contradicts_the_tensors_is_refused(checkpoint, rank):
    checkpoint.change_config(markov_rank=rank)
    with pytest.raises(ValueError, match=f"config says markov_rank {rank}, the tensors say 8"):
        checkpoint.load()


def test_a_head_type_that_contradicts_the_tensors_is_refused(checkpoint):
    checkpoint.change_config(markov_head_type="rnn")
    with pytest.raises(ValueError, match="missing keys: markov_head.joint_proj.bias, markov_head.joint_proj.weight"):
        checkpoint.load()


def test_an_unknown_head_type_is_refused(checkpoint):
    checkpoint.change_config(markov_head_type="transformer")
    with pytest.raises(ValueError, match="`markov_head_type` must be one of .* got 'transformer'"):
        checkpoint.load()


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_missing_field_is_named(checkpoint, field):
    checkpoint.change_config(drop=[field])
    with pytest.raises(ValueError, match=rf"needs the config fields \['{field}'\]"):
        checkpoint.load()


def test_fields_that_the_weights_give_may_be_missing(checkpoint):
    expected = checkpoint.load().config.to_dict()
    checkpoint.change_config(
        drop=[
            "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size",
            "num_hidden_layers", "markov_rank", "enable_confidence_head", "confidence_head_with_markov", "layer_types",
        ]
    )  # fmt: skip
    assert checkpoint.load().config.to_dict() == expected


def test_the_depth_of_the_target_may_be_missing(checkpoint):
    checkpoint.change_config(drop=["num_target_layers"])
    assert checkpoint.load().config.num_target_layers is None


def test_what_neither_config_nor_weights_say_is_asked_for(checkpoint):
    checkpoint.change_weights(drop=[name for name in checkpoint.weights if "q_norm" in name or "k_norm" in name])
    checkpoint.change_config(drop=["head_dim", "num_attention_heads"])
    with pytest.raises(ValueError, match="how wide a head is: add `head_dim`"):
        checkpoint.load()


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
)
def test_a_field_that_contradicts_the_weights_is_refused(checkpoint, name):
    checkpoint.change_config(**{name: 32})
    with pytest.raises(ValueError, match=f"config says {name} 32, the tensors say"):
        checkpoint.load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": [0, 2, 6]}, r"layers in \[-1, 5\] of the target"),
        ({"block_size": 0}, "`block_size` must be a positive whole number"),
        ({"mask_token_id": 128}, "`mask_token_id` must lie in"),
    ],
)
def test_impossible_fields_are_refused(checkpoint, fields, message):
    checkpoint.change_config(**fields)
    with pytest.raises(ValueError, match=message):
        checkpoint.load()


# Quantised and pickled weights


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused_by_name(checkpoint, dtype):
    name = "layers.1.mlp.up_proj.weight"
    checkpoint.change_weights(**{name: torch.zeros(112, 64).to(dtype)})
    with pytest.raises(ValueError, match=rf"quantised drafter weights: {name} \(\w+\).* unquantised"):
        checkpoint.load()


@pytest.mark.parametrize("suffix", [".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros", ".weight_packed"])
def test_tensors_that_go_with_quantised_weights_are_refused_by_name(checkpoint, suffix):
    checkpoint.change_weights(**{f"layers.1.mlp.up_proj{suffix}": torch.ones(1)})
    with pytest.raises(ValueError, match=f"layers.1.mlp.up_proj{suffix}"):
        checkpoint.load()


def test_pickled_weights_are_refused(checkpoint):
    torch.save(checkpoint.weights, checkpoint.folder / "pytorch_model.bin")
    (checkpoint.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors.* safetensors only; pickled weights can run code"):
        checkpoint.load()


def test_pickled_weights_are_refused_when_asked_for(checkpoint):
    torch.save(checkpoint.weights, checkpoint.folder / "pytorch_model.bin")
    (checkpoint.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors only"):
        checkpoint.load(use_safetensors=False)


def test_asking_for_safetensors_is_fine(checkpoint):
    assert checkpoint.load(use_safetensors=True).config.block_size == 5


def test_a_shard_that_is_missing_is_named(checkpoint):
    index = {"metadata": {}, "weight_map": dict.fromkeys(checkpoint.weights, "model-00001-of-00001.safetensors")}
    (checkpoint.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has no model-00001-of-00001.safetensors"):
        checkpoint.load()


@pytest.mark.parametrize("size", [0, 1000])
def test_a_file_that_was_cut_off_is_named(checkpoint, size):
    file = checkpoint.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="model.safetensors is no whole safetensors file"):
        checkpoint.load()


# Other packagings


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "architectures": ["MiniMaxM3DSparkModel"], "block_size": 8},
        Qwen3Config(architectures=["Qwen3ForCausalLM"]).to_dict(),
        LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict(),
        Gemma3TextConfig(architectures=["Gemma3ForCausalLM"]).to_dict(),
        {},
    ],
)
def test_unknown_packagings_are_refused_by_name(checkpoint, config):
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not a DSpark drafter that can be read") as error:
        checkpoint.load()
    assert repr(config.get("model_type")) in str(error.value)
    assert str(config.get("architectures")) in str(error.value)


@pytest.mark.parametrize(
    ("config", "packaging"),
    [
        (
            {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 8},
            "speculators dspark",
        ),
        ({"model_type": "qwen3", "architectures": ["DSparkDraftModel"]}, "SpecForge"),
        ({"model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}}, "SpecForge"),
        ({"model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"], "block_size": 5}, "DeepSpec Gemma 4"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "z-lab DFlash"),
        ({"model_type": "qwen3", "architectures": ["Lfm2DSparkDraftModel"]}, "LiquidAI"),
        ({"model_type": "qwen3_5", "architectures": ["Qwen35DSparkModel"]}, "Ornith"),
    ],
)
def test_a_config_without_the_fields_of_its_packaging_is_refused_by_name(checkpoint, config, packaging):
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{packaging}.* drafter needs the config fields .*'mask_token_id'"):
        checkpoint.load()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"speculators_model_type": "dspark"}, ValueError, "speculators dspark drafter needs the config fields"),
        ({"speculators_model_type": "something"}, NotImplementedError, "kind 'something'"),
        ({"projector_type": "something"}, NotImplementedError, "projector_type 'something'"),
        ({"dflash_config": {"projector_type": "something"}}, NotImplementedError, "projector_type 'something'"),
        ({"enable_qwen35_gated_q_proj": True}, ValueError, "config says attention_gate True, the tensors say False"),
    ],
)
def test_a_marker_of_another_packaging_is_not_read_as_the_released_layout(checkpoint, fields, error, message):
    """Files that carry both names mean different things by the same fields."""
    checkpoint.change_config(**fields)
    with pytest.raises(error, match=message):
        checkpoint.load()


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"sample_from_anchor": False}, {"first_prediction_slot": 1, "block_size": 4}),
        ({"dspark_bonus_anchor": True}, {"first_prediction_slot": 1, "block_size": 4}),
        ({"dflash_query_causal": True}, {"causal_layer_types": ["full_attention", "sliding_attention"]}),
        ({"is_causal": True}, {"causal_layer_types": ["full_attention", "sliding_attention"]}),
        ({"rope_is_neox_style": False}, {"rope_interleaved": True}),
        ({"use_swa": True, "swa_window_size": 9}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}),
    ],
)
def test_fields_that_change_the_computation_are_read(checkpoint, fields, read):
    checkpoint.change_config(**fields)
    config = checkpoint.load().config
    assert {name: getattr(config, name) for name in read} == read


@pytest.mark.parametrize("fields", [{"attention_sink_bias": True}, {"draft_vocab_size": 96}, {"has_lm_head": False}])
def test_fields_that_need_weights_are_not_ignored(checkpoint, fields):
    checkpoint.change_config(**fields)
    (value,) = fields.values()
    with pytest.raises(ValueError, match=f"config says .* {value}, the tensors say"):
        checkpoint.load()


def test_a_target_is_refused_as_a_drafter():
    with pytest.raises(ValueError, match=r"model_type 'qwen3', architectures \['Qwen3ForCausalLM'\]"):
        DSparkDraftModel.from_pretrained(GOLDEN / CASES[0] / "target")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises((ValueError, OSError), match="safetensors|config.json"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_the_package_fills_the_registry_of_the_published_file():
    assert CHECKPOINT_READERS == READERS


def test_the_published_file_alone_says_what_would_read_more(checkpoint, monkeypatch):
    monkeypatch.setattr("dspark_hf.modeling.modeling_dspark.CHECKPOINT_READERS", [])
    with pytest.raises(ValueError, match="`import dspark_hf` reads more packagings"):
        checkpoint.load()
