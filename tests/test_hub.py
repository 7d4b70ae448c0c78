"""A drafter as a Hub repository: what is saved and uploaded, and what loads it, with this package and without."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, VOCAB, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import dspark_hf
from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.options import read_options
from dspark_hf.scheduling import ThresholdPolicy


FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "configuration_dspark.py",
    "layers_dspark.py",
    "modeling_dspark.py",
}
VARIANTS = {
    "borrowed": {},
    "own weights, rnn": {"has_embedding": True, "has_lm_head": True, "markov_head_type": "rnn"},
    "reduced vocabulary, gated": {"draft_vocab_size": 20, "markov_head_type": "gated", "target_layer_ids": [-1, 2]},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def target():
    return make_target().requires_grad_(False)


def saved_drafter(target, folder: Path, dtype=torch.float32, **overrides) -> DSparkDraftModel:
    """A drafter whose state is all its own, saved in `folder`."""
    drafter = make_drafter(target, **overrides).to(dtype)
    if drafter.kept_token_ids is not None:
        drafter.d2t.copy_(2 * torch.arange(len(drafter.d2t)))  # keeps every third token
    drafter.save_pretrained(folder)
    return drafter


# Saved files


def test_a_saved_drafter_is_a_whole_repository(target, tmp_path):
    saved_drafter(target, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= FILES
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "dspark"
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDraftModel",
    }


def test_the_published_modules_are_the_ones_that_run_here(target, tmp_path):
    saved_drafter(target, tmp_path)
    for name in ("configuration_dspark", "layers_dspark", "modeling_dspark"):
        source = Path(getattr(dspark_hf.modeling, name).__file__)
        assert (tmp_path / f"{name}.py").read_text() == source.read_text()
        assert not re.search(r"^\s*(import|from) dspark_hf", source.read_text(), re.MULTILINE)


def test_the_state_dict_has_the_released_names(target, tmp_path):
    saved_drafter(target, tmp_path / "own", has_embedding=True, has_lm_head=True, markov_head_type="rnn")
    saved = load_file(tmp_path / "own" / "model.safetensors")
    released = load_file(GOLDEN / "deepspec-qwen3-rnn" / "drafter" / "model.safetensors")
    assert set(saved) == set(released)


def test_a_borrowed_embedding_and_head_are_not_saved(target, tmp_path):
    saved_drafter(target, tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_changes_nothing(target, tmp_path, variant):
    drafter = saved_drafter(target, tmp_path, **VARIANTS[variant])
    loaded = DSparkDraftModel.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == drafter.dtype
    assert not loaded.training
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
    of_the_file = {"dtype", "architectures", "transformers_version", "_name_or_path", "auto_map"}
    before, after = (
        {name: value for name, value in model.config.to_dict().items() if name not in of_the_file}
        for model in (drafter, loaded)
    )
    assert after == before
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def test_a_drafter_may_be_sharded(target, tmp_path):
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_device_map_works(target, tmp_path):
    saved_drafter(target, tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path, device_map="cpu").device.type == "cpu"


def test_a_subfolder_works(target, tmp_path):
    drafter = make_drafter(target)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(tmp_path / "repository" / "part")
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "repository", subfolder="part")
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)
    assert loaded.generation_config.num_assistant_tokens == 2


# Decoding options


def test_decoding_options_travel_with_the_drafter(target, tmp_path):
    drafter = make_drafter(target)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "threshold"
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(tmp_path / "one")
    DSparkDraftModel.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for folder in ("one", "two"):
        loaded = DSparkDraftModel.from_pretrained(tmp_path / folder)
        options = read_options(loaded, GenerationConfig())
        assert options.max_draft_tokens == 3
        assert options.policy == ThresholdPolicy(0.25)


def test_a_drafter_without_options_uses_the_defaults(target, tmp_path):
    saved_drafter(target, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert read_options(loaded, GenerationConfig()).max_draft_tokens == loaded.config.block_size


# The Auto classes of a process that has this package


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_the_auto_classes_know_the_drafter(target, tmp_path, auto_class):
    saved_drafter(target, tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    assert type(auto_class.from_pretrained(tmp_path)) is DSparkDraftModel
    assert type(auto_class.from_config(DSparkConfig.from_target(target.config))) is DSparkDraftModel


def test_the_auto_classes_prefer_this_package_to_the_modules_of_the_checkpoint(target, tmp_path, modules_cache):
    saved_drafter(target, tmp_path / "drafter")
    loaded = AutoModel.from_pretrained(tmp_path / "drafter", trust_remote_code=True)
    assert type(loaded) is DSparkDraftModel
    assert not (modules_cache / "transformers_modules").exists()


def test_a_config_alone_makes_a_random_drafter(target):
    drafter = AutoModel.from_config(DSparkConfig.from_target(target.config, num_hidden_layers=1))
    drafter = drafter.eval()
    out = target.generate(torch.arange(3, 9)[None], assistant_model=drafter, max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 11)


# A drafter whose class came with its checkpoint


@pytest.mark.parametrize("variant", ["borrowed", "reduced vocabulary, gated"])
def test_a_drafter_of_a_class_from_the_hub_runs_in_generate(target, tmp_path, modules_cache, variant):
    drafter = saved_drafter(target, tmp_path / "drafter", **VARIANTS[variant])
    remote_class = get_class_from_dynamic_module("modeling_dspark.DSparkDraftModel", str(tmp_path / "drafter"))
    assert remote_class is not DSparkDraftModel
    remote = remote_class.from_pretrained(tmp_path / "drafter")
    assert type(remote).__module__.startswith("transformers_modules")
    assert Path(sys.modules[type(remote).__module__].__file__).is_relative_to(modules_cache)
    inputs = {"input_ids": torch.randint(3, VOCAB, (2, 6)), "max_new_tokens": 20, "do_sample": False}
    inputs |= {"return_dict_in_generate": True, "pad_token_id": 0}
    own, theirs = (target.generate(assistant_model=model, **inputs) for model in (drafter, remote))
    assert torch.equal(theirs.sequences, own.sequences)
    assert theirs.statistics.records == own.statistics.records
    assert torch.equal(theirs.sequences, target.generate(**inputs).sequences)


def test_a_drafter_of_a_class_from_the_hub_can_be_saved_again(target, tmp_path, modules_cache):
    saved_drafter(target, tmp_path / "one")
    remote_class = get_class_from_dynamic_module("modeling_dspark.DSparkDraftModel", str(tmp_path / "one"))
    remote_class.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert modules_cache.exists()
    assert {path.name for path in (tmp_path / "two").iterdir()} >= FILES
    DSparkDraftModel.from_pretrained(tmp_path / "two")


# A process that has no dspark_hf

LOAD_ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dspark_hf":
            raise ModuleNotFoundError("No module named 'dspark_hf'", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import dspark_hf
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("dspark_hf is there")

import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import check_imports

root = Path(sys.argv[1])
for folder in sorted(path.parent for path in root.glob("*/inputs.safetensors")):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    assert type(config).__name__ == "DSparkConfig"
    assert type(model).__name__ == "DSparkDraftModel"
    assert type(model).__module__.startswith("transformers_modules")
    assert model.generation_config.num_assistant_tokens == 3
    inputs = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        context = model.project_context(inputs["taps"])
        hidden = model(inputs["embeds"], context, inputs["positions"], inputs["context_positions"]).last_hidden_state
    save_file({"hidden": hidden}, folder / "outputs.safetensors")
for refused in (
    lambda: type(model).from_pretrained(sys.argv[2]),
    lambda: AutoModel.from_pretrained(folder, trust_remote_code=False),
    lambda: check_imports(sys.argv[3]),
):
    try:
        refused()
    except (ValueError, ImportError) as error:
        print(error)
"""


