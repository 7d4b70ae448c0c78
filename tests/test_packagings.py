"""Every packaging, as its publisher's files have it: the weights arrive, and the drafter computes what its publisher's does.

Layouts that mean the same as DeepSpec's must decode its golden rounds; the others are compared with `reference/drafter.py`.
"""

import copy
import json
import math

import pytest
import torch
from conftest import GOLDEN
from packagings import (
    OTHER,
    SAME,
    VANILLA,
    deepspec,
    dflash,
    golden,
    liquid,
    modelopt,
    nemotron,
    nested,
    specforge,
    speculators,
)
from reference.drafter import ReferenceDrafter
from safetensors.torch import load_file, save_file
from test_golden_speculators import teacher_forced
from test_modeling import close, draft_uncached
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.taps import tapped_layers


CONTEXT = 15  # longer than the windows


@pytest.fixture(scope="module")
def targets():
    """The golden targets, loaded once each."""
    loaded = {}

    def target_of(name):
        case = VANILLA.replace("vanilla", "rnn") if "rnn" in name else VANILLA
        if case not in loaded:
            loaded[case] = AutoModelForCausalLM.from_pretrained(GOLDEN / case / "target").requires_grad_(False)
            loaded[case, "golden"] = load_file(GOLDEN / case / "golden.safetensors")
        return loaded[case], loaded[case, "golden"]

    return target_of


def load(packaged, tmp_path) -> DSparkDraftModel:
    return DSparkDraftModel.from_pretrained(packaged.save(tmp_path / "drafter")).requires_grad_(False)


def decode(target, recorded, drafter, tokens: int):
    """Greedy text after the golden prompt and the committed lengths of all rounds."""
    prompt = recorded["input_ids"]
    output = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    return output.sequences, [record.committed for record in output.statistics.records]


def golden_rounds(target, recorded, drafter) -> bool:
    """Whether the rounds are DeepSpec's; the text must be in any case."""
    text, rounds = decode(target, recorded, drafter, 40 + drafter.config.block_size + 1)
    expected, lengths = recorded["output_ids"], recorded["acceptance_lengths"].tolist()
    assert torch.equal(text[:, : expected.shape[1]], expected)
    return rounds[: len(lengths)] == lengths


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_every_weight_arrives_as_it_was_published(name, tmp_path):
    packaged = (SAME | OTHER)[name]()
    drafter = load(packaged, tmp_path)
    state = drafter.state_dict()
    assert state.keys() == packaged.state.keys()
    assert all(torch.equal(state[key], packaged.state[key]) for key in state)
    assert not drafter.training


@pytest.mark.parametrize("name", SAME)
def test_layouts_that_mean_the_same_decode_the_same_rounds(name, targets, tmp_path):
    target, recorded = targets(name)
    assert golden_rounds(target, recorded, load(SAME[name](), tmp_path))


@pytest.mark.parametrize(
    "packaged",
    [
        pytest.param(lambda: speculators(slot=1), id="speculators, the wrong slot"),
        pytest.param(lambda: deepspec(sample_from_anchor=False), id="DeepSpec, the wrong slot"),
        pytest.param(lambda: speculators(aux_hidden_state_layer_ids=[0, 2, 4]), id="speculators, ids not shifted"),
        pytest.param(lambda: deepspec(target_layer_ids=[1, 3, 5]), id="DeepSpec, ids shifted"),
        pytest.param(lambda: liquid(neox=True), id="LiquidAI, pairs that are halves"),
        pytest.param(lambda: modelopt(shift_label=False), id="ModelOpt, labels not shifted"),
        pytest.param(
            lambda: speculators(layers={"layer_types": ["sliding_attention"] * 2, "sliding_window": 2}), id="windows"
        ),
    ],
)
def test_a_wrong_field_changes_the_rounds_and_never_the_text(packaged, targets, tmp_path):
    """Negative controls: the test above would not pass with what these misread."""
    target, recorded = targets(VANILLA)
    assert not golden_rounds(target, recorded, load(packaged(), tmp_path))


