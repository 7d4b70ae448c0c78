"""`training/data.py`: responses are the target's own, files survive kills and full disks, prompts come from three sources."""

import argparse
import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import sys
import time
import types
from array import array

import pytest
import torch
from conftest import EOS, VOCAB, make_target
from test_hybrid_targets import make_hybrid
from test_more_targets import FAMILIES, build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.training import prompts, rows, self_instruct
from dspark_hf.training.data import SampleFile, Settings, add_data_arguments, run_data, write_samples
from dspark_hf.training.prompts import Prompt


USER, ASSISTANT, FIRST_WORD = 3, 4, 5
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ turn.role }}> {{ turn.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = Settings(
    end_ids=(EOS,), temperatures=(0.0, 0.8), max_new_tokens=40, max_length=60, min_response_tokens=1, seed=5
)
GREEDY = dataclasses.replace(SETTINGS, temperatures=(0.0,))


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    special = {"<pad>": 0, "<bos>": 1, "<end>": EOS, "<user>": USER, "<assistant>": ASSISTANT}
    words = special | {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    model = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def random_prompts(count: int, seed: int = 3) -> list[Prompt]:
    """Prompts of 1 to 9 tokens."""
    torch.manual_seed(seed)
    return [
        Prompt(index, array("i", torch.randint(FIRST_WORD, VOCAB, (1 + 5 * index % 9,)).tolist()))
        for index in range(count)
    ]


def read(path) -> list[dict]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda sample: sample["index"])


def manifest_of(path) -> dict:
    return json.loads(path.with_name(path.name + ".manifest.json").read_text())


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def run(folder, *more):
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    always = [
        "--target",
        str(folder),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--rows",
        "4",
        "--max-new-tokens",
        "30",
    ]
    return run_data(parser.parse_args([*always, *map(str, more)]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize(("count", "num_rows"), [(7, 3), (21, 17)])
def test_greedy_responses_are_what_the_target_alone_writes(family, count, num_rows, tmp_path):
    target = make_target(family)
    own = random_prompts(count)
    assert len({len(prompt.ids) for prompt in own}) > 2  # of 17 rows, three prompts are read together, padded
    write_samples(target, own, tmp_path / "a.jsonl", GREEDY, num_rows=num_rows)
    samples = read(tmp_path / "a.jsonl")
    assert [sample["index"] for sample in samples] == list(range(count))
    for prompt, sample in zip(own, samples, strict=True):
        ids = torch.tensor([prompt.ids.tolist()])
        alone = target.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert sample["prompt_ids"] == prompt.ids.tolist()
        assert sample["response_ids"] == alone
        assert sample["finish"] == ("end" if alone[-1] == EOS else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_of_other_families_are_what_they_write_alone(family, tmp_path):
    target = build(family)
    target.generation_config.eos_token_id = EOS
    own = random_prompts(5)
    write_samples(target, own, tmp_path / "a.jsonl", dataclasses.replace(GREEDY, max_new_tokens=12), num_rows=3)
    for prompt, sample in zip(own, read(tmp_path / "a.jsonl"), strict=True):
        ids = torch.tensor([prompt.ids.tolist()])
        alone = target.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert sample["response_ids"] == alone


def test_a_target_with_recurrent_states_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match=r"Qwen3_5ForCausalLM keeps recurrent states.*response_ids"):
        write_samples(make_hybrid("qwen3_5"), random_prompts(2), tmp_path / "a.jsonl", GREEDY)
    assert list(tmp_path.iterdir()) == []


def test_every_row_is_filled_and_only_prompts_of_like_length_are_padded(target):
    waiting = iter([Prompt(index, array("i", [FIRST_WORD] * length)) for index, length in enumerate([40, 9, 1] * 7)])
    written = rows.Rows(target, 19, GREEDY)
    assert written.fill(waiting)
    assert all(row is not None for row in written.rows)
    assert next(waiting).index == 19
    prompts = [Prompt(index, array("i", [0] * length)) for index, length in enumerate([1, 2, 2, 3, 9, 18, 19])]
    assert [[len(prompt.ids) for prompt in group] for group in rows._alike(prompts, 2)] == [
        [1, 2],
        [2, 3],
        [9, 18],
        [19],
    ]


def test_a_sample_depends_on_seed_and_index_and_not_on_its_row(target, tmp_path):
    own = random_prompts(9)
    write_samples(target, own, tmp_path / "a", SETTINGS, num_rows=1)
    write_samples(target, own, tmp_path / "b", SETTINGS, num_rows=9)
    write_samples(target, own, tmp_path / "c", dataclasses.replace(SETTINGS, seed=6), num_rows=4)
    a, b, c = (read(tmp_path / name) for name in "abc")
    assert a == b
    assert [sample["temperature"] for sample in a] == [0.0, 0.8] * 4 + [0.0]
    assert a[::2] == c[::2]
    assert all(one["response_ids"] != other["response_ids"] for one, other in zip(a[1::2], c[1::2], strict=True))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (VOCAB + 9, 0.6)])
def test_first_tokens_follow_the_targets_distribution(target, tmp_path, top_k, top_p):
    count, ids = 8000, [7]
    settings = Settings((EOS,), (0.7,), top_k, top_p, max_new_tokens=1, max_length=8, min_response_tokens=1)
    same = [Prompt(index, array("i", ids)) for index in range(count)]
    write_samples(target, same, tmp_path / "a", settings, num_rows=count)
    drawn = torch.tensor([sample["response_ids"][0] for sample in read(tmp_path / "a")])
    logits = target(torch.tensor([ids])).logits[0, -1].double() / 0.7
    probs, order = logits.softmax(-1).sort(descending=True)
    kept = max(int((probs.cumsum(0) - probs < top_p).sum()), 1) if top_p < 1 else top_k or VOCAB
    assert set(drawn.tolist()) <= set(order[:kept].tolist())
    expected = torch.zeros(VOCAB, dtype=torch.double).scatter_(0, order[:kept], probs[:kept] / probs[:kept].sum())
    observed = torch.bincount(drawn, minlength=VOCAB).double()
    large = expected * count >= 5  # the rest is one class
    expected, observed = (
        torch.cat([values[large], values[~large].sum()[None]]) for values in (expected * count, observed)
    )
    statistic = ((observed - expected) ** 2 / expected.clamp_min(1)).sum()
    # Fails by chance with probability 1e-9.
    assert torch.special.gammaincc(torch.tensor(len(expected) / 2 - 0.5), statistic.float() / 2) > 1e-9


def test_a_response_that_loops_ends_there(tmp_path):
    target = make_target(num_hidden_layers=2)
    with torch.no_grad():  # whatever came before, token 9 comes next
        target.lm_head = torch.nn.Linear(target.config.hidden_size, VOCAB)
        target.lm_head.weight.zero_()
        target.lm_head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(9), VOCAB))
    settings = dataclasses.replace(GREEDY, max_new_tokens=200, max_length=240)
    counts = write_samples(target, random_prompts(2), tmp_path / "a", settings)
    assert [sample["response_ids"] for sample in read(tmp_path / "a")] == [[9] * 96] * 2
    assert (counts["loop"], counts["samples"]) == (2, 2)
    assert rows._is_loop([5, 6, *range(7, 39), *range(7, 39), *range(7, 39)])
    assert not rows._is_loop([1] * 95)
    assert not rows._is_loop([*range(40, 73)] * 4)


