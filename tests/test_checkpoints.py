"""Foreign checkpoints: the released layout loads as published. `test_checkpoint_errors.py` has what is refused."""

import json

import pytest
import torch
from checkpoint_copies import CASES, Checkpoint
from conftest import GOLDEN, make_drafter, make_target
from safetensors.torch import load_file, save_file

from dspark_hf import DSparkDraftModel


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
    assert config.causal_layer_types == []


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
    assert config.causal_layer_types == ["sliding_attention"]  # unless the config denies it, as engines read it


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


def test_fields_of_the_config_can_be_given(checkpoint):
    drafter = checkpoint.load(first_prediction_slot=1, block_size=4)
    assert (drafter.config.first_prediction_slot, drafter.config.block_size) == (1, 4)
    assert drafter.config.num_block_inputs == checkpoint.load().config.num_block_inputs
    with pytest.raises(ValueError, match="`first_prediction_slot` must be 0 or 1, got 2"):
        checkpoint.load(first_prediction_slot=2)


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