def test_a_drafter_drafts_the_same_in_a_process_that_has_no_dspark_hf(target, tmp_path):
    drafters = {}
    for variant, overrides in VARIANTS.items():
        folder = tmp_path / "drafters" / variant.replace(" ", "_").replace(",", "")
        drafter = saved_drafter(target, folder, **overrides)
        drafter.generation_config.num_assistant_tokens = 3
        drafter.save_pretrained(folder)
        inputs = {
            "taps": torch.randn(2, 6, drafter.fc.in_features, dtype=drafter.dtype),
            "embeds": torch.randn(2, drafter.config.num_block_inputs, 32, dtype=drafter.dtype),
            "positions": 6 + torch.arange(drafter.config.num_block_inputs).expand(2, -1).contiguous(),
            "context_positions": torch.arange(6).expand(2, -1).contiguous(),
        }
        save_file(inputs, folder / "inputs.safetensors")
        drafters[folder] = (drafter, inputs)
    custom_generate = Path(dspark_hf.__file__).parent / "custom_generate.py"
    foreign = GOLDEN / "deepspec-qwen3-vanilla" / "drafter"
    result = run_alone(tmp_path, tmp_path / "drafters", foreign, custom_generate)
    assert result.returncode == 0, result.stderr
    # Alone, the published file reads its own layout.
    assert "`import dspark_hf` reads more packagings" in result.stdout
    # Nothing that came with a checkpoint runs unasked, and `custom_generate` says what it lacks.
    assert "trust_remote_code=True" in result.stdout
    assert "pip install dspark_hf" in result.stdout
    for folder, (drafter, inputs) in drafters.items():
        with torch.no_grad():
            context = drafter.project_context(inputs["taps"])
            expected = drafter(inputs["embeds"], context, inputs["positions"], inputs["context_positions"])
        actual = load_file(folder / "outputs.safetensors")["hidden"]
        assert actual.dtype == drafter.dtype
        torch.testing.assert_close(actual, expected.last_hidden_state)


def run_alone(tmp_path: Path, *arguments: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment.pop("PYTHONPATH", None)
    script = tmp_path / "load_alone.py"
    script.write_text(LOAD_ALONE)
    command = [sys.executable, "-I", str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


# Upload


def test_push_to_hub_uploads_all_that_a_process_without_this_package_needs(target, hub):
    drafter = make_drafter(target)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.push_to_hub("my-drafter")
    ((repository, files, _),) = hub.commits
    assert repository == "me/my-drafter"
    assert set(files) >= FILES | {"README.md"}
    assert json.loads(files["generation_config.json"])["num_assistant_tokens"] == 3
    assert "AutoModel" in json.loads(files["config.json"])["auto_map"]


@pytest.mark.parametrize(("given", "repository"), [({"repo_id": "named"}, "me/named"), ({}, "me/folder")])
def test_save_pretrained_can_upload_too(target, tmp_path, hub, given, repository):
    make_drafter(target).save_pretrained(
        tmp_path / "folder", push_to_hub=True, commit_message="Add a drafter", token="secret", **given
    )
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= FILES
    ((pushed_to, files, options),) = hub.commits
    assert pushed_to == repository
    assert set(files) >= FILES
    assert options["commit_message"] == "Add a drafter"
    assert hub.tokens == {"secret"}
    assert not any(b"secret" in content for content in files.values())