def test_short_responses_and_long_prompts_are_dropped_and_counted(target, tmp_path):
    long = Prompt(50, array("i", [9] * 21))
    settings = dataclasses.replace(SETTINGS, min_response_tokens=40)
    counts = write_samples(target, [*random_prompts(12), long], tmp_path / "a", settings)
    samples = read(tmp_path / "a")
    assert counts["long_prompt"] == 1
    assert 0 < counts["short_response"] == 12 - len(samples)
    assert all(len(sample["response_ids"]) == 40 for sample in samples)
    assert counts["response_tokens"] == 40 * len(samples)
    manifest = manifest_of(tmp_path / "a")
    assert manifest["counts"] == counts
    assert manifest["complete"]
    assert manifest["made_with"]["dtype"] == "torch.float32"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a forked process is the quick one to kill")
def test_a_killed_run_goes_on_with_nothing_lost_or_doubled(target, tmp_path):
    own, path = random_prompts(30), tmp_path / "killed.jsonl"
    write_samples(target, own, tmp_path / "whole.jsonl", SETTINGS, 4)
    arguments = (target, own, path, SETTINGS, 4)
    process = multiprocessing.get_context("fork").Process(target=write_samples, args=arguments)
    process.start()
    while process.is_alive() and not (path.exists() and path.read_bytes().count(b"\n") >= 5):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    survived = path.read_bytes().count(b"\n")
    assert 5 <= survived < 30
    assert not manifest_of(path)["complete"]
    with path.open("ab") as file:
        file.write(b'{"index": 29, "prompt_ids": [7, 8')
    write_samples(*arguments)
    assert len(path.read_text().splitlines()) == 30
    assert read(path) == read(tmp_path / "whole.jsonl")
    assert manifest_of(path)["counts"] == manifest_of(tmp_path / "whole.jsonl")["counts"]


