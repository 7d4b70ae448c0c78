"""The drafters of `golden/` rewritten in publishers' layouts: fields as their files have them, tensors under their names.

`SAME` holds layouts that compute what DeepSpec's does, so that decoding must give its rounds. `OTHER` holds what differs: each
with the config that this package needs for it, written out here from `formats.md` and not taken from a reader.
"""

import json
from dataclasses import dataclass, field

import torch
from conftest import GOLDEN
from safetensors.torch import load_file, save_file

from dspark_hf import DSparkConfig


VANILLA, RNN = "deepspec-qwen3-vanilla", "deepspec-qwen3-rnn"
SLIDING, FULL = "sliding_attention", "full_attention"
TABLES = ("embed_tokens.weight", "lm_head.weight")
LAYERS = (0, 1)
WINDOW = 6
BACKBONE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_parameters", "layer_types",
    "sliding_window", "use_sliding_window", "tie_word_embeddings",
)  # fmt: skip
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
NOISE = {
    "model_type": "qwen3_5_text",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
"""What a Qwen3.5 target's config leaves in a drafter's."""


@dataclass
class Packaged:
    """A checkpoint in a layout: what its files hold, and the state dict that a reader makes of it."""

    config: dict
    tensors: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    expected: dict = field(default_factory=dict)

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def expected_config(self) -> DSparkConfig:
        return DSparkConfig(**GOLDEN_FIELDS | self.expected)


GOLDEN_FIELDS = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_target_layers": 6,
    "target_layer_ids": [0, 2, 4], "block_size": 5, "mask_token_id": 127, "markov_rank": 8,
}  # fmt: skip
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
SLOT_1 = {"first_prediction_slot": 1, "block_size": 4}


def golden(case: str = VANILLA, tables: bool = False) -> tuple[dict, dict[str, torch.Tensor]]:
    """Config and tensors as DeepSpec saved them, without embedding and head unless told otherwise."""
    folder = GOLDEN / case / "drafter"
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if tables or name not in TABLES}
    return json.loads((folder / "config.json").read_text()), kept


def random(*shape: int, seed: int = 7, scale: float = 0.2) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


def without_heads(tensors: dict) -> dict:
    return {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("markov_head", "confidence_head"))
    }


# DeepSpec and its relatives


def deepspec(case=VANILLA, **fields) -> Packaged:
    config, tensors = golden(case, tables=True)
    return Packaged(config | fields, tensors, tensors)


def relabelled() -> Packaged:
    """A fork's export under the class name of DFlash."""
    nested = {"mask_token_id": 127, "target_layer_ids": [0, 2, 4], "markov_rank": 8}
    return deepspec(architectures=["DFlashDraftModel"], dflash_config=nested, num_anchors=64)


def minicpm() -> Packaged:
    config, tensors = golden()
    fields = {
        "projector_type": "dspark",
        "draft_vocab_size": 128,
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    }
    return Packaged(config | fields, tensors, tensors)


# Fields nested in `dflash_config`


def nested(case=VANILLA, moved=("mask_token_id", "target_layer_ids", *HEADS), marks=None, **fields):
    """Config with fields moved into `dflash_config` beside a packaging's marks, and the tensors."""
    config, tensors = golden(case)
    inner = {name: config[name] for name in moved if name in config}
    return without(config, "num_anchors", *moved) | {"dflash_config": inner | (marks or {}) | fields}, tensors


def specforge(outer=None, **fields) -> Packaged:
    marks = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    config, tensors = nested(marks=marks, **fields)
    names = {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
    return Packaged(config | names | (outer or {}), tensors, tensors)


def early_specforge() -> Packaged:
    made = specforge()
    prefix = {
        name: "logit_head." if name.startswith(("markov_head", "confidence_head")) else "" for name in made.tensors
    }
    return Packaged(made.config, {prefix[name] + name: tensor for name, tensor in made.tensors.items()}, made.state)


def modelopt(case=VANILLA, **fields) -> Packaged:
    marks = {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}
    config, tensors = nested(case, marks=marks, **fields)
    config["dflash_config"] = without(config["dflash_config"], "enable_confidence_head", "confidence_head_with_markov")
    config = without(config, "rope_parameters", "eos_token_id") | {"rope_theta": 10000.0, "rope_scaling": None}
    flat = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): tensor
        for name, tensor in tensors.items()
    }
    return Packaged(config | {"architectures": ["DFlashDraftModel"]}, flat, tensors)