class YarnReference(ReferenceDrafter):
    """YaRN's frequencies and attention factor (arXiv 2309.00071), in transformers' default form."""

    def _rotate(self, head, position):
        rope, size = self.config.rope_parameters, self.config.head_dim
        if rope["rope_type"] != "yarn":
            return super()._rotate(head, position)
        base, original = rope["rope_theta"], rope["original_max_position_embeddings"]

        def dimension(rotations):
            return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
        turned, half = head.clone(), size // 2
        factor = 0.1 * math.log(rope["factor"]) + 1
        for i in range(half):
            frequency = base ** (-2 * i / size)
            slowed = min(max((i - low) / (high - low), 0), 1)
            angle = position * (frequency / rope["factor"] * slowed + frequency * (1 - slowed))
            cos, sin = factor * math.cos(angle), factor * math.sin(angle)
            turned[i], turned[i + half] = head[i] * cos - head[i + half] * sin, head[i + half] * cos + head[i] * sin
        return turned


def reference_for(packaged, target) -> ReferenceDrafter:
    borrowed = {}
    if "embed_tokens.weight" not in packaged.state:
        borrowed["embedding"] = target.get_input_embeddings().weight
    if "lm_head.weight" not in packaged.state:
        borrowed["head"] = target.lm_head.weight
    return YarnReference(packaged.state, packaged.expected_config(), **borrowed)


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_from_deepspec_computes_as_its_publisher_does(name, targets, tmp_path):
    target, _ = targets(name)
    packaged = OTHER[name]()
    drafter, reference = load(packaged, tmp_path), reference_for(packaged, target)
    different = {
        field: (value, getattr(drafter.config, field))
        for field, value in packaged.expected_config().to_dict().items()
        if field in packaged.expected and value != getattr(drafter.config, field)
    }
    assert not different
    torch.manual_seed(4)
    taps, anchor = torch.randn(1, CONTEXT, drafter.fc.in_features), torch.tensor([33])
    hidden, logits, draft = draft_uncached(drafter, target, taps, anchor, CONTEXT)
    expected_hidden = reference.block_hidden_states(taps[0], 33)
    expected = reference.draft(expected_hidden, 33)
    close(hidden[0], expected_hidden)
    close(logits[0], expected.draft_logits)
    if expected.confidence_logits is not None:
        close(draft.confidence_logits[0], expected.confidence_logits)


@pytest.mark.parametrize("name", OTHER)
def test_what_differs_from_deepspec_decodes_what_the_target_alone_writes(name, targets, tmp_path):
    target, recorded = targets(name)
    text, rounds = decode(target, recorded, load(OTHER[name](), tmp_path), 16)
    assert torch.equal(text, recorded["output_ids"][:, : text.shape[1]])
    assert len(rounds) > 1


@pytest.mark.parametrize("name", ["SpecForge, logit_head", "ModelOpt, rnn", "LiquidAI, model prefix", "Nemotron"])
def test_a_renamed_checkpoint_is_saved_under_this_packages_names(name, tmp_path):
    packaged = (SAME | OTHER)[name]()
    load(packaged, tmp_path).save_pretrained(tmp_path / "own")
    saved = load_file(tmp_path / "own" / "model.safetensors")
    assert saved.keys() == packaged.state.keys()
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "dspark"
    again = DSparkDraftModel.from_pretrained(tmp_path / "own").state_dict()
    assert all(torch.equal(again[key], packaged.state[key]) for key in again)


# Fields


@pytest.mark.parametrize(
    ("packaged", "taps"),
    [
        # transformers returns the last layer's state after the final norm, vLLM records it before.
        pytest.param(lambda: deepspec(target_layer_ids=[-1, 2, 5]), [-1, 2, -2], id="DeepSpec, NeMo"),
        pytest.param(lambda: dflash(target_layer_ids=[0, 2, 5]), [0, 2, -2], id="z-lab DFlash"),
        pytest.param(lambda: speculators(aux_hidden_state_layer_ids=[0, 3, 6]), [-1, 2, 5], id="speculators"),
        pytest.param(OTHER["speculators, one tap more"], [0, 2, 4, -2], id="speculators, one tap more"),
        pytest.param(lambda: nemotron(target_layer_ids=[0, 2, 5]), [0, 2, 5], id="Nemotron"),
    ],
)
def test_the_last_layer_is_tapped_where_the_publisher_tapped_it(packaged, taps, targets, tmp_path):
    target, _ = targets(VANILLA)
    assert tapped_layers(load(packaged(), tmp_path).config, target) == taps


