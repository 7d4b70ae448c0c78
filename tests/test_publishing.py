"""A drafter as a whole Hub repository: the files, the card, the upload, and `custom_generate`."""

import json
import logging
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import GOLDEN, add_to_hub_cache, hub_error, left_padded, make_drafter, make_target, make_tokenizer
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, TextStreamer, pipeline
from transformers.generation import utils as host

import dspark_hf
from dspark_hf import DSparkConfig, DSparkDraftModel, cli
from dspark_hf.model_card import MARK, CardFacts, measured, model_card, training_facts, usage
from dspark_hf.modeling.configuration_dspark import hub_name
from dspark_hf.publishing import write_repository


ROOT = Path(__file__).parent.parent
SPEED = ROOT / "docs" / "benchmarks" / "speed.json"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "configuration_dspark.py",
    "layers_dspark.py",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "generation_config.json",
    "model.safetensors",
    "modeling_dspark.py",
    "tokenizer.json",
    "tokenizer_config.json",
}
BASE = "org/target"


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def target():
    return make_target().requires_grad_(False)


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def drafter(target):
    return make_drafter(target)


# The folder


def test_a_published_folder_is_whole(target, target_folder, drafter, tmp_path):
    folder = tmp_path / "drafters" / "mine"
    drafter.config.eos_token_id = 7
    drafter.generation_config.num_assistant_tokens = 3
    write_repository(drafter, folder, target=target_folder, base_model=BASE, record=SPEED)
    assert files_of(folder) == FILES
    config = json.loads((folder / "config.json").read_text())
    assert config["target_name"] == BASE
    assert {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    loaded = DSparkDraftModel.from_pretrained(folder)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    assert loaded.generation_config.num_assistant_tokens == 3
    chat = [{"role": "user", "content": "w9"}]
    theirs, own = AutoTokenizer.from_pretrained(folder), make_tokenizer()
    assert theirs.apply_chat_template(chat) == own.apply_chat_template(chat)
    assert theirs.padding_side == "left"
    assert "local" not in (folder / "tokenizer_config.json").read_text()
    for file in FILES - {"model.safetensors"}:
        assert str(tmp_path.parent) not in (folder / file).read_text(), f"{file} names a path of this machine"


def test_a_drafter_of_another_packaging_becomes_one_of_this(tmp_path):
    golden = GOLDEN / "deepspec-qwen3-vanilla"
    drafter = DSparkDraftModel.from_pretrained(golden / "drafter")
    write_repository(drafter, tmp_path, target=golden / "target", tokenizer=make_tokenizer())
    assert files_of(tmp_path) == FILES
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dspark"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_target_that_is_not_known_is_reported(drafter, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="dspark_hf")
    write_repository(drafter, tmp_path)
    assert "Pass target=" in caplog.text
    assert files_of(tmp_path) == FILES - {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert "base_model" not in (tmp_path / "README.md").read_text()


def test_a_target_of_another_shape_is_refused_before_anything_is_written(drafter, tmp_path):
    make_target(hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"made for another target.*hidden size 32 \(the target has 16\)"):
        write_repository(drafter, tmp_path / "out", target=tmp_path / "other")
    assert files_of(tmp_path / "out") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_model": "/models/target"}, "must be a Hub name"),
        ({"record": {"summary": []}}, "no record of .*speed`: 'environment' is missing"),
        ({"record": {"environment": {}, "decoding": {}, "summary": [{"rows": 1}]}}, "'variant' is missing"),
        ({"record": [1]}, "no record of .*speed`: it is built otherwise"),
        (
            {"record": {"environment": {}, "decoding": {}, "summary": [{"variant": "x", "by": "dataset"}]}},
            "no row for all prompts",
        ),
    ],
)
def test_mistakes_name_what_is_wrong(drafter, target_folder, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_repository(drafter, tmp_path, target=target_folder, **arguments)
    assert files_of(tmp_path) == set()


def test_a_failure_leaves_an_earlier_folder_as_it_was(drafter, target_folder, tmp_path, monkeypatch):
    write_repository(drafter, tmp_path, target=target_folder)
    before = {file: (tmp_path / file).read_bytes() for file in files_of(tmp_path)}

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(drafter.generation_config, "save_pretrained", fail)  # the weights are written by then
    drafter.fc.weight.data.zero_()
    with pytest.raises(OSError, match="disk full"):
        write_repository(drafter, tmp_path, target=target_folder)
    assert {file: (tmp_path / file).read_bytes() for file in files_of(tmp_path)} == before


def test_weights_of_an_earlier_save_go_and_other_files_stay(drafter, target_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_repository(drafter, tmp_path, target=target_folder, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    drafter.fc.weight.data.zero_()
    write_repository(drafter, tmp_path, target=target_folder)
    assert files_of(tmp_path) == FILES | {"notes.txt"}
    assert not DSparkDraftModel.from_pretrained(tmp_path).fc.weight.any()


# The card


def test_the_card_says_what_it_is_and_what_was_measured(drafter, target_folder, tmp_path):
    write_repository(
        drafter,
        tmp_path / "mine",
        target=target_folder,
        base_model=BASE,
        record=SPEED,
        training="By hand.",
        tags="tiny",
    )
    card = huggingface_hub.ModelCard.load(tmp_path / "mine" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.base_model == BASE
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["dspark", "speculative-decoding", "custom_generate", "tiny"]
    for part in (
        "2 layers of width 32; blocks of 4 tokens",
        "head of rank 6",
        "layers 1",
        "MB in float32",
        "By hand.",
    ):
        assert part in card.text
    record = json.loads(SPEED.read_text())
    for row in record["summary"]:
        if row["by"] != "dataset":
            assert f"| {row['name']} | {row['prompts']} | {row['tau']:.2f} |" in card.text
            assert f" {row['ratio']:.2f} | {row['ratio_by_prompt']['median']:.2f} (" in card.text
    assert record["environment"]["hardware"] in card.text
    # The table stands as Markdown: every line has as many cells as the heading.
    table = [line for line in card.text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({}, ["vanilla sequential head of rank 6", "a confidence head", "Its embedding is the target's"]),
        ({"markov_rank": 0, "enable_confidence_head": False}, ["no sequential head", "no confidence head"]),
        ({"draft_vocab_size": 20, "has_lm_head": True}, ["a draft vocabulary of 20 of 64", "its head its own"]),
    ],
)
def test_the_card_describes_the_architecture(target, overrides, parts):
    config = make_drafter(target, **overrides).config
    card = model_card(config, CardFacts("org/mine", "1 MB in float32"))
    assert all(part in card for part in parts)


def test_the_cards_code_runs(target_folder, drafter, tmp_path, modules_cache):
    write_repository(drafter, tmp_path / "drafter", target=target_folder)
    text = usage(str(tmp_path / "drafter"), str(target_folder))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(block.replace("The sky is", "w5 w9 w11"), names)
    plain = names["target"].generate(**names["inputs"], max_new_tokens=64)
    assert torch.equal(names["output"], plain)
    assert type(names["generator"].assistant_model) is DSparkDraftModel
    assert modules_cache.exists()


def test_a_card_that_a_person_wrote_is_kept(drafter, tmp_path, caplog):
    (tmp_path / "README.md").write_text("My words.")
    write_repository(drafter, tmp_path)
    assert (tmp_path / "README.md").read_text() == "My words."
    assert "overwrite_card=True" in caplog.text
    write_repository(drafter, tmp_path, overwrite_card=True)
    assert MARK in (tmp_path / "README.md").read_text()


def test_a_card_that_was_written_here_is_written_again(drafter, tmp_path):
    write_repository(drafter, tmp_path)
    write_repository(drafter, tmp_path, training="Longer now.")
    assert "Longer now." in (tmp_path / "README.md").read_text()


def test_a_folders_path_does_not_show_on_its_card(drafter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("out/mine", "out/mine"), (tmp_path / "mine", "mine"), ("../elsewhere", "elsewhere")):
        write_repository(drafter, folder)
        assert f'custom_generate="{name}"' in Path(folder, "README.md").read_text()


def test_training_facts_come_from_the_trainers_state(tmp_path):
    assert training_facts(tmp_path) is None
    log = [{"step": 10, "loss": 1.0}, {"step": 400, "eval_tau": 1.5, "eval_greedy_tau": 1.625}]
    state = {"global_step": 1420, "epoch": 2.0, "train_batch_size": 4, "log_history": log}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    facts = training_facts(tmp_path)
    assert "1,420 steps" in facts
    assert "batches of 4" in facts
    assert "after step 400: 1.62 greedy, 1.50 at temperature 1" in facts
    (tmp_path / "trainer_state.json").write_text(json.dumps(state | {"log_history": []}))
    assert "held-out" not in training_facts(tmp_path)


def test_a_measured_table_needs_no_commit_or_hardware():
    record = json.loads(SPEED.read_text())
    record["environment"] |= {"commit": ""}
    del record["environment"]["hardware"]
    assert "(commit" not in measured(record)
    assert "on cpu" in measured(record)


@pytest.mark.parametrize(
    ("given", "name"),
    [("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("gpt2", "gpt2"), ("/a/b", None), ("a/b/c", None), ("", None)],
)
def test_the_config_keeps_the_targets_name_and_no_folder(given, name):
    assert hub_name(given) == name
    target_config = make_target(num_hidden_layers=1).config
    target_config.name_or_path = given
    assert DSparkConfig.from_target(target_config).target_name == name


def test_a_folder_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "target").mkdir(parents=True)
    assert hub_name("org/target") is None


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 asks for it
def test_the_hub_pages_code_runs(target_folder, drafter, hub, tmp_path, monkeypatch):
    """As it stands, in a folder where its names are folders; starting a server is left to test_pipelines.py."""
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(target_folder, "Qwen/Qwen3-4B")
    shutil.copy(SPEED, "speed.json")
    drafter.save_pretrained("my-drafter")
    write_repository(drafter, "org/my-drafter", target=target_folder)
    own = make_target()
    peft.get_peft_model(make_target(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained("org/my-adapter")
    names = {"dspark_hf": dspark_hf, "PeftModel": peft.PeftModel, "pipeline": pipeline}
    names |= {"target": own, "drafter": drafter, "inputs": left_padded([6])}
    page = (ROOT / "docs" / "hub.md").read_text()
    commands = re.findall(r"^dspark-hf (publish [^#\n]*)", page, re.MULTILINE)
    assert [cli.main(command.split()) for command in commands] == [0, 0]
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "serve.py" not in block]
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert files_of(Path("my-drafter")) == FILES
    assert [repo_id for repo_id, _, _ in hub.commits] == ["org/my-drafter"] * 2


# The upload


def test_push_to_hub_uploads_a_whole_repository(drafter, target_folder, hub):
    drafter.push_to_hub("mine", target=target_folder, base_model=BASE, record=json.loads(SPEED.read_text()))
    ((repo_id, files, options),) = hub.commits
    assert repo_id == "me/mine"
    assert set(files) == FILES
    card = files["README.md"].decode()
    assert 'assistant_model="me/mine"' in card
    assert f"base_model: {BASE}" in card
    assert options["commit_message"] == "Upload DSpark drafter"


def test_the_options_of_push_to_hub_are_transformers_own(drafter, target_folder, hub):
    drafter.add_model_tags(["one"])
    drafter.push_to_hub(
        "org/mine",
        target=target_folder,
        commit_message="Add",
        commit_description="why",
        private=True,
        token="secret",
        revision="v2",
        create_pr=True,
        max_shard_size="20KB",
        tags=["two"],
    )
    ((repo_id, files, options),) = hub.commits
    assert repo_id == "org/mine"
    assert options == {"commit_message": "Add", "commit_description": "why", "revision": "v2", "create_pr": True}
    assert hub.created == [("org/mine", {"private": True, "exist_ok": True})]
    assert hub.branches == ["v2"]
    assert hub.tokens == {"secret"}
    assert "model.safetensors.index.json" in files
    assert "- one\n- two\n" in files["README.md"].decode()
    assert not any(b"secret" in content for content in files.values())


def test_a_branch_that_may_not_be_made_stops_all_but_a_pull_request(drafter, target_folder, hub):
    hub.branch_error = hub_error(HfHubHTTPError, "forbidden", 403)
    with pytest.raises(HfHubHTTPError, match="forbidden"):
        drafter.push_to_hub("org/mine", target=target_folder, revision="v2")
    drafter.push_to_hub("org/mine", target=target_folder, revision="v2", create_pr=True)
    hub.branch_error = RuntimeError("no branch is made for a pull request's own reference")
    drafter.push_to_hub("org/mine", target=target_folder, revision="refs/pr/1")
    assert len(hub.commits) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_hubs_card_is_kept_if_a_person_wrote_it(drafter, target_folder, hub, tmp_path, overwrite):
    hub.card = tmp_path / "README.md"
    hub.card.write_text("---\nlicense: mit\ntags:\n- own\n---\n\nMy words.\n")
    drafter.push_to_hub("org/mine", target=target_folder, tags=["new"], overwrite_card=overwrite)
    uploaded = hub.commits[0][1]["README.md"].decode()
    assert ("My words." in uploaded) is not overwrite
    assert (MARK in uploaded) is overwrite
    assert "- new" in uploaded
    if not overwrite:
        assert huggingface_hub.ModelCard(uploaded).data.license == "mit"


def test_the_hubs_card_is_written_again_if_it_was_written_here(drafter, target_folder, hub, tmp_path):
    hub.card = tmp_path / "README.md"
    hub.card.write_text(f"---\n---\n{MARK}\nold")
    drafter.push_to_hub("org/mine", target=target_folder)
    assert "old" not in hub.commits[0][1]["README.md"].decode().splitlines()


def test_a_card_that_cannot_be_seen_is_not_overwritten(drafter, target_folder, hub):
    hub.card = LocalEntryNotFoundError("offline")
    with pytest.raises(OSError, match="whether org/mine has a card: offline"):
        drafter.push_to_hub("org/mine", target=target_folder)
    assert hub.commits == []


def test_a_mistake_makes_no_repository(drafter, target_folder, hub):
    with pytest.raises(ValueError, match="no record of"):
        drafter.push_to_hub("org/mine", target=target_folder, record={})
    with pytest.raises(OSError, match="nowhere"):
        drafter.push_to_hub("org/mine", target="nowhere/target")
    assert hub.created == []


# The command


def test_the_command_writes_the_drafters_own_folder(drafter, target_folder, tmp_path, capsys):
    folder = tmp_path / "mine"
    drafter.to(torch.bfloat16).save_pretrained(folder)
    (tmp_path / "notes.md").write_text("By hand.")
    arguments = ["publish", str(folder), "--target", str(target_folder), "--base-model", BASE, "--record", str(SPEED)]
    assert cli.main([*arguments, "--training-notes", str(tmp_path / "notes.md"), "--tags", "tiny"]) == 0
    assert files_of(folder) == FILES
    assert str(folder) in capsys.readouterr().err
    card = (folder / "README.md").read_text()
    for part in ("By hand.", "- tiny", "MB in bfloat16", "## Measured"):
        assert part in card
    assert DSparkDraftModel.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_the_command_writes_another_folder(drafter, target_folder, tmp_path):
    drafter.save_pretrained(tmp_path / "mine")
    before = files_of(tmp_path / "mine")
    arguments = ["publish", str(tmp_path / "mine"), "--target", str(target_folder), "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    assert files_of(tmp_path / "out") == FILES
    assert files_of(tmp_path / "mine") == before


def test_the_command_does_not_overwrite_a_drafter_in_another_layout(tmp_path, capsys):
    folder = tmp_path / "theirs"
    shutil.copytree(GOLDEN / "deepspec-qwen3-vanilla" / "drafter", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli.main(["publish", str(folder), "--base-model", "org/target"]) == 2
    assert "is in another layout" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_command_uploads(drafter, target_folder, tmp_path, hub, capsys):
    folder = tmp_path / "mine"
    drafter.save_pretrained(folder)
    state = {"global_step": 12, "epoch": 1.0, "train_batch_size": 4, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    before = files_of(folder)
    arguments = ["publish", str(folder), "--target", str(target_folder), "--repo", "org/mine", "--private"]
    assert cli.main([*arguments, "--revision", "v2", "--commit-message", "Add"]) == 0
    ((repo_id, files, options),) = hub.commits
    assert (repo_id, set(files)) == ("org/mine", FILES)
    assert options["revision"] == "v2"
    assert options["commit_message"] == "Add"
    assert hub.created[0][1]["private"] is True
    assert "12 steps with `dspark-hf train`" in files["README.md"].decode()
    assert "https://huggingface.co/commit" in capsys.readouterr().err
    assert files_of(folder) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--private"], "go with --repo"),
        (["--repo", "org/mine", "--output", "out"], "not both"),
        (["--record", "nowhere.json"], "nowhere.json"),
        (["--target", "nowhere/target"], "nowhere/target"),
    ],
)
def test_the_command_says_what_is_wrong(drafter, tmp_path, capsys, more, message):
    drafter.save_pretrained(tmp_path)
    assert cli.main(["publish", str(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err


def test_the_command_needs_a_place_for_a_drafter_from_the_hub(capsys):
    assert cli.main(["publish", "org/mine"]) == 2
    assert "give --output FOLDER or --repo NAME" in capsys.readouterr().err


# custom_generate

# Transformers 5.10 runs a folder's code without being asked to; a repository of the Hub is refused everywhere.
ASKS_FOR_FOLDERS = hasattr(host, "has_file")


@pytest.fixture
def repository(drafter, target_folder, tmp_path, modules_cache):
    folder = tmp_path / "published-drafter.v1"
    write_repository(drafter, folder, target=target_folder)
    assert not modules_cache.exists()
    return folder


@pytest.mark.parametrize("lengths", [[6], [6, 9]])
def test_custom_generate_gives_the_targets_own_tokens(target, repository, lengths, monkeypatch):
    loads = []
    load = DSparkDraftModel.from_pretrained.__func__
    monkeypatch.setattr(
        DSparkDraftModel, "from_pretrained", classmethod(lambda *a, **k: loads.append(a[1]) or load(*a, **k))
    )
    options = {"max_new_tokens": 20, "return_dict_in_generate": True}
    plain = target.generate(**left_padded(lengths), **options)
    for _ in range(2):
        output = target.generate(
            **left_padded(lengths), **options, custom_generate=str(repository), trust_remote_code=True
        )
        assert torch.equal(output.sequences, plain.sequences)
        assert output.statistics.rounds > 0
    assert loads == [str(repository)]  # the second call finds the drafter


def test_custom_generate_takes_positions_streamers_and_sampling(target, repository, capsys):
    ask = {"custom_generate": str(repository), "trust_remote_code": True, "max_new_tokens": 12}
    inputs = left_padded([6])
    streamer = TextStreamer(make_tokenizer(), skip_prompt=True)
    output = target.generate(inputs["input_ids"], **ask, streamer=streamer)
    assert capsys.readouterr().out.split() == [f"w{token}" for token in output[0, 6:].tolist()]
    sampled = []
    for _ in range(2):
        torch.manual_seed(0)
        sampled.append(target.generate(**inputs, **ask, do_sample=True, num_return_sequences=3))
    assert torch.equal(*sampled)
    assert sampled[0].shape == (3, 18)


@pytest.mark.skipif(not ASKS_FOR_FOLDERS, reason="runs a folder's code without trust_remote_code")
def test_custom_generate_of_a_folder_is_refused_without_trust(target, repository, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # nobody answers the question whether to run it
    for trust in ({}, {"trust_remote_code": False}):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            target.generate(**left_padded([6]), custom_generate=str(repository), **trust)


def test_custom_generate_of_a_repository_reads_its_revision(target, repository, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    shutil.copytree(repository, tmp_path / "other")
    make_drafter(target, seed=9, block_size=2).save_pretrained(tmp_path / "other")
    add_to_hub_cache(cache, "org/drafter", repository)
    add_to_hub_cache(cache, "org/drafter", tmp_path / "other", revision="v2")
    monkeypatch.setattr("sys.stdin", None)
    plain = target.generate(**left_padded([6]), max_new_tokens=12)
    ask = {"max_new_tokens": 12, "custom_generate": "org/drafter", "return_dict_in_generate": True}
    ask |= {"cache_dir": str(cache), "local_files_only": True}
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        target.generate(**left_padded([6]), **ask)
    for revision, block_size in ((None, 4), ("v2", 2), (None, 4)):
        where = {} if revision is None else {"revision": revision}
        output = target.generate(**left_padded([6]), **ask, **where, trust_remote_code=True)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.block_size == block_size


def test_custom_generate_refuses_another_drafter(target, drafter, repository):
    ask = {"custom_generate": str(repository), "trust_remote_code": True}
    with pytest.raises(ValueError, match="leave out `assistant_model`"):
        target.generate(**left_padded([6]), **ask, assistant_model=drafter)


def test_custom_generate_called_by_itself_says_how_to_call_it(target, repository):
    function = target.load_custom_generate(str(repository), trust_remote_code=True)
    with pytest.raises(RuntimeError, match="Call this through target.generate"):
        function(model=target, **left_padded([6]))


# Loading by name, as transformers does


def test_a_repository_loads_by_name_and_revision(target, tmp_path):
    cache = tmp_path / "cache"
    for seed, revision in ((1, "main"), (2, "v2")):
        make_drafter(target, seed=seed).save_pretrained(
            tmp_path / revision, max_shard_size="20KB" if seed == 2 else "1GB"
        )
        add_to_hub_cache(cache, "org/drafter", tmp_path / revision, revision)
    where = {"cache_dir": cache, "local_files_only": True, "token": "secret"}
    for seed, revision in ((1, "main"), (2, "v2")):
        loaded = DSparkDraftModel.from_pretrained(
            "org/drafter", revision=revision, dtype=torch.bfloat16, device_map="cpu", **where
        )
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded.fc.weight, make_drafter(target, seed=seed).fc.weight.bfloat16())
    with pytest.raises(OSError, match="couldn.t find them in the cached files"):
        DSparkDraftModel.from_pretrained("org/nothing", **where)


def test_the_package_runs_no_code_of_a_repository(drafter, tmp_path, monkeypatch):
    """Its own class loads the weights, whatever modules lie beside them."""
    drafter.save_pretrained(tmp_path)
    for name in ("configuration_dspark.py", "layers_dspark.py", "modeling_dspark.py"):
        (tmp_path / name).write_text("raise SystemExit('ran code of the repository')")
    monkeypatch.setattr("sys.stdin", None)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is DSparkDraftModel
    assert isinstance(PreTrainedConfig.get_config_dict(tmp_path)[0], dict)
    assert dspark_hf.DSparkDraftModel.from_pretrained(tmp_path).fc is not None