def modelopt_gated(**fields) -> Packaged:
    made = modelopt(markov_head_type="gated", **fields)
    gate = {"gate_proj.weight": random(8, 72), "gate_proj.bias": random(8)}
    return Packaged(made.config, made.tensors | gate, made.state | {f"markov_head.{k}": v for k, v in gate.items()})


def liquid(prefix: str = "", neox: bool = False) -> Packaged:
    """Rows of queries and keys are put in the other order, so that interleaved pairs are the pairs of the original."""
    config, tensors = golden()
    pairs = torch.arange(16).view(2, 8).T.flatten()
    turned = dict(tensors)
    for name in [f"layers.{n}.self_attn.{part}" for n in LAYERS for part in ("q_proj", "k_proj", "q_norm", "k_norm")]:
        weight = tensors[f"{name}.weight"]
        turned[f"{name}.weight"] = weight.unflatten(0, (-1, 16))[:, pairs].flatten(0, 1)
    taps = {"mask_token_id": 127, "target_layer_ids": [0, 2, 4], "num_target_layers": 6}
    config = without(config, "num_anchors", "rope_parameters", *taps) | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "rope_theta": 10000.0,
        "rope_is_neox_style": neox,
        "dflash_config": taps,
    }
    return Packaged(config, {prefix + name: tensor for name, tensor in turned.items()}, turned)


def dflash(outer=None, **fields) -> Packaged:
    config, tensors = nested(moved=("block_size", "mask_token_id", "target_layer_ids"), **fields)
    config = without(config, *HEADS) | {"architectures": ["DFlashDraftModel"]} | (outer or {})
    tensors = without_heads(tensors)
    return Packaged(config, tensors, tensors)


def nemotron(**fields) -> Packaged:
    """The fields of the published file, most of them both nested and at top level."""
    config, tensors = golden(tables=True)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("lm_head", "confidence_head"))}
    tensors |= {f"layers.{n}.self_attn.attention_sink_bias": random(4, seed=n, scale=1.0) for n in LAYERS}
    ids = {"mask_token_id": 127, "target_layer_ids": [0, 2, 4]} | fields
    marks = {"attention_sink_bias": True, "sample_from_anchor": False}
    config = without(config, "rope_parameters", "num_target_layers", "num_anchors", *HEADS) | ids | marks
    config |= {
        "layer_types": [SLIDING, SLIDING], "sliding_window": WINDOW, "rope_parameters": None, "rope_theta": 10000,
        "markov_rank": 8, "markov_head_type": "vanilla", "dflash_query_causal": True, "dspark_bonus_anchor": True,
        "dspark_fixup_head_type": "markov", "dspark_markov_rank": 8, "draft_vocab_size": None, "has_embed_tokens": True,
        "has_lm_head": False, "pard_token": 127, "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "dflash_config": marks | ids | {"causal": True, "use_swa": True, "swa_window_size": WINDOW},
    }  # fmt: skip
    return Packaged(config, tensors, tensors)


def ornith() -> Packaged:
    """A gate behind each head's query, norms as their difference from 1, a quarter of each head turned."""
    config, tensors = golden(tables=True)
    state = {name: tensor - 1.0 if "norm" in name else tensor for name, tensor in tensors.items()}
    for n in LAYERS:
        name = f"layers.{n}.self_attn.q_proj.weight"
        both = torch.stack([tensors[name].view(4, 16, 64), random(4, 16, 64, seed=n)], dim=1)
        state[name] = both.reshape(128, 64)
    marks = {"architectures": ["Qwen35DSparkModel"], "enable_qwen35_gated_q_proj": True, "model_type": "qwen3_5"}
    temperatures = {"confidence_temperatures": [1.5, 0.9, 1.5, 1.6, 0.9]}
    return Packaged(config | NOISE | marks | temperatures, state, state)


# speculators


