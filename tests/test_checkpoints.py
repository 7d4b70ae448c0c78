"""Foreign checkpoints: the released layout loads as published, and everything that does not add up is refused by name."""

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import READERS
from dspark_hf.modeling.modeling_dspark import CHECKPOINT_READERS


CASES = ["deepspec-qwen3-vanilla", "deepspec-qwen3-rnn"]


class Checkpoint:
    """A copy of a released drafter that tests may spoil."""

    def __init__(self, folder, source=GOLDEN / CASES[0] / "drafter"):
        self.folder = folder
        shutil.copytree(source, folder)

    @property
    def weights(self):
        return load_file(self.folder / "model.safetensors")

    def save(self, weights) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            self.folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    def change_weights(self, drop=(), **new) -> None:
        weights = {name: tensor for name, tensor in self.weights.items() if name not in drop}
        self.save(weights | new)

    def change_config(self, drop=(), **new) -> None:
        path = self.folder / "config.json"
        config = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
        path.write_text(json.dumps(config | new))

    def load(self, **kwargs) -> DSparkDraftModel:
        return DSparkDraftModel.from_pretrained(self.folder, **kwargs)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path / "drafter")


# As published


@pytest.mark.parametrize("case", CASES)
def test_the_released_layout_loads_with_every_weight_unchanged(case):
    folder = GOLDEN / case / "drafter"
    drafter, info = DSparkDraftModel.from_pretrained(folder, output_loading_info=True)
    published, state = load_file(folder / "model.safetensors"), drafter.state_dict()
    assert set(published) == set(state)
    assert all(torch.equal(published[name], state[name]) for name in published)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not drafter.training


@pytest.mark.parametrize("case", CASES)
def test_the_config_says_what_the_published_one_says(case):
    folder = GOLDEN / case / "drafter"
    published = json.loads((folder / "config.json").read_text())
    config = DSparkDraftModel.from_pretrained(folder).config
    assert config.model_type == "dspark"
    assert config.target_model_type == "qwen3"
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "layer_types", "block_size",
        "target_layer_ids", "num_target_layers", "mask_token_id", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "attention_bias",
    ):  # fmt: skip
        assert getattr(config, name) == published[name], name
    assert config.rope_parameters["rope_theta"] == published["rope_parameters"]["rope_theta"]
    assert config.first_prediction_slot == 0
    assert config.qk_norm
    assert config.has_embedding
    assert config.has_lm_head
    assert not config.block_is_causal


def test_the_attention_that_training_used_is_not_taken_over(checkpoint):
    """Released configs may say flex_attention."""
    checkpoint.change_config(_attn_implementation="flex_attention", attn_implementation="flex_attention")
    assert checkpoint.load().config._attn_implementation == "sdpa"


def test_a_checkpoint_loads_in_the_dtype_asked_for(checkpoint):
    assert checkpoint.load(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert checkpoint.load().dtype == torch.float32


def test_a_loaded_checkpoint_can_be_saved_in_this_packages_own_layout(checkpoint, tmp_path):
    drafter = checkpoint.load()
    drafter.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "dspark"
    again = DSparkDraftModel.from_pretrained(tmp_path / "own")
    assert again.config.to_dict().keys() == drafter.config.to_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_drafter_without_sequential_and_confidence_head_loads(checkpoint):
    """`deepseek-ai/dflash_qwen3_*_block7` has the same class name with rank 0 and no confidence head."""
    heads = [name for name in checkpoint.weights if name.startswith(("markov_head", "confidence_head"))]
    checkpoint.change_weights(drop=heads)
    checkpoint.change_config(
        drop=["confidence_head_with_markov", "markov_head_type"], markov_rank=0, enable_confidence_head=False
    )
    drafter = checkpoint.load()
    assert (drafter.config.markov_rank, drafter.markov_head, drafter.confidence_head) == (0, None, None)
    assert drafter.config.first_prediction_slot == 0


def test_a_confidence_head_without_the_markov_feature_is_known_by_its_width(checkpoint):
    width = checkpoint.weights["confidence_head.proj.weight"][:, :64]
    checkpoint.change_weights(**{"confidence_head.proj.weight": width})
    checkpoint.change_config(confidence_head_with_markov=False)
    assert not checkpoint.load().config.confidence_head_with_markov


def test_embedding_and_head_are_borrowed_where_the_file_has_none(checkpoint):
    checkpoint.change_weights(drop=["embed_tokens.weight", "lm_head.weight"])
    config = checkpoint.load().config
    assert not config.has_embedding
    assert not config.has_lm_head


def test_attention_without_norms_is_known_by_its_tensors(checkpoint):
    checkpoint.change_weights(drop=[name for name in checkpoint.weights if "q_norm" in name or "k_norm" in name])
    assert not checkpoint.load().config.qk_norm


def test_sliding_layers_keep_their_window(checkpoint):
    checkpoint.change_config(layer_types=["sliding_attention", "full_attention"], sliding_window=11)
    config = checkpoint.load().config
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 11


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": None},
    ],
)
def test_the_rotary_base_is_read_in_old_and_new_form(checkpoint, fields):
    checkpoint.change_config(drop=["rope_parameters"], **fields)
    rope = checkpoint.load().config.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"]) == (5e5, "default")


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn"} | YARN},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn"} | YARN},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn"} | YARN},
    ],
)
def test_a_stretched_rotary_embedding_is_read_in_old_and_new_form(checkpoint, fields):
    """The reference builds it from the drafter's own config, so it is part of the drafter."""
    plain = checkpoint.load().rotary_emb.inv_freq
    checkpoint.change_config(drop=["rope_parameters"], **fields)
    drafter = checkpoint.load()
    rope = drafter.config.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (5e5, "yarn", 4.0)
    assert drafter.rotary_emb.attention_scaling > 1.0
    assert not torch.equal(drafter.rotary_emb.inv_freq, plain)


