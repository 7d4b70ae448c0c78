"""Tiny random targets and drafters, built from configs; nothing is downloaded."""

import functools
import hashlib
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
    return spread_logits(getattr(transformers, model_name)(config).eval())


def spread_logits(target: PreTrainedModel) -> PreTrainedModel:
    """Give a target random weights that spread its logits widely enough for clear choices."""
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

    def draft(self, hidden_states, anchor, choose, num_tokens=None, lm_head=None, vocab_size=None):
        drawn = super().draft(hidden_states, anchor, choose, num_tokens, lm_head, vocab_size)
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tiny targets: token i is the word `wi`."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token=f"w{EOS}", pad_token=f"w{PAD}", padding_side="left"
    )
    turns = "{% for message in messages %}w5 {{ message['content'] }} {% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}w6{% endif %}"
    return tokenizer


def add_to_hub_cache(cache: Path, repo_id: str, folder: Path, revision: str = "main") -> None:
    """Lay a folder into a Hub cache as if it had been downloaded: what offline processes load by name."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    commit = hashlib.sha1(f"{repo_id} {revision}".encode()).hexdigest()
    shutil.copytree(folder, repository / "snapshots" / commit)
    reference = repository / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Keep the modules that come with a checkpoint out of the user's cache."""
    folder = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def hub_error(kind: type[Exception], message: str, status: int) -> Exception:
    """An answer of the Hub that is an error."""
    return kind(message, response=SimpleNamespace(status_code=status, headers={}, request=None))


class FakeHub:
    """Stands for the Hub in uploads: keeps what every commit would have uploaded."""

    def __init__(self):
        self.commits: list[tuple[str, dict[str, bytes], dict]] = []
        self.created: list[tuple[str, dict]] = []
        self.branches: list[str] = []
        self.tokens: set = set()
        self.card: str | Exception | None = None
        self.branch_error: Exception | None = None

    def create_repo(self, api, repo_id, **options):
        assert options["exist_ok"]
        self.tokens.add(api.token)
        self.created.append((repo_id, options))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, _api, _repo_id, branch, **_options):
        if self.branch_error is not None:
            raise self.branch_error
        self.branches.append(branch)

    def hf_hub_download(self, _api, repo_id, filename, **_options):
        if isinstance(self.card, Exception):
            raise self.card
        if self.card is None:
            raise hub_error(huggingface_hub.errors.RemoteEntryNotFoundError, f"{repo_id} has no {filename}", 404)
        return self.card

    def create_commit(self, _api, repo_id, operations, **options):
        files = {operation.path_in_repo: Path(operation.path_or_fileobj).read_bytes() for operation in operations}
        self.commits.append((repo_id, files, options))
        return SimpleNamespace(commit_url="https://huggingface.co/commit", pr_url=None)


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    """Replace the Hub for uploads."""
    fake = FakeHub()
    for name in ("create_repo", "create_branch", "hf_hub_download", "create_commit"):
        method = getattr(fake, name)
        monkeypatch.setattr(huggingface_hub.HfApi, name, functools.partialmethod(_call, method))
    return fake


def _call(api, method, *args, **kwargs):
    return method(api, *args, **kwargs)


@pytest.fixture(autouse=True)
def _quiet_loading():
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _own_cost_curves(tmp_path_factory, monkeypatch):
    """Throughput policies measure the tiny pairs; the user's own curves are left alone."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr("dspark_hf.cost_curve.default_cache_dir", lambda: folder)