def speculators(kind="dspark", slot=0, layers=None, tensors=None, kept=None, **fields) -> Packaged:
    config, source = golden()
    tensors = source if tensors is None else tensors
    if kept is not None:
        tensors = tensors | reduced(tensors, kept)
    published = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {name: config[name] for name in BACKBONE}
        | {"model_type": "qwen3"}
        | (layers or {}),
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "block_size": 5,
        "draft_vocab_size": 128 if kept is None else len(kept),
        "mask_token_id": 127,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": slot == 0,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 5 - slot}]},
        **({name: config[name] for name in HEADS} if kind == "dspark" else {}),
    }
    # The maps of a whole vocabulary say nothing.
    state = without(tensors, "t2d", *(["d2t"] if kept is None else []))
    return Packaged(published | fields, tensors, state)


def reduced(tensors: dict, kept: list[int]) -> dict[str, torch.Tensor]:
    """What changes with a draft vocabulary: the head's rows, those of the transition bias, and the two maps."""
    rows = torch.tensor(kept)
    changed = {
        "lm_head.weight": golden(tables=True)[1]["lm_head.weight"][rows],
        "d2t": rows - torch.arange(len(kept)),
        "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, rows, True),
    }
    if "markov_head.markov_w2.weight" in tensors:
        changed["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][rows]
    return changed


def drafted_tokens(case: str = VANILLA) -> list[int]:
    """All that DeepSpec drafted in the golden run, so that a vocabulary of these changes nothing there, and some more."""
    recorded = load_file(GOLDEN / case / "golden.safetensors")
    drafted = [tensor.flatten() for name, tensor in recorded.items() if name.endswith("draft_tokens")]
    return sorted(set(torch.cat([*drafted, recorded["output_ids"].flatten()]).tolist()) | set(range(0, 128, 7)))


def lacking(made: Packaged, *names: str) -> Packaged:
    return Packaged(made.config, without(made.tensors, *names), without(made.state, *names))


def one_tap_more() -> Packaged:
    _, tensors = golden()
    return speculators(tensors=tensors | {"fc.weight": random(64, 256)})


SAME = {
    "DeepSpec": deepspec,
    "DeepSpec, rnn": lambda: deepspec(RNN),
    "DeepSpec, a Qwen3.5 target's fields": lambda: deepspec(**NOISE),
    "DeepSpec, Qwen35DSparkModel with plain layers": lambda: deepspec(
        architectures=["Qwen35DSparkModel"], model_type="qwen3_5_text"
    ),
    "DeepSpec, labelled DFlash": relabelled,
    "MiniCPM": minicpm,
    "SpecForge, Nanbeige": specforge,
    "SpecForge, its own model type": lambda: specforge({"model_type": "dspark"}),
    "SpecForge, rewritten for vLLM": lambda: specforge({"architectures": ["Qwen3DSparkModel"]}),
    "SpecForge, logit_head": early_specforge,
    "ModelOpt": modelopt,
    "ModelOpt, rnn": lambda: modelopt(RNN),
    "LiquidAI": liquid,
    "LiquidAI, model prefix": lambda: liquid("model."),
    "speculators": speculators,
    "speculators, reduced vocabulary": lambda: speculators(kept=drafted_tokens()),
    "speculators, reduced vocabulary, head not saved": lambda: lacking(
        speculators(kept=drafted_tokens()), "lm_head.weight"
    ),
    "speculators, both maps of a whole vocabulary": lambda: speculators(
        tensors=golden()[1] | {"d2t": torch.zeros(128, dtype=torch.long), "t2d": torch.ones(128, dtype=torch.bool)}
    ),
    "speculators, a number recommended for serving": lambda: speculators(
        speculators_config={"proposal_methods": [{"speculative_tokens": 3}]}
    ),
}

MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
SLIDING_FIELDS = MIXED | {"use_sliding_window": True}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16}
FROM_ANCHOR = MIXED | {"window_from_anchor": True}


def with_expected(made: Packaged, **expected) -> Packaged:
    made.expected = expected
    return made