def test_a_published_head_for_a_padded_vocabulary_is_sliced(targets, tmp_path):
    """LiquidAI's targets have more rows than their drafters."""
    target, recorded = targets(VANILLA)
    padded = copy.deepcopy(target)
    padded.resize_token_embeddings(160, mean_resizing=False)
    text, _ = decode(padded, recorded, load(liquid(), tmp_path), 12)
    prompt = recorded["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(text, padded.generate(prompt, attention_mask=torch.ones_like(prompt), **options))


@pytest.mark.parametrize(
    ("fields", "slot"),
    [
        ({}, 1),
        ({"sample_from_anchor": True}, 0),
        ({"sample_from_anchor": False}, 1),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}, 0),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}}, 1),
        # The number of proposals decides where both are there.
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}, "sample_from_anchor": False}, 0),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 2}]}, "sample_from_anchor": False}, 1),
        ({"speculators_config": {"proposal_methods": []}}, 1),
    ],
)
def test_the_first_slot_of_speculators_is_never_guessed_from_its_default(fields, slot, tmp_path):
    packaged = speculators()
    for name in ("sample_from_anchor", "speculators_config"):
        packaged.config.pop(name)
    packaged.config |= fields
    config = load(packaged, tmp_path).config
    assert (config.first_prediction_slot, config.block_size) == (slot, 5 - slot)


@pytest.mark.parametrize(
    ("packaged", "message"),
    [
        (lambda: specforge({"vocab_size": 130}), "config says vocab_size 130, the tensors say 128"),
        (lambda: specforge({"num_attention_heads": 8}), "config says num_attention_heads 8, the tensors say 4"),
        (lambda: speculators(draft_vocab_size=96), "config says draft_vocab_size 96, the tensors say 128"),
        (lambda: specforge(markov_rank=16), "config says markov_rank 16, the tensors say 8"),
        (lambda: deepspec(attention_sink_bias=True), "config says attention_sinks True, the tensors say False"),
        (lambda: deepspec(has_embed_tokens=False), "config says has_embedding False, the tensors say True"),
        (lambda: specforge(target_layer_ids=[0, 2]), "mismatched keys: .*fc.weight"),
        (lambda: speculators(aux_hidden_state_layer_ids=[1]), "mismatched keys: .*fc.weight"),
        (lambda: specforge({"rope_parameters": None}), "no base of the rotary embedding"),
        (
            lambda: dflash({"layer_types": ["sliding_attention"] * 2}),
            "sliding layers need a positive `sliding_window`",
        ),
        (
            lambda: specforge(target_layer_ids=None),
            r"SpecForge drafter needs the config fields \['target_layer_ids'\]",
        ),
        (lambda: dflash(mask_token_id=None), r"z-lab DFlash drafter needs the config fields \['mask_token_id'\]"),
        (
            lambda: speculators(aux_hidden_state_layer_ids=None),
            r"needs the config fields \['aux_hidden_state_layer_ids'\]",
        ),
        (
            lambda: modelopt(use_confidence_head=False),
            "config says enable_confidence_head False, the tensors say True",
        ),
    ],
)
def test_files_that_do_not_add_up_are_refused(packaged, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(packaged(), tmp_path)


@pytest.mark.parametrize(
    "name", ["speculators, reduced vocabulary", "ModelOpt, rnn", "Nemotron", "Ornith", "LiquidAI"]
)
def test_no_weight_of_a_packaging_is_skipped(name, tmp_path):
    """A weight that is missing or left over fails by name, under whatever name it was published."""
    packaged = (SAME | OTHER)[name]()
    packaged.tensors |= {"layers.0.mlp.up_proj.bias": torch.zeros(112)}
    with pytest.raises(ValueError, match=r"unexpected keys: layers\.0\.mlp\.up_proj\.bias"):
        load(packaged, tmp_path / "more")
    packaged.tensors.pop("layers.0.mlp.up_proj.bias")
    packaged.tensors.pop("layers.1.mlp.down_proj.weight")
    with pytest.raises(ValueError, match=r"missing keys: layers\.1\.mlp\.down_proj\.weight"):
        load(packaged, tmp_path / "less")


# Refused by name

STUB = {"fc.weight": torch.zeros(4, 4)}
REFUSED = {
    "DeepSeek-V4": (
        {"model_type": "deepseek_v4", "dspark_block_size": 5},
        STUB,
        "DeepSeek-V4 checkpoint .* hyper-connections",
    ),
    "mtp": ({}, {"mtp.0.main_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, "DeepSeek-V4 checkpoint"),
    "speculators dflash2": ({"speculators_model_type": "dflash2"}, STUB, "kind 'dflash2' .* convolutions"),
    "speculators xpress": ({"speculators_model_type": "xpress"}, STUB, "kind 'xpress' .* Jacobi"),
    "speculators eagle3": ({"speculators_model_type": "eagle3"}, STUB, "kind 'eagle3' .* token by token"),
    "speculators of a later version": (
        {"speculators_model_type": "new"},
        STUB,
        "kind 'new' .* only dspark and dflash",
    ),
    "log-SNR": ({"log_snr_conditioning": True}, STUB, "log_snr_conditioning .* noise level"),
    "log-SNR weights": ({}, STUB | {"log_snr_embed.fc1.weight": torch.zeros(2)}, "log_snr_conditioning"),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, STUB, "DFlash 2 drafter .* convolutions"),
    "DFlash 2 weights": ({}, STUB | {"candidate_selector.predecessor_codebook": torch.zeros(2)}, "DFlash 2 drafter"),
    "Kimi-K3": ({"architectures": ["K3DSparkModel"]}, STUB, "latent attention .* grouped-query"),
    "NeMo GLM": ({"architectures": ["Glm5_2DSparkModel"]}, STUB, "latent attention"),
    "latent attention": (
        {},
        STUB | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)},
        "latent attention",
    ),
    "SpecForge MLA": ({"dflash_config": {"attention_mode": "mla"}}, STUB, "attention_mode 'mla'"),
    "SpecForge KDA": (
        {"dflash_config": {"attention_modes": ["gqa", "kda"]}},
        STUB,
        "attention_mode 'kda' .* recurrent",
    ),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, STUB, "projector_type 'domino' .* recurrent network"),
    "Muse Glimmer": ({"model_type": "muse_glimmer_assistant"}, STUB, "Muse Glimmer assistant .* pass it to generate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_reach_is_refused_by_name_with_the_reason(name, tmp_path):
    config, tensors, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotImplementedError, match=message):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_packed_weights_of_nemotron_are_refused_as_quantised(tmp_path):
    packaged = nemotron()
    name = "layers.0.mlp.up_proj.weight"
    packaged.tensors[name] = torch.zeros(112, 32, dtype=torch.uint8)
    packaged.tensors |= {
        f"{name}_scale": torch.ones(112, 4).to(torch.float8_e4m3fn),
        f"{name}_scale_2": torch.ones(()),
    }
    with pytest.raises(ValueError, match=rf"quantised drafter weights: {name} \(U8\).* unquantised"):
        load(packaged, tmp_path)


