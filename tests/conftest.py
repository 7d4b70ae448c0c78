"""Tiny random targets and drafters, built from configs; nothing is downloaded."""

import functools
import logging
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling.modeling_dspark import DSparkDraft


GOLDEN = Path(__file__).parent / "golden"
VOCAB = 64
EOS, PAD = 2, 0
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {"sliding_window": 8, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
}


def make_target(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """Return a random float32 target whose logits are spread widely enough for clear choices."""
    name, extra = FAMILIES[family]
    fields = SHAPE | extra | overrides
    if family == "gpt2":
        fields = {k: v for k, v in fields.items() if k not in ("head_dim", "num_key_value_heads", "intermediate_size")}
    config_name = f"{name}TextConfig" if family == "gemma3" else f"{name}Config"
    model_name = f"{name}LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM"
    config = getattr(transformers, config_name)(**fields)
    torch.manual_seed(seed)
    target = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        target.get_output_embeddings().weight.normal_(std=0.6)
    target.generation_config.pad_token_id = PAD
    return target


@functools.cache
def shared_target() -> PreTrainedModel:
    """Return a shallow Llama without an end-of-text token of its own, for tests that change nothing about it."""
    target = make_target("llama", num_hidden_layers=2)
    target.generation_config.eos_token_id = None
    return target


def make_drafter(target: PreTrainedModel, seed: int = 1, **overrides) -> DSparkDraftModel:
    """Return a random drafter for a target, with a block of 4 unless told otherwise."""
    fields = {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 6} | overrides
    torch.manual_seed(seed)
    drafter = DSparkDraftModel(DSparkConfig.from_target(target.config, **fields)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return drafter


class ScriptedDrafter(DSparkDraftModel):
    """Proposes `script(row, position)` for the token at a position of a row's text, whatever the context is."""

    script = None

    def forward(self, inputs_embeds, context, position_ids, context_position_ids, attention_mask=None, cache=None):
        self.anchor_positions = position_ids[:, 0].tolist()
        return super().forward(inputs_embeds, context, position_ids, context_position_ids, attention_mask, cache)

    def draft(self, hidden_states, anchor, choose, num_tokens=None, lm_head=None):
        drawn = super().draft(hidden_states, anchor, choose, num_tokens, lm_head)
        tokens = [
            [self.script(row, position + 1 + k) for k in range(drawn.tokens.shape[1])]
            for row, position in enumerate(self.anchor_positions)
        ]
        tokens = torch.tensor(tokens)
        probs = torch.nn.functional.one_hot(tokens, self.config.vocab_size).float()
        return DSparkDraft(tokens=tokens, probs=probs, confidence_logits=drawn.confidence_logits)


def make_scripted(target: PreTrainedModel, script, **overrides) -> ScriptedDrafter:
    """Return a drafter that proposes `script(row, position)`."""
    drafter = make_drafter(target, **overrides)
    drafter.__class__ = ScriptedDrafter
    drafter.script = script
    return drafter


def oracle_script(output: torch.Tensor, lengths: list[int], prompt_columns: int):
    """Script of a perfect drafter: the tokens of a target's own `output`, prompts of `lengths` tokens left-padded."""
    padding = [prompt_columns - length for length in lengths]

    def script(row: int, position: int) -> int:
        column = position + padding[row]
        return int(output[row, column]) if column < output.shape[1] else PAD

    return script


def left_padded(lengths: list[int], seed: int = 3) -> dict[str, torch.Tensor]:
    """Random prompts of the given lengths as one left-padded batch."""
    torch.manual_seed(seed)
    columns = max(lengths)
    input_ids = torch.randint(3, VOCAB, (len(lengths), columns))
    mask = torch.tensor([[0] * (columns - length) + [1] * length for length in lengths])
    return {"input_ids": input_ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@pytest.fixture(autouse=True)
def _quiet_loading():
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _own_cost_curves(tmp_path_factory, monkeypatch):
    """Throughput policies measure the tiny pairs; the user's own curves are left alone."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr("dspark_hf.cost_curve.default_cache_dir", lambda: folder)