OTHER = {
    "DeepSpec dflash": lambda: with_expected(
        Packaged(
            without(golden(tables=True)[0], *HEADS) | {"markov_rank": 0, "enable_confidence_head": False},
            without_heads(golden(tables=True)[1]),
            without_heads(golden(tables=True)[1]),
        ),
        **NO_HEADS, has_embedding=True, has_lm_head=True,
    ),
    "Nemotron": lambda: with_expected(
        nemotron(), **SLOT_1, layer_types=[SLIDING, SLIDING], sliding_window=WINDOW, causal_layer_types=[FULL, SLIDING],
        attention_sinks=True, enable_confidence_head=False, confidence_head_with_markov=False, has_embedding=True,
        num_target_layers=None,
    ),
    "Ornith": lambda: with_expected(
        ornith(), attention_gate=True, zero_centered_norms=True, has_embedding=True, has_lm_head=True, normed_last_tap=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        confidence_temperatures=[1.5, 0.9, 1.5, 1.6, 0.9],
    ),
    "SpecForge, YaRN": lambda: with_expected(specforge({"rope_parameters": YARN}), rope_parameters=YARN),
    "SpecForge, sliding": lambda: with_expected(specforge(SLIDING_FIELDS), **MIXED, causal_layer_types=[SLIDING]),
    "ModelOpt, gated, sliding": lambda: with_expected(
        modelopt_gated(use_swa=True, swa_window_size=WINDOW, causal=False),
        markov_head_type="gated", layer_types=[SLIDING, SLIDING], sliding_window=WINDOW, causal_layer_types=[],
    ),
    "ModelOpt, causal": lambda: with_expected(modelopt(causal=True), causal_layer_types=[FULL, SLIDING]),
    "ModelOpt, labels not shifted": lambda: with_expected(modelopt(shift_label=False), **SLOT_1),
    "z-lab DFlash": lambda: with_expected(
        dflash(), **NO_HEADS, **SLOT_1, embedding_scale=1.0, normed_last_tap=True
    ),
    "z-lab DFlash, sliding": lambda: with_expected(
        dflash(SLIDING_FIELDS, input_embedding_scale=1.5, final_logit_softcapping=20.0), **NO_HEADS, **SLOT_1, **MIXED,
        causal_layer_types=[SLIDING], embedding_scale=1.5, final_logit_softcapping=20.0, normed_last_tap=True,
    ),
    "z-lab DFlash, sliding, not causal": lambda: with_expected(
        dflash(SLIDING_FIELDS | {"is_causal": False}), **NO_HEADS, **SLOT_1, **MIXED, causal_layer_types=[],
        embedding_scale=1.0, normed_last_tap=True,
    ),
    "z-lab DFlash with a Markov head that says its slot": lambda: with_expected(
        Packaged(nested(sample_from_anchor=True)[0] | {"architectures": ["DFlashDraftModel"]}, golden()[1], golden()[1]),
        embedding_scale=1.0, normed_last_tap=True,
    ),
    "speculators before sample_from_anchor": lambda: with_expected(
        Packaged(without((made := speculators(slot=1)).config, "sample_from_anchor", "speculators_config"), made.tensors, made.state),
        **SLOT_1, num_target_layers=None,
    ),
    "speculators, windows": lambda: with_expected(
        speculators(slot=1, layers=SLIDING_FIELDS), **SLOT_1, **FROM_ANCHOR, causal_layer_types=[SLIDING],
        num_target_layers=None,
    ),
    "speculators, windows, not causal": lambda: with_expected(
        speculators(layers=SLIDING_FIELDS, sliding_window_non_causal=True), **FROM_ANCHOR, causal_layer_types=[],
        num_target_layers=None,
    ),
    "speculators, rotary base of each type": lambda: with_expected(
        speculators(layers={"rope_parameters": {FULL: {"rope_theta": 9.0}, SLIDING: {"rope_theta": 500.0}}}),
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, num_target_layers=None,
    ),
    "speculators dflash, reduced vocabulary": lambda: with_expected(
        speculators("dflash", slot=1, tensors=without_heads(golden()[1]), kept=drafted_tokens()),
        **NO_HEADS, **SLOT_1, draft_vocab_size=len(drafted_tokens()), has_lm_head=True, num_target_layers=None,
    ),
    "speculators, one tap more": lambda: with_expected(
        one_tap_more(), target_layer_ids=[0, 2, 4, -2], num_target_layers=None
    ),
}  # fmt: skip