def test_sharded_safetensors_with_an_index_load(checkpoint):
    weights, names = checkpoint.weights, sorted(checkpoint.weights)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, checkpoint.folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (checkpoint.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint.folder / "model.safetensors").unlink()
    state = checkpoint.load().state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in names)


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
    ["layers.2.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias", "markov_head.gate_proj.weight", "d2t", "x"],
)
def test_a_left_over_weight_fails_the_load_by_name(checkpoint, key):
    checkpoint.change_weights(**{key: torch.zeros(3)})
    with pytest.raises(ValueError, match=f"unexpected keys: {key}"):
        checkpoint.load()


@pytest.mark.parametrize(
    "key",
    ["fc.weight", "norm.weight", "layers.1.mlp.up_proj.weight", "markov_head.markov_w2.weight", "lm_head.weight"],
)
def test_a_weight_of_another_shape_fails_the_load_by_name(checkpoint, key):
    checkpoint.change_weights(**{key: checkpoint.weights[key][:-1]})
    with pytest.raises(ValueError, match=f"mismatched keys: .*{key}"):
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


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "num_target_layers", "target_layer_ids"])
def test_a_missing_field_is_named(checkpoint, field):
    checkpoint.change_config(drop=[field])
    with pytest.raises(ValueError, match=rf"needs the config fields \['{field}'\]"):
        checkpoint.load()


def test_a_missing_field_that_gives_a_shape_fails_the_load(checkpoint):
    checkpoint.change_config(drop=["num_attention_heads"])
    with pytest.raises(ValueError, match=r"mismatched keys: .*layers\.0\.self_attn\.q_proj"):
        checkpoint.load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": [0, 2, 6]}, r"layers in \[-1, 5\] of a target with 6 layers"),
        ({"block_size": 0}, "`block_size` must lie in"),
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


# Other packagings


@pytest.mark.parametrize(
    "config",
    [
        {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 8},
        {"model_type": "qwen3", "architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
        {"model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"], "block_size": 5},
        {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]},
        Qwen3Config(architectures=["Qwen3ForCausalLM"]).to_dict(),
        LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict(),
        Gemma3TextConfig(architectures=["Gemma3ForCausalLM"]).to_dict(),
        {},
    ],
)
def test_other_packagings_are_refused_by_name(checkpoint, config):
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not a DSpark drafter that can be read") as error:
        checkpoint.load()
    assert repr(config.get("model_type")) in str(error.value)
    assert str(config.get("architectures")) in str(error.value)


@pytest.mark.parametrize(
    "field",
    ["dflash_config", "speculators_model_type", "projector_type", "enable_qwen35_gated_q_proj"],
)
def test_a_marker_of_another_packaging_is_not_read_as_the_released_layout(checkpoint, field):
    """Files that carry both names mean different things by the same fields."""
    checkpoint.change_config(**{field: "something"})
    with pytest.raises(ValueError, match="is not a DSpark drafter that can be read"):
        checkpoint.load()


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_from_anchor": False},
        {"dflash_query_causal": True},
        {"attention_sink_bias": True},
        {"draft_vocab_size": 96},
    ],
)
def test_fields_that_change_the_computation_are_not_ignored(checkpoint, fields):
    checkpoint.change_config(**fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
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


# Our own layout


@pytest.mark.parametrize(
    "overrides", [{}, {"draft_vocab_size": 20, "has_lm_head": True}, {"markov_head_type": "gated"}]
)
def test_our_own_layout_is_checked_as_strictly(tmp_path, overrides):
    make_drafter(make_target(), **overrides).save_pretrained(tmp_path / "saved")
    for name in load_file(tmp_path / "saved" / "model.safetensors"):
        checkpoint = Checkpoint(tmp_path / name, tmp_path / "saved")
        checkpoint.change_weights(drop=[name])
        with pytest.raises(ValueError, match=f"missing keys: {name}"):
            checkpoint.load()
    checkpoint.change_weights(
        stray=torch.zeros(1), **{name: load_file(tmp_path / "saved" / "model.safetensors")[name]}
    )
    with pytest.raises(ValueError, match="unexpected keys: stray"):
        checkpoint.load()
