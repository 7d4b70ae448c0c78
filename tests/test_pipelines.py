"""Pipelines with a drafter, and code that calls `generate()` in its own way and cannot pass one: `attach`."""

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import (
    PAD,
    add_to_hub_cache,
    left_padded,
    make_drafter,
    make_scripted,
    make_target,
    make_tokenizer,
    oracle_script,
)
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import dspark_hf
from dspark_hf.outputs import DSparkGenerateOutput
from dspark_hf.publishing import write_repository


GREEDY = {"max_new_tokens": 20, "do_sample": False}
CHAT = [{"role": "user", "content": "w9 w9 w30"}]
WAYS = ["a folder", "an instance"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a published drafter on disk."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target()
    target.save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    write_repository(make_drafter(target), root / "drafter", target=root / "target")
    return root


@pytest.fixture(scope="module")
def plain(folders):
    return pipeline("text-generation", model=str(folders / "target"))


@pytest.fixture(scope="module")
def drafting(folders):
    """Pipelines whose drafter was given in different ways."""
    name, target = str(folders / "drafter"), str(folders / "target")
    instance = dspark_hf.DSparkDraftModel.from_pretrained(name)
    return {
        way: pipeline("text-generation", model=target, assistant_model=drafter)
        for way, drafter in zip(WAYS, (name, instance), strict=True)
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ("w5 w9 w11", {}),
        ("w5 w9 w11", {"return_full_text": False}),
        ("w5 w9 w11", {"return_tensors": True}),
        (["w5 w9 w11 w40", "w7 w8", "w33"], {"batch_size": 3}),
        (["w5 w9 w11 w40", "w7 w8", "w33"], {"batch_size": 2, "return_full_text": False}),
        (CHAT, {}),
        ([CHAT, CHAT[:1] + [{"role": "assistant", "content": "w4"}]], {"batch_size": 2}),
        ("w5 w9", {"repetition_penalty": 1.3, "min_new_tokens": 12}),
    ],
)
def test_a_pipeline_writes_what_it_writes_alone(plain, drafting, way, inputs, options):
    drafted = drafting[way]
    assert type(drafted.assistant_model) is dspark_hf.DSparkDraftModel
    calls = count_calls(drafted.assistant_model)
    assert drafted(inputs, **GREEDY, **options) == plain(inputs, **GREEDY, **options)
    assert calls, "the drafter was not used"


def count_calls(drafter) -> list:
    calls: list = []

    def count(*_args):
        calls.append(1)
        handle.remove()

    handle = drafter.register_forward_pre_hook(count)
    return calls


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_streams(plain, drafting, way, capsys):
    texts = []
    for generator in (plain, drafting[way]):
        generator(CHAT, **GREEDY, streamer=TextStreamer(generator.tokenizer, skip_prompt=True))
        texts.append(capsys.readouterr().out)
    assert len(texts[0].split()) == 20
    assert texts[0] == texts[1]


def test_a_pipeline_repeats_a_sample_with_its_seed(drafting):
    sampled = []
    for _ in range(2):
        torch.manual_seed(5)
        sampled.append(drafting["a folder"]("w5 w9", max_new_tokens=12, do_sample=True, num_return_sequences=3))
    assert sampled[0] == sampled[1]
    assert len(sampled[0]) == 3


def test_a_drafter_in_a_string_takes_the_targets_dtype(folders):
    generator = pipeline(
        "text-generation",
        model=str(folders / "target"),
        dtype=torch.bfloat16,
        assistant_model=str(folders / "drafter"),
    )
    assert generator.assistant_model.dtype == torch.bfloat16
    assert len(generator("w5 w9", max_new_tokens=4, return_tensors=True)[0]["generated_token_ids"]) == 6


def test_special_ids_may_differ_and_vocabularies_be_padded(folders, tmp_path, plain):
    """The pipeline then hands the drafter's tokenizer over, which is the target's."""
    drafter = dspark_hf.DSparkDraftModel.from_pretrained(folders / "drafter")
    drafter.config.pad_token_id = 5
    drafter.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(folders / "target"), assistant_model=str(tmp_path))
    assert generator.assistant_tokenizer is not None
    assert generator("w5 w9", **GREEDY) == plain("w5 w9", **GREEDY)


def test_a_pipeline_runs_a_target_that_was_attached_to(folders, plain):
    generator = pipeline("text-generation", model=str(folders / "target"))
    drafter = dspark_hf.DSparkDraftModel.from_pretrained(folders / "drafter")
    dspark_hf.attach(generator.model, drafter)
    calls = count_calls(drafter)
    texts = ["w5 w9 w11 w40", "w7 w8"]
    assert generator(texts, **GREEDY, batch_size=2) == plain(texts, **GREEDY, batch_size=2)
    assert calls


