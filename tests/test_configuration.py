"""`DSparkConfig`: made from any target, refusing impossible values by name, surviving a round trip through a file."""

import json

import pytest
from conftest import FAMILIES, VOCAB, make_target
from transformers import Gemma3Config, GPT2Config, LlamaConfig, Qwen3Config, T5Config

from dspark_hf import DSparkConfig
from dspark_hf.modeling.configuration_dspark import spread_layer_ids


# From a target


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_follows_the_target(family):
    target = make_target(family).config
    config = DSparkConfig.from_target(target, num_hidden_layers=2)
    assert config.vocab_size == config.draft_vocab_size == VOCAB
    assert config.hidden_size == config.target_hidden_size == 32
    assert config.num_target_layers == 4
    assert config.num_hidden_layers == len(config.layer_types) == 2
    assert config.num_attention_heads == 4
    assert config.num_key_value_heads == (4 if family == "gpt2" else 2)
    assert config.head_dim == 8
    assert config.intermediate_size == (128 if family == "gpt2" else 48)
    assert config.max_position_embeddings == 256
    assert config.target_model_type == target.model_type
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert all(0 <= layer < 3 for layer in config.target_layer_ids)  # never the last one
    assert 0 <= config.mask_token_id < VOCAB
    assert not config.has_embedding
    assert not config.has_lm_head
    assert config.num_block_inputs == config.block_size == 7