@pytest.mark.parametrize("name", ["drafter-GGUF", "drafter"])
def test_a_repository_of_gguf_files_is_refused_by_name(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "dspark-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds GGUF files, which are for llama\.cpp.* safetensors repository"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_dflash_drafter_with_a_markov_head_must_say_which_slot_predicts(tmp_path):
    packaged = deepspec()
    packaged.config = nested()[0] | {"architectures": ["DFlashDraftModel"]}
    packaged.tensors = golden()[1]
    with pytest.raises(ValueError, match='does not say whether the anchor.* Add `"sample_from_anchor": true`'):
        load(packaged, tmp_path)


def test_a_dflash_drafter_that_scales_its_logits_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="output_multiplier"):
        load(dflash(output_multiplier=0.2), tmp_path)


# Saved by the library itself


@torch.no_grad()
def test_a_drafter_of_the_speculators_library_agrees_with_its_training_forward():
    """Windows from the anchor, causal there alone; slot 1 first, with a recurrent state that began at slot 0."""
    case = GOLDEN / "speculators-slot1-window"
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "speculators-anchor-d2t" / "target")
    drafter = DSparkDraftModel.from_pretrained(case / "drafter")
    config = drafter.config
    assert (config.first_prediction_slot, config.block_size, config.markov_head_type) == (1, 4, "rnn")
    assert (config.layer_types, config.sliding_window) == (["sliding_attention", "full_attention"], 6)
    expected = load_file(case / "teacher_forced.safetensors")
    logits = expected["draft_logits"][0].view(-1, 5, 128)[:, 1:]
    confidences = expected["confidence_logits"].view(-1, 5)[:, 1:]
    assert expected["anchor_valid"].all()
    for number, anchor in enumerate(expected["anchor_positions"].tolist()):
        taps = expected["context_hidden_states"]
        drawn, confidence = teacher_forced(drafter, target, taps, expected["input_ids"], anchor)
        close(drawn, logits[number].double())
        close(confidence, confidences[number].double())
