"""Conversion: our drafters in other layouts and back, exactly; what a layout cannot say is refused by name."""

import json
import logging

import pytest
import torch
from conftest import GOLDEN, make_drafter, make_target, shared_target
from safetensors.torch import load_file

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.checkpoints.deepspec import read
from dspark_hf.checkpoints.writers import NOT_OF_THE_WEIGHTS, to_deepspec, to_speculators
from dspark_hf.cli import main


OWN = {"has_embedding": True, "has_lm_head": True}
EVERYWHERE = {
    "plain": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank 0": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence without the Markov feature": {"confidence_head_with_markov": False},
    "slot 1": {"first_prediction_slot": 1},
    "embedding tap": {"target_layer_ids": [-1, 0]},
    "biases, no norms": {"attention_bias": True, "qk_norm": False},
    "fields of its training": {"initializer_range": 0.01, "attention_dropout": 0.1},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
CASES = {
    "deepspec": EVERYWHERE
    | {
        "sliding": SLIDING,
        "sliding, causal": SLIDING | {"causal_layer_types": ["sliding_attention"]},
        "causal": {"causal_layer_types": ["full_attention", "sliding_attention"]},
        "sinks": {"attention_sinks": True},
        "gemma 4": {
            "backbone": "gemma4",
            "attention_k_eq_v": True,
            "embedding_scale": 32**0.5,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "speculators": EVERYWHERE
    | {
        "reduced vocabulary": {"draft_vocab_size": 20},
        "reduced vocabulary, own head": {"draft_vocab_size": 20, "has_lm_head": True},
        "sliding": SLIDING | {"window_from_anchor": True},
        "sliding, causal": SLIDING | {"window_from_anchor": True, "causal_layer_types": ["sliding_attention"]},
        "last layer": {"target_layer_ids": [0, 1]},
    },
}
PAIRS = [(layout, name) for layout, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    shared_target().save_pretrained(folder)
    return folder


def saved(folder, **overrides) -> DSparkDraftModel:
    drafter = make_drafter(shared_target(), **overrides)
    if drafter.kept_token_ids is not None:
        drafter.d2t.copy_(2 * torch.arange(len(drafter.d2t)))
    drafter.save_pretrained(folder)
    return drafter


def convert(capsys, *arguments) -> str:
    status = main(["convert", *map(str, arguments)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def refusal(capsys, *arguments) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_there_and_back_is_exact(tmp_path, target_folder, capsys, layout, name):
    drafter = saved(tmp_path / "mine", **CASES[layout][name])
    command = convert(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", layout, "--target", target_folder)
    assert str(tmp_path / "theirs") in command
    assert str(target_folder) in command
    convert(capsys, tmp_path / "theirs", tmp_path / "again")
    again = DSparkDraftModel.from_pretrained(tmp_path / "again")
    state = again.state_dict()
    lent = {
        "embed_tokens.weight": shared_target().get_input_embeddings().weight,
        "lm_head.weight": shared_target().get_output_embeddings().weight,
    }
    for key, tensor in state.items():
        expected = drafter.state_dict().get(key, lent.get(key))
        assert torch.equal(tensor, expected), key
        assert tensor.dtype == expected.dtype, key
    assert set(drafter.state_dict()) <= set(state)
    for field in set(DSparkConfig.__annotations__) - set(NOT_OF_THE_WEIGHTS):
        assert getattr(drafter.config, field) == getattr(again.config, field), field


@pytest.mark.parametrize("case", ["deepspec-qwen3-vanilla", "deepspec-qwen3-rnn", "deepspec-gemma4-vanilla"])
def test_a_published_drafter_comes_back_tensor_by_tensor(tmp_path, capsys, case):
    convert(capsys, GOLDEN / case / "drafter", tmp_path / "mine")
    command = convert(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", "deepspec")
    assert "sglang.launch_server" in command
    published, written = (load_file(f / "model.safetensors") for f in (GOLDEN / case / "drafter", tmp_path / "theirs"))
    assert published.keys() == written.keys()
    assert all(torch.equal(published[name], written[name]) for name in published)
    configs = [json.loads((f / "config.json").read_text()) for f in (GOLDEN / case / "drafter", tmp_path / "theirs")]
    for name in ("architectures", "model_type", "block_size", "target_layer_ids", "mask_token_id", "markov_rank"):
        assert configs[0][name] == configs[1][name], name


def test_a_drafter_of_the_speculators_library_comes_back(tmp_path, capsys):
    source = GOLDEN / "speculators-anchor-d2t" / "drafter"
    convert(capsys, source, tmp_path / "mine")
    command = convert(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", "speculators", "--target", "org/target")
    assert command.startswith('vllm serve org/target --speculative-config \'{"method": "dspark"')
    assert '"num_speculative_tokens": 6' in command
    published, written = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "theirs"))
    assert published.keys() == written.keys()
    assert all(torch.equal(published[name], written[name]) for name in published)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "theirs"))
    for name in ("speculators_model_type", "aux_hidden_state_layer_ids", "block_size", "sample_from_anchor"):
        assert before[name] == after[name], name


REFUSED = {
    ("deepspec", "reduced vocabulary"): ({"draft_vocab_size": 20}, "no reduced vocabulary.* 'speculators'"),
    ("deepspec", "interleaved"): ({"rope_interleaved": True}, "cannot say .* rope_interleaved=True"),
    ("deepspec", "norms around zero"): ({"zero_centered_norms": True}, "zero_centered_norms=True"),
    ("deepspec", "causal full layers alone"): (
        SLIDING | {"causal_layer_types": ["full_attention"]},
        "causal_layer_types",
    ),
    ("deepspec", "raw last tap"): ({"target_layer_ids": [0, 1]}, "after the final norm"),
    ("deepspec", "final norm"): ({"target_layer_ids": [0, -2]}, "names layers alone"),
    ("deepspec", "own embedding, scaled"): ({"embedding_scale": 2.0, "has_embedding": True}, "embedding_scale=2.0"),
    ("deepspec", "gemma 4, unscaled"): (
        {"backbone": "gemma4", "attention_k_eq_v": True, "hidden_act": "gelu_pytorch_tanh"},
        "reads its target's otherwise",
    ),
    ("deepspec", "gemma 4, own embedding, unscaled"): (
        {"backbone": "gemma4", "attention_k_eq_v": True, "hidden_act": "gelu_pytorch_tanh", "has_embedding": True},
        "embedding_scale=None",
    ),
    ("speculators", "scaled embedding"): ({"embedding_scale": 2.0}, "embedding_scale=2.0"),
    ("speculators", "window from the query"): (SLIDING, "window_from_anchor=False"),
    ("speculators", "normed last tap"): (
        {"target_layer_ids": [0, 1], "normed_last_tap": True},
        "before the final norm",
    ),
    ("speculators", "final norm"): ({"target_layer_ids": [0, -2]}, "before the final norm"),
    ("speculators", "sinks"): ({"attention_sinks": True}, "attention_sinks"),
    ("speculators", "causal full layers"): ({"causal_layer_types": ["full_attention"]}, "causal_layer_types"),
    ("speculators", "soft cap"): ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
}


@pytest.mark.parametrize("key", REFUSED, ids=" ".join)
def test_what_a_layout_cannot_say_is_refused_by_name(key):
    layout, (overrides, message) = key[0], REFUSED[key]
    drafter = make_drafter(shared_target(), **overrides)
    with pytest.raises(NotImplementedError, match=message):
        to_deepspec(drafter, shared_target()) if layout == "deepspec" else to_speculators(drafter, "org/target")


@pytest.mark.parametrize(("family", "scale"), [("gemma3", None), ("gemma3", 1.0), ("llama", 1.0), ("llama", 3.0)])
def test_a_lent_embedding_is_written_as_the_drafter_reads_it(family, scale):
    target = make_target(family)
    drafter = make_drafter(target, embedding_scale=scale)
    exported = to_deepspec(drafter, target)
    shapes = {name: ("F32", tuple(tensor.shape)) for name, tensor in exported.tensors.items()}
    again = DSparkDraftModel(read(exported.config, shapes).config)
    again.load_state_dict(exported.tensors)
    tokens = torch.arange(10)[None]
    assert torch.equal(again.embed(tokens), drafter.embed(tokens, target.get_input_embeddings()))


def test_a_head_with_a_bias_or_packed_tables_are_refused():
    target = make_target("llama", num_hidden_layers=2)
    drafter = make_drafter(target)
    head = target.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.ones(head.out_features))
    with pytest.raises(NotImplementedError, match="head has one"):
        to_deepspec(drafter, target)
    head.weight = torch.nn.Parameter(head.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(NotImplementedError, match="quantised"):
        to_deepspec(drafter, target)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"hidden_size": 64}, "hidden size 32"), ({"vocab_size": 50}, "vocabulary size 64"), ({}, "number of layers 2")],
)
def test_a_target_that_does_not_fit_is_refused(tmp_path, capsys, overrides, message):
    saved(tmp_path / "mine")
    make_target("llama", **overrides).save_pretrained(tmp_path / "target")
    arguments = (tmp_path / "mine", tmp_path / "theirs", "--to", "deepspec", "--target", tmp_path / "target")
    assert message in refusal(capsys, *arguments)
    assert not (tmp_path / "theirs").exists()


def test_a_refused_conversion_leaves_nothing_behind(tmp_path, capsys):
    saved(tmp_path / "mine", draft_vocab_size=20, **OWN)
    assert "reduced vocabulary" in refusal(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", "deepspec")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_destination_that_holds_something_is_left_alone(tmp_path, capsys):
    saved(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    assert "not an empty folder" in refusal(capsys, tmp_path / "mine", tmp_path / "mine")
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


@pytest.mark.parametrize("name", ["new", "link", "."])
def test_an_empty_destination_is_taken(tmp_path, capsys, monkeypatch, name):
    saved(tmp_path / "mine")
    (tmp_path / "new").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new" if name == "." else tmp_path)
    convert(capsys, tmp_path / "mine", name)
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "new").iterdir()}
    assert not list(tmp_path.rglob(".partial-*"))


def test_the_targets_name_is_kept(tmp_path, capsys):
    convert(capsys, GOLDEN / "deepspec-qwen3-vanilla" / "drafter", tmp_path / "mine", "--target", "org/target")
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["target_name"] == "org/target"


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_a_target_that_is_needed_is_asked_for(tmp_path, capsys, layout):
    saved(tmp_path / "mine")
    assert "pass --target" in refusal(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", layout)


def test_calibration_that_is_left_out_is_said(tmp_path, capsys, caplog):
    saved(tmp_path / "mine", confidence_temperatures=[1.5, 1.0, 1.0, 1.0])
    with caplog.at_level(logging.WARNING):
        convert(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", "speculators", "--target", "org/target")
    assert "no field for calibration temperatures" in caplog.text


def test_bfloat16_stays_bfloat16(tmp_path, capsys):
    make_drafter(shared_target()).to(torch.bfloat16).save_pretrained(tmp_path / "mine")
    convert(capsys, tmp_path / "mine", tmp_path / "theirs", "--to", "speculators", "--target", "org/target")
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