def test_a_full_disk_leaves_whole_lines_and_says_so(target, tmp_path, monkeypatch):
    class Disk:
        def __init__(self, file):
            self.file, self.room = file, 1000

        def write(self, content):
            written = self.file.write(content[: self.room])
            self.room -= written
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written

        def __getattr__(self, name):
            return getattr(self.file, name)

    class OnFullDisk(SampleFile):
        def __init__(self, path):
            super().__init__(path)
            self.file = Disk(self.file)

    own, path = random_prompts(20), tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("dspark_hf.training.data.SampleFile", OnFullDisk)
        with pytest.raises(OSError, match=r"No space left.*samples are whole.*same command again.*a\.jsonl"):
            write_samples(target, own, path, SETTINGS, 4)
    assert path.read_bytes().endswith(b"}\n")
    assert 0 < len(read(path)) < 20
    write_samples(target, own, path, SETTINGS, 4)
    assert [sample["index"] for sample in read(path)] == list(range(20))


def test_a_file_without_samples_is_no_success(target, tmp_path):
    settings = dataclasses.replace(SETTINGS, min_response_tokens=41)
    with pytest.raises(ValueError, match="All 3 responses are shorter than 41 tokens"):
        write_samples(target, random_prompts(3), tmp_path / "a", settings)
    assert not manifest_of(tmp_path / "a")["complete"]


def test_a_file_made_with_other_settings_is_refused(target, tmp_path):
    own, path = random_prompts(4), tmp_path / "a.jsonl"
    first = write_samples(target, own, path, SETTINGS)
    assert write_samples(target, own, path, SETTINGS) == first
    other = dataclasses.replace(SETTINGS, temperatures=(1.0,), seed=9)
    with pytest.raises(
        ValueError, match=r"temperatures was \[0.0, 0.8\], is now \[1.0\]; seed was 5, is now 9\. Choose"
    ):
        write_samples(target, own, path, other)
    with pytest.raises(ValueError, match="prompts_sha256 was"):
        write_samples(target, random_prompts(4, seed=4), path, SETTINGS)
    path.with_name("a.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no a\.jsonl\.manifest\.json"):
        write_samples(target, own, path, SETTINGS)
    assert [sample["index"] for sample in read(path)] == [0, 1, 2, 3]


def test_a_finished_file_that_is_gone_or_shorter_is_written_again(target, tmp_path):
    own, path = random_prompts(6), tmp_path / "a.jsonl"
    first = write_samples(target, own, path, SETTINGS)
    samples = read(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert write_samples(target, own, path, SETTINGS) == first
    assert read(path) == samples
    path.unlink()
    assert write_samples(target, own, path, SETTINGS) == first
    assert read(path) == samples


def test_two_writers_of_one_file_and_a_repeated_index_are_refused(target, tmp_path):
    own, path = random_prompts(3), tmp_path / "a.jsonl"
    write_samples(target, own, path, SETTINGS)
    file = SampleFile(path)
    with pytest.raises(ValueError, match=r"a\.jsonl is being written by another process.*--shard"):
        write_samples(target, own, path, SETTINGS)
    file.close()
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[1])
    with pytest.raises(ValueError, match=r"a\.jsonl:4 repeats index"):
        write_samples(target, own, path, SETTINGS)