# Names of repositories, in a process of its own

BY_NAME = """
import json, sys
import torch
import dspark_hf
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

greedy = {"max_new_tokens": 12, "do_sample": False}
generator = pipeline("text-generation", model="org/target", assistant_model="org/drafter")
text = generator("w5 w9 w11", **greedy)
assert type(generator.assistant_model) is dspark_hf.DSparkDraftModel
assert generator.assistant_tokenizer is None
assert text == pipeline("text-generation", model="org/target")("w5 w9 w11", **greedy)

target = AutoModelForCausalLM.from_pretrained("org/target")
inputs = AutoTokenizer.from_pretrained("org/drafter")("w5 w9 w11", return_tensors="pt")
plain = target.generate(**inputs, **greedy)
drafter = dspark_hf.DSparkDraftModel.from_pretrained("org/drafter", local_files_only=True)
assert torch.equal(target.generate(**inputs, **greedy, assistant_model=drafter), plain)
try:
    target.generate(**inputs, **greedy, custom_generate="org/drafter")
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
else:
    raise SystemExit("ran remote code that nobody trusted")
assert not any(name.startswith("transformers_modules.org") for name in sys.modules)
custom = {"custom_generate": "org/drafter", "trust_remote_code": True, "return_dict_in_generate": True}
output = target.generate(**inputs, **greedy, **custom)
assert torch.equal(output.sequences, plain)
assert output.statistics.rounds > 0
assert drafter.config.target_name == "org/target"
drafter.config.target_name = None
dspark_hf.publishing.write_repository(drafter, sys.argv[1], target="org/target")
print(json.loads(open(sys.argv[1] + "/config.json").read())["target_name"])
"""


def test_names_of_repositories_work_offline(folders, tmp_path):
    published = tmp_path / "published"
    write_repository(
        dspark_hf.DSparkDraftModel.from_pretrained(folders / "drafter"),
        published,
        target=folders / "target",
        base_model="org/target",
    )
    add_to_hub_cache(tmp_path / "home" / "hub", "org/target", folders / "target")
    add_to_hub_cache(tmp_path / "home" / "hub", "org/drafter", published)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME, str(tmp_path / "again")],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "org/target"
    assert "base_model: org/target" in (tmp_path / "again" / "README.md").read_text()
    assert json.loads((published / "config.json").read_text())["target_name"] == "org/target"


# Callers that cannot pass a drafter


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def attached(target):
    """The target, drafting by itself with a drafter that is sometimes right; the text of `left_padded([6, 9])` is known."""
    inputs = left_padded([6, 9])
    plain = target.generate(**inputs, max_new_tokens=40)
    right = oracle_script(plain, [6, 9], 9)
    drafter = make_scripted(
        target, lambda row, position: right(row, position) if position % 5 else (right(row, position) + 1) % 64
    )
    dspark_hf.attach(target, drafter)
    return target


class RowsEndAtTokens(StoppingCriteria):
    """As evaluation harnesses have it: state for each row, and one plain `bool` for the batch."""

    def __init__(self, tokens: list[int], rows: int, prompt_length: int):
        self.tokens, self.prompt_length = tokens, prompt_length
        self.done = [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        for row, text in enumerate(input_ids[:, self.prompt_length :][:, -2:].tolist()):
            self.done[row] |= any(token in text for token in self.tokens)
        return all(self.done)


def test_a_call_as_evaluation_harnesses_make_it(attached):
    inputs = left_padded([6, 9])
    free = attached.generate(**inputs, max_new_tokens=30, assistant_model=None)
    stops = [int(free[0, 9 + 11]), int(free[1, 9 + 14])]
    outputs = [
        attached.generate(
            **inputs,
            **choice,
            max_length=9 + 30,
            stopping_criteria=StoppingCriteriaList([RowsEndAtTokens(stops, 2, 9)]),
            do_sample=False,
            pad_token_id=PAD,
            use_cache=True,
        )
        for choice in ({}, {"assistant_model": None})
    ]
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] < 9 + 30


def test_a_call_as_servers_make_it(attached):
    """In a thread, one streamed request after the other, with a config and the tokenizer beside it."""
    tokenizer = make_tokenizer()
    for lengths in ([6], [9]):
        inputs = left_padded(lengths)
        arguments = {**inputs, "generation_config": GenerationConfig(**GREEDY, eos_token_id=2), "tokenizer": tokenizer}
        plain = attached.generate(**arguments, assistant_model=None)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        results = []

        def work(arguments=arguments, streamer=streamer, results=results):
            results.append(attached.generate(**arguments, streamer=streamer, return_dict_in_generate=True))

        thread = threading.Thread(target=work)
        thread.start()
        words = "".join(streamer).split()
        thread.join()
        assert [f"w{token}" for token in plain[0, lengths[0] :].tolist()] == words
        assert isinstance(results[0], DSparkGenerateOutput)