def test_the_rotary_base_follows_the_target_and_its_full_attention_layers():
    assert _theta(Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == 5e5
    per_type = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert _theta(Gemma3Config(text_config={"rope_parameters": per_type})) == 1e6
    assert _theta(GPT2Config()) == 1e4


def test_stretched_rotary_embeddings_of_the_target_are_not_taken_over():
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    config = DSparkConfig.from_target(LlamaConfig(rope_parameters=yarn))
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 1e6


def _theta(target_config) -> float:
    return DSparkConfig.from_target(target_config).rope_parameters["rope_theta"]


def test_a_model_with_more_than_a_decoder_gives_its_text_part():
    text = {"num_hidden_layers": 10, "hidden_size": 64, "vocab_size": 99, "head_dim": 16}
    config = DSparkConfig.from_target(Gemma3Config(text_config=text))
    assert (config.num_target_layers, config.hidden_size, config.vocab_size) == (10, 64, 99)
    assert config.target_model_type == "gemma3_text"


def test_any_field_can_be_chosen():
    target = make_target().config
    config = DSparkConfig.from_target(
        target, 3, target_layer_ids=[-1, 0, 2], block_size=3, markov_head_type="rnn", hidden_size=16,
        has_embedding=True, has_lm_head=True, first_prediction_slot=1, mask_token_id=5,
    )  # fmt: skip
    assert config.target_layer_ids == [-1, 0, 2]
    assert (config.hidden_size, config.target_hidden_size) == (16, 32)
    assert (config.block_size, config.num_block_inputs, config.mask_token_id) == (3, 4, 5)
    assert (config.num_hidden_layers, config.markov_head_type) == (3, "rnn")


def test_encoder_decoders_are_refused():
    with pytest.raises(ValueError, match="decoder-only targets; 't5' is an encoder-decoder"):
        DSparkConfig.from_target(T5Config())


# Taps


@pytest.mark.parametrize(
    ("num_target_layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # deepseek-ai/dspark_qwen3_4b_block7 and _8b_
        (40, 5, [1, 10, 19, 28, 37]),  # _14b_
        (6, 3, [1, 2, 3]),
        (5, 5, [1, 2]),
        (4, 5, [1]),
        (3, 5, [0]),
        (2, 5, [0]),
        (1, 5, [0]),
        (36, 1, [17]),
    ],
)
def test_taps_are_spread_over_the_depth_as_in_the_released_drafters(num_target_layers, count, expected):
    assert spread_layer_ids(num_target_layers, count) == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_taps_are_distinct_rise_and_leave_out_the_last_layer(count):
    for num_target_layers in range(1, 65):
        ids = spread_layer_ids(num_target_layers, count)
        assert ids == sorted(set(ids))
        assert 1 <= len(ids) <= count
        # A target of one layer has no other to tap.
        assert all(0 <= layer < max(num_target_layers - 1, 1) for layer in ids)


# Impossible values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "`block_size` must be a positive whole number, got 0"),
        ({"block_size": 4.5}, "`block_size` must be a positive whole number, got 4.5"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` must be a positive whole number, got True"),
        ({"vocab_size": "49152"}, "`vocab_size` must be a positive whole number, got '49152'"),
        ({"block_size": 65, "max_position_embeddings": 64}, r"max_position_embeddings = 64\], got 65"),
        ({"target_layer_ids": [1, 12]}, r"in \[-1, 11\] of the target .* got \[1, 12\]"),
        ({"target_layer_ids": [-3]}, r"got \[-3\]"),
        ({"num_target_layers": None}, r"`target_layer_ids` must name layers in \[-1, its last\] .* got \[\]"),
        ({"backbone": "llama"}, "`backbone` must be one of .* got 'llama'"),
        ({"causal_layer_types": ["sliding"]}, "`causal_layer_types` must name some of"),
        ({"attention_k_eq_v": True}, "`attention_k_eq_v` is for the layers of backbone 'gemma4'"),
        ({"target_layer_ids": []}, r"`target_layer_ids` must name layers"),
        ({"first_prediction_slot": 2}, "`first_prediction_slot` must be 0 or 1, got 2"),
        ({"markov_head_type": "lstm"}, "`markov_head_type` must be one of .* got 'lstm'"),
        ({"markov_rank": -1}, "`markov_rank` must be 0 .* got -1"),
        ({"markov_rank": 0}, "confidence head with the Markov feature needs `markov_rank` > 0"),
        ({"draft_vocab_size": 0}, r"`draft_vocab_size` must lie in \[1, vocab_size = 32000\], got 0"),
        ({"draft_vocab_size": 32001}, "`draft_vocab_size` must lie in .* got 32001"),
        ({"mask_token_id": 32000}, r"`mask_token_id` must lie in \[0, vocab_size = 32000\), got 32000"),
        ({"mask_token_id": -1}, "`mask_token_id` must lie in"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must give one of .* for each of the 5 draft layers"),
        ({"layer_types": ["linear_attention"] * 5}, "`layer_types` must give one of .* got"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding layers need a positive `sliding_window`, got None"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 0}, "`sliding_window`, got 0"),
        ({"confidence_temperatures": [1.0]}, "`confidence_temperatures` must give 7 positive numbers"),
        ({"confidence_temperatures": [1.0] * 6 + [0.0]}, "`confidence_temperatures` must give 7 positive numbers"),
        ({"target_hidden_size": 64}, "width 512 cannot borrow the embedding or head of a target of width 64"),
        ({"target_hidden_size": 64, "has_embedding": True}, "set `has_embedding=True` and `has_lm_head=True`"),
    ],
)
def test_impossible_values_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 64, "max_position_embeddings": 64},
        {"target_layer_ids": [-1, 11]},
        {"target_layer_ids": [-2]},
        {"target_layer_ids": [60], "num_target_layers": None},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"mask_token_id": 31999},
        {"draft_vocab_size": 1},
        {"confidence_temperatures": [0.5] * 7},
        {"target_hidden_size": 64, "has_embedding": True, "has_lm_head": True},
        {"layer_types": ["sliding_attention"] * 5, "sliding_window": 1},
    ],
)
def test_values_at_the_edge_are_accepted(fields):
    DSparkConfig(**fields)


# Files

UNUSUAL = {
    "vocab_size": 101,
    "draft_vocab_size": 77,
    "backbone": "gemma4",
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "zero_centered_norms": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
    "rope_interleaved": True,
    "max_position_embeddings": 99,
    "attention_bias": True,
    "attention_dropout": 0.25,
    "qk_norm": False,
    "attention_k_eq_v": True,
    "attention_gate": True,
    "attention_sinks": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 17,
    "window_from_anchor": True,
    "causal_layer_types": ["full_attention"],
    "target_hidden_size": 56,
    "num_target_layers": 9,
    "target_layer_ids": [-1, 3, 3],
    "normed_last_tap": True,
    "block_size": 3,
    "first_prediction_slot": 1,
    "mask_token_id": 100,
    "markov_rank": 5,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "confidence_temperatures": [0.7, 1.0, 2.5],
    "confidence_calibration": {"do_sample": True, "temperature": 0.8, "rounds": 900},
    "has_embedding": True,
    "has_lm_head": True,
    "embedding_scale": 2.5,
    "final_logit_softcapping": 30.0,
    "target_model_type": "llama",
    "target_name": "org/target",
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 4,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
}


def test_every_field_survives_a_file(tmp_path):
    own_fields = {name for name in vars(DSparkConfig)["__annotations__"] if name != "model_type"}
    assert own_fields == set(UNUSUAL)  # a new field belongs in this test
    DSparkConfig(**UNUSUAL).save_pretrained(tmp_path)
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in UNUSUAL} == UNUSUAL


def test_the_file_names_the_type_and_the_published_modules(tmp_path):
    DSparkConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "dspark"
    assert saved["auto_map"]["AutoConfig"] == "configuration_dspark.DSparkConfig"
    assert (tmp_path / "configuration_dspark.py").exists()


def test_impossible_values_in_a_file_are_refused(tmp_path):
    DSparkConfig().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_size": 0}))
    with pytest.raises(ValueError, match="`block_size` must be a positive"):
        DSparkConfig.from_pretrained(tmp_path)