@pytest.mark.parametrize("more", [["--self-instruct", "--num-prompts", "60"], ["--prompts", "prompts.jsonl", "--raw"]])
def test_shards_add_up_to_the_whole(folder, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "w{i} w9"}}\n' for i in range(5, 14)))
    more = [*more, "--min-response-tokens", "1"]
    run(folder, *more, "--output", tmp_path / "whole.jsonl")
    for shard in range(2):
        run(folder, *more, "--output", tmp_path / f"{shard}.jsonl", "--shard", f"{shard}/2")
    parts = [read(tmp_path / f"{shard}.jsonl") for shard in range(2)]
    assert [{sample["index"] % 2 for sample in part} for part in parts] == [{0}, {1}]
    assert sorted(parts[0] + parts[1], key=lambda sample: sample["index"]) == read(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("shard", ["2/2", "1", "-1/2", "a/b"])
def test_a_shard_that_is_none_is_refused(folder, tmp_path, capsys, shard):
    with pytest.raises(SystemExit):
        run(folder, "--prompts", "p.jsonl", "--output", tmp_path / "a.jsonl", f"--shard={shard}")
    assert "such as 0/2 and 1/2" in capsys.readouterr().err


def test_a_line_of_another_kind_is_named(tmp_path):
    (tmp_path / "a").write_text('{"text": "hello"}\n')
    with pytest.raises(ValueError, match="a:1 is no sample"):
        SampleFile(tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": (0.5, -1.0)}, "temperatures of 0"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\]"),
        ({"max_new_tokens": 60}, "between 1 and 59"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_prompts_that_cannot_be_written_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="All 1 prompts are longer than 20 tokens"):
        write_samples(target, [Prompt(0, array("i", [9] * 21))], tmp_path / "a", SETTINGS)
    with pytest.raises(ValueError, match="1 row or more"):
        write_samples(target, random_prompts(2), tmp_path / "a", SETTINGS, num_rows=0)
    assert not list(tmp_path.iterdir())


def test_prompts_are_texts_or_chats(tmp_path):
    file, tokenizer = tmp_path / "p.jsonl", make_tokenizer()
    chat = [{"role": "user", "content": "w8"}, {"role": "assistant", "content": "w9"}]
    file.write_text('{"prompt": "w5 w6"}\n\n' + json.dumps({"messages": chat}) + "\n")
    both = prompts.read_prompts(tokenizer, str(file))
    assert [prompt.ids.tolist() for prompt in both] == [[USER, 5, 6, EOS, ASSISTANT], [USER, 8, EOS, ASSISTANT]]
    assert [prompt.index for prompt in both] == [0, 1]
    raw = prompts.read_prompts(make_tokenizer(None), str(file), limit=1, raw=True)
    assert [prompt.ids.tolist() for prompt in raw] == [[5, 6]]


@pytest.mark.parametrize(
    ("text", "raw", "message"),
    [
        ("", False, "holds no prompts"),
        ("\n \n", False, "holds no prompts"),
        ('{"prompt": "w5"}\n{"prompt": \n', False, r"p\.jsonl:2 is not a JSON object"),
        ('{"prompt": "w5"}\n\n{"text": "w5"}\n', False, r"p\.jsonl:3 is no prompt"),
        ('{"prompt": "  "}\n', False, r"p\.jsonl:1 is no prompt"),
        ("[1, 2]\n", False, r"p\.jsonl:1 is no prompt"),
        ('{"messages": []}\n', False, r"p\.jsonl:1 is no prompt"),
        ('{"messages": [{"role": "assistant", "content": "w5"}]}\n', False, r"p\.jsonl:1 is no prompt"),
        ('{"messages": [{"role": "user", "content": "w5"}]}\n', True, "with --raw"),
        (
            '{"messages": [{"role": "user", "content": "w5"}, {"role": "tool", "content": "w5"}]}',
            False,
            r"p\.jsonl:1 does not go through the target's chat template: no tools here",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, raw, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.read_prompts(make_tokenizer(), str(tmp_path / "p.jsonl"), raw=raw)


def test_a_target_without_chat_template_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "w5"}\n')
    with pytest.raises(ValueError, match="no chat template.*--raw"):
        prompts.read_prompts(make_tokenizer(None), str(tmp_path / "p.jsonl"))
    with pytest.raises(ValueError, match="no chat template"):
        self_instruct.find_user_turn(make_tokenizer(None))


def test_a_missing_file_and_a_missing_library_are_named(monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.jsonl"):
        prompts.read_prompts(make_tokenizer(), "nowhere.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"org/some-data is no file.*pip install datasets"):
        prompts.read_prompts(make_tokenizer(), "org/some-data")


def test_a_data_set_is_read_by_name(monkeypatch):
    sets = {("org/some-data", "test"): [{"prompt": "w5 w6"}, {"prompt": "w7"}]}
    library = types.SimpleNamespace(load_dataset=lambda name, split: sets[name, split])
    monkeypatch.setitem(sys.modules, "datasets", library)
    (prompt,) = prompts.read_prompts(make_tokenizer(), "org/some-data", "test", limit=1)
    assert prompt.ids.tolist() == [USER, 5, 6, EOS, ASSISTANT]


def test_the_users_turn_is_found_in_the_template():
    assert self_instruct.find_user_turn(make_tokenizer()) == self_instruct.UserTurn([USER], EOS)
    plain = make_tokenizer("{% for turn in messages %}<user> {{ turn.content }} w9 {% endfor %}<assistant>")
    with pytest.raises(ValueError, match="no special token behind the user's text, but ' w9 <assistant>'"):
        self_instruct.find_user_turn(plain)


def test_turns_are_filtered(tmp_path):
    turns = [
        ([5, 6, 7, EOS], "end"),
        ([8, 9, EOS], "end"),
        ([5, 6, 7, EOS], "end"),
        ([5, USER, 6, 7, EOS], "end"),
        ([5, 6, 7, 8], "length"),
        ([5] * 96, "loop"),
        ([10, 11, 12, EOS], "end"),
        ([EOS], "end"),
    ]
    lines = [
        {"index": i, "prompt_ids": [USER], "response_ids": ids, "finish": finish}
        for i, (ids, finish) in enumerate(turns)
    ]
    lines[6] |= {"prompt_ids": [USER, 10, 11], "response_ids": [12, EOS]}  # began with an opening of two words
    lines[7] |= {"prompt_ids": [USER, 13, 14, 15]}  # an opening, and nothing else
    user_turn = self_instruct.find_user_turn(make_tokenizer())
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    kept, dropped = self_instruct.keep_turns(make_tokenizer(), user_turn, path)
    assert [(prompt.index, prompt.ids.tolist()) for prompt in kept] == [
        (0, [USER, 5, 6, 7, EOS, ASSISTANT]),
        (6, [USER, 10, 11, 12, EOS, ASSISTANT]),
    ]
    reasons = ("turn_short", "turn_duplicate", "turn_special_token", "turn_length", "turn_loop")
    assert dropped == dict.fromkeys(reasons, 1) | {"turn_short": 2}
    path.write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(ValueError, match="None of the 1 user turns .*'turn_short': 1"):
        self_instruct.keep_turns(make_tokenizer(), user_turn, path)


def test_the_target_writes_both_turns(folder, tmp_path):
    output = tmp_path / "new" / "s.jsonl"
    counts = run(folder, "--self-instruct", "--num-prompts", 24, "--output", output, "--min-response-tokens", 1)
    turns, samples = read(output.with_name("s.turns.jsonl")), read(output)
    assert len(turns) == 24
    assert {turn["temperature"] for turn in turns} == {1.0}
    assert all(turn["prompt_ids"] == [USER] for turn in turns)
    assert 0 < len(samples) == counts["samples"] < 24
    dropped = sum(counts[name] for name in counts if name.startswith("turn_"))
    assert len(samples) + dropped == 24
    for sample in samples:
        assert sample["prompt_ids"] == [USER, *turns[sample["index"]]["response_ids"], ASSISTANT]
    assert manifest_of(output)["counts"] == counts
    with pytest.raises(ValueError, match="--self-instruct takes --num-prompts"):
        run(folder, "--self-instruct", "--output", output)


def test_openings_begin_the_turns(folder, tmp_path):
    (tmp_path / "openings.txt").write_text("w5 w6\n\n  w7  \n")
    options = [
        "--self-instruct",
        "--num-prompts",
        24,
        "--openings",
        tmp_path / "openings.txt",
        "--min-response-tokens",
        1,
    ]
    run(folder, *options, "--output", tmp_path / "s.jsonl")
    turns, samples = read(tmp_path / "s.turns.jsonl"), read(tmp_path / "s.jsonl")
    assert [turn["prompt_ids"] for turn in sorted(turns, key=lambda turn: turn["index"])] == [
        [USER, 5, 6],
        [USER, 7],
    ] * 12
    written = {turn["index"]: turn["prompt_ids"] + turn["response_ids"] for turn in turns}
    assert samples
    assert all(sample["prompt_ids"] == [*written[sample["index"]], ASSISTANT] for sample in samples)


def test_openings_that_are_none_are_refused(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    options = ["--openings", tmp_path / "empty.txt", "--output", tmp_path / "s.jsonl"]
    with pytest.raises(ValueError, match=r"empty\.txt holds no openings"):
        run(folder, "--self-instruct", "--num-prompts", 2, *options)
    with pytest.raises(ValueError, match="add --self-instruct"):
        run(folder, "--prompts", tmp_path / "p.jsonl", *options)
    assert not (tmp_path / "s.jsonl").exists()


def test_prompts_from_a_file(folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w7 w8"}\n')
    options = ["--prompts", tmp_path / "p.jsonl", "--min-response-tokens", 1, "--temperature", "0"]
    assert run(folder, *options, "--output", tmp_path / "a.jsonl")["samples"] == 2
    assert manifest_of(tmp_path / "a.jsonl")["made_with"]["end_ids"] == [EOS]
    assert run(folder, *options, "--output", tmp_path / "b.jsonl", "--raw", "--num-prompts", 1)["samples"] == 1
    assert read(tmp_path / "b.jsonl")[0]["prompt_ids"] == [5, 6]
    with pytest.raises(ValueError, match="is no torch dtype"):
        run(folder, *options, "--output", tmp_path / "c.jsonl", "--dtype", "float23")