def test_transformers_serve_drafts(folders, monkeypatch):
    """With its own classes, as docs/hub.md tells to start it."""
    try:
        from transformers.cli.serving import model_manager as managing
        from transformers.cli.serving import utils as serving
    except (ImportError, NameError):
        pytest.skip("older releases import their server with its extra only")
    load = managing.ModelManager._load_model
    drafter = dspark_hf.DSparkDraftModel.from_pretrained(folders / "drafter")

    def load_and_attach(self, *args, **kwargs):
        target = load(self, *args, **kwargs)
        dspark_hf.attach(target, drafter)
        return target

    monkeypatch.setattr(managing.ModelManager, "_load_model", load_and_attach)
    monkeypatch.setattr(managing.ModelManager, "_load_processor", lambda *_, **__: make_tokenizer())
    models = managing.ModelManager(device="cpu", dtype="float32", model_timeout=-1)
    model, tokenizer = models.load_model_and_processor(f"{folders / 'target'}@main")
    inputs = dict(tokenizer.apply_chat_template(CHAT, return_tensors="pt", return_dict=True))
    plain = model.generate(**inputs, **GREEDY, assistant_model=None)[0, inputs["input_ids"].shape[1] :].tolist()

    async def serve() -> tuple[list[int], str]:
        manager = serving.GenerateManager()
        arguments = (model, tokenizer, inputs, GenerationConfig(**GREEDY, eos_token_id=2, pad_token_id=PAD), "request")
        _, _, whole = await manager.generate_non_streaming(*arguments)
        queue, _ = manager.generate_streaming(*arguments)
        pieces = []
        while (piece := await asyncio.wait_for(queue.get(), timeout=60)) is not None:
            pieces.append(piece)
        return whole.tolist(), "".join(pieces)

    calls = count_calls(drafter)
    whole, streamed = asyncio.run(serve())
    assert calls
    assert whole == plain
    assert streamed.split() == [f"w{token}" for token in plain]


def test_a_streamer_that_raises_ends_the_call_and_the_next_one_works(attached):
    """Servers cancel a request so."""

    class Cancelled(Exception):
        pass

    class Streamer:
        seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 6:
                raise Cancelled

        def end(self):
            raise AssertionError("a cancelled request has no end")

    inputs = left_padded([6])
    with pytest.raises(Cancelled):
        attached.generate(**inputs, **GREEDY, streamer=Streamer())
    assert torch.equal(
        attached.generate(**inputs, **GREEDY), attached.generate(**inputs, **GREEDY, assistant_model=None)
    )


@pytest.mark.parametrize("training", [False, True])
def test_a_call_as_trainers_make_it(attached, training):
    attached.train(training)  # online training samples between its steps
    inputs = left_padded([6, 9])
    config = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=PAD, eos_token_id=2)
    calls = [
        attached.generate(**inputs, **choice, generation_config=config, disable_compile=True)
        for choice in ({}, {"assistant_model": None})
    ]
    assert torch.equal(*calls)
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.mul_(1.1)  # the weights move on, the drafter stays
    calls = [
        attached.generate(**inputs, **choice, generation_config=config, disable_compile=True)
        for choice in ({}, {"assistant_model": None})
    ]
    assert torch.equal(*calls)


def test_a_deep_copy_of_an_attached_target_runs_itself(attached):
    inputs = left_padded([6])
    before = attached.generate(**inputs, **GREEDY)
    copied = copy.deepcopy(attached)
    with torch.no_grad():
        copied.lm_head.weight.copy_(copied.lm_head.weight.flip(0))
    run = copied.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert isinstance(run, DSparkGenerateOutput)
    assert torch.equal(run.sequences, copied.generate(**inputs, **GREEDY, assistant_model=None))
    assert not torch.equal(run.sequences, before)
    dspark_hf.detach(copied)
    assert not isinstance(copied.generate(**inputs, return_dict_in_generate=True, **GREEDY), DSparkGenerateOutput)
    assert isinstance(attached.generate(**inputs, return_dict_in_generate=True, **GREEDY), DSparkGenerateOutput)


def test_an_attached_target_is_saved_as_it_is(attached, tmp_path):
    attached.save_pretrained(tmp_path)
    assert not [path for path in Path(tmp_path).iterdir() if "drafter" in path.name]
    loaded = type(attached).from_pretrained(tmp_path)
    assert not isinstance(loaded.generate(**left_padded([6]), return_dict_in_generate=True), DSparkGenerateOutput)
    assert set(loaded.state_dict()) == set(attached.state_dict())
