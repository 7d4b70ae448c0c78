"""Benchmarks: prompts are read, runs compared and counted right, records hold no text, plots are drawn."""

import json
import math
import sys

import pytest
import torch
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.cost_curve import CostCurve
from dspark_hf.evaluation import plots, speed
from dspark_hf.evaluation.prompts import Prompt, read_prompts
from dspark_hf.evaluation.record import environment, quartiles, write_record
from dspark_hf.evaluation.speed import Measurement, Run, Variant, combine, make_variants, measure, summarise
from dspark_hf.metrics import DecodingStatistics, RoundRecord


WORDS = {f"word{i}": i for i in range(64)}


def prompt_line(dataset="sums", domain="math", index=0, turns=("word5 word9 word11",)):
    return json.dumps({"dataset": dataset, "domain": domain, "index": index, "turns": list(turns)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny target, its tokenizer, its drafter and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word2", pad_token="word0")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    target = make_target(num_hidden_layers=2)
    target.save_pretrained(folder / "target")
    fast.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    (folder / "prompts").mkdir()
    sums = [prompt_line(index=7), prompt_line(index=8, turns=["word12 word3", "word44"]), prompt_line(index=9)]
    (folder / "prompts" / "a.jsonl").write_text("\n".join(sums))
    (folder / "prompts" / "b.jsonl").write_text(prompt_line("talk", "chat", 3, ["word21 word33 word8"]) + "\n\n")
    return folder


def folders_of(pair) -> list[str]:
    return [part for name in ("target", "drafter", "prompts") for part in (f"--{name}", str(pair / name))]


@pytest.fixture(scope="module")
def record_path(pair):
    path = pair / "made" / "speed.json"
    options = ["--num-draft-tokens", "2", "4", "--no-sequential-head", "--per-dataset", "2", "--repeats", "2"]
    more = ["--new-tokens", "12", "--threads", str(torch.get_num_threads()), "--output", str(path)]
    speed.main([*folders_of(pair), *options, *more])
    return path


def run(seconds, rounds=None, tokens=(1, 2, 3, 4, 5)):
    """A run; `rounds` are (verified, accepted, committed) of blocks of 4."""
    if rounds is None:
        return Run(seconds, list(tokens))
    return Run(seconds, list(tokens), DecodingStatistics(4, [RoundRecord(0, *counts) for counts in rounds]))


def test_prompts_are_the_first_turns_of_each_datasets_first_lines(pair):
    prompts = read_prompts(pair / "prompts", per_dataset=2)
    assert [(prompt.dataset, prompt.index) for prompt in prompts] == [("sums", 7), ("sums", 8), ("talk", 3)]
    assert prompts[1] == Prompt("sums", "math", 8, "word12 word3")


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ("{", r"bad\.jsonl:2 is not a JSON object"),
        ("[1]", r"bad\.jsonl:2 is not a JSON object"),
        (prompt_line().replace("index", "number"), r"bad\.jsonl:2 has no `index` of type int, got NoneType"),
        (prompt_line(turns=[]), r"bad\.jsonl:2 must have a user's message"),
        (prompt_line(turns=[" "]), r"bad\.jsonl:2 must have a user's message"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, second_line, message):
    (tmp_path / "bad.jsonl").write_text(f"{prompt_line()}\n{second_line}\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path, 20)


def test_missing_and_empty_prompt_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no prompt files \(\*\.jsonl\) in .*nowhere"):
        read_prompts(tmp_path / "nowhere", 20)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        read_prompts(tmp_path, 20)


def test_quartiles_of_few_values():
    assert list(quartiles([1.0, 2.0, 3.0, math.nan]).values()) == [1.5, 2.0, 2.5]
    assert list(quartiles([4.0]).values()) == [4.0] * 3
    assert math.isnan(quartiles([])["median"])


def test_a_summary_pools_rounds_and_seconds_and_takes_quartiles_over_prompts():
    found = [
        Measurement(
            Prompt("sums", "math", 0, ""),
            "v",
            [run(2.0), run(4.0), run(3.0)],
            [run(1.0, [(4, 2, 3)]), run(1.0, [(4, 0, 1)]), run(2.0, [])],  # a policy need not draft the same each time
        ),
        Measurement(Prompt("more", "math", 0, ""), "v", [run(1.0)], [run(2.0, [(4, 4, 5)])]),
        Measurement(Prompt("talk", "chat", 0, ""), "v", [run(1.0)], [run(1.0, [(2, 1, 2), (2, 0, 1)])]),
    ]
    rows = {(row["by"], row["name"]): row for row in summarise(found)}
    assert {row["variant"] for row in rows.values()} == {"v"}
    datasets = {("dataset", name) for name in ("sums", "more", "talk")}
    assert rows.keys() == datasets | {("domain", "math"), ("domain", "chat"), ("all", "all")}
    math_row = rows["domain", "math"]
    assert (math_row["prompts"], math_row["rounds"], math_row["tau"]) == (2, 3, 3.0)
    assert math_row["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert math_row["conditional_acceptance_by_position"] == pytest.approx([2 / 3, 1.0, 1 / 2, 1.0])
    assert math_row["rounds_by_position"] == [3, 2, 2, 1]
    assert math_row["tau_by_prompt"]["median"] == 3.5
    assert math_row["ratio"] == pytest.approx((3 + 1) / (1 + 2))
    assert math_row["ratio_by_prompt"]["median"] == pytest.approx((3 / 1 + 1 / 2) / 2)
    assert (math_row["plain_tokens_per_s"], math_row["dspark_tokens_per_s"]) == pytest.approx((10 / 4, 10 / 3))
    # Only two draft tokens were verified, so nothing is said about later positions.
    assert rows["domain", "chat"]["conditional_acceptance_by_position"] == [0.5, 0.0]
    assert rows["domain", "chat"]["verified_per_round"] == 2.0
    assert rows["all", "all"]["tau"] == pytest.approx(12 / 5)
    assert not any(row["prompts_that_differ"] for row in rows.values())


@pytest.mark.parametrize(("tokens", "index"), [((1, 2, 3, 4, 5), None), ((1, 2, 9, 4, 5), 2), ((1, 2, 3, 4), 4)])
def test_a_difference_in_any_run_is_found(tokens, index):
    found = Measurement(Prompt("sums", "math", 0, ""), "v", [run(1.0)] * 2, [run(1.0, []), run(1.0, [], tokens)])
    assert found.first_difference == index
    assert found.row()["first_difference"] == index


def test_runs_take_turns_and_differing_ones_are_counted(monkeypatch):
    turns = []

    def generate(_target, inputs, _new_tokens, variant=None):
        name = "plain" if variant is None else variant.name
        turns.append(name)
        wrong = name == "b" and inputs == "second"
        return run(1.0, None if variant is None else [(4, 0, 1)], (1, 2, 3 + wrong))

    class Text(str):
        def to(self, _device):
            return self

    monkeypatch.setattr(speed, "generate", generate)
    monkeypatch.setattr(Prompt, "encode", lambda self, _tokenizer: Text(self.text))
    prompts = [Prompt("sums", "math", number, text) for number, text in enumerate(("first", "second"))]
    variants = [Variant(name, None, {"num_assistant_tokens_schedule": "constant"}) for name in "ab"]
    found = measure(make_target(num_hidden_layers=1), None, prompts, variants, 3, repeats=2)
    once = ["plain", "a", "b"]
    assert turns == once + (once + once[::-1]) * 2  # a warm-up first
    counts = {row["variant"]: row["prompts_that_differ"] for row in summarise(found) if row["by"] == "all"}
    assert counts == {"a": 0, "b": 1}


def test_a_run_gives_a_record_without_text(record_path):
    text = record_path.read_text()
    assert "word" not in text
    record = json.loads(text)
    assert record["environment"]["dtype"] == "torch.float32"
    names = [row["name"] for row in record["variants"]]
    assert names == [
        "drafter, 2 draft tokens",
        "drafter, 4 draft tokens",
        "drafter, 2 draft tokens, sequential head off",
        "drafter, 4 draft tokens, sequential head off",
    ]
    assert [row["sequential_head"] for row in record["variants"]] == ["vanilla", "vanilla", None, None]
    assert [(row["dataset"], row["index"]) for row in record["prompts"][::4]] == [
        ("sums", 7),
        ("sums", 8),
        ("talk", 3),
    ]
    assert all(len(row["plain_s"]) == len(row["dspark_s"]) == 2 for row in record["prompts"])
    assert all(row["first_difference"] is None for row in record["prompts"])
    verified = {row["variant"]: row["verified_per_round"] for row in record["summary"] if row["by"] == "all"}
    assert 0 < verified[names[0]] <= 2 < verified[names[1]]
    assert list(record_path.parent.glob("*.partial")) == []


def test_the_table_names_every_variant_and_domain(record_path):
    record = json.loads(record_path.read_text())
    lines = speed.table(record["summary"]).splitlines()
    assert [line for line in lines if line.startswith("drafter")] == [row["name"] for row in record["variants"]]
    assert sum(line.startswith(("math", "chat", "all")) for line in lines) == 3 * 4


def test_plots_are_drawn_beside_the_record(record_path):
    pytest.importorskip("matplotlib")
    files = plots.plot(record_path)
    assert [file.name for file in files] == ["speed_acceptance.png", "speed_domains.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_without_matplotlib_the_error_names_the_extra(record_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"dspark_hf\[plots\]"):
        plots.plot(record_path)


def test_settings_are_combined():
    assert combine(None, None, None) == [{}]
    combined = combine([3, 5], ["threshold"], [0.0, 0.4])
    assert len(combined) == 4
    assert combined[1] == {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "threshold",
        "assistant_confidence_threshold": 0.4,
    }


def test_policies_are_compared_on_costs_that_were_measured_before(pair, tmp_path, monkeypatch):
    events = []
    for owner, name in ((CostCurve, "_measure"), (speed, "generate")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _run=original, _name=name: events.append(_name) or _run(*a))
    options = [
        "--schedule",
        "constant",
        "throughput",
        "--num-draft-tokens",
        "3",
        "--repeats",
        "1",
        "--new-tokens",
        "12",
    ]
    speed.main(
        [*folders_of(pair), *options, "--threads", str(torch.get_num_threads()), "--output", str(tmp_path / "s.json")]
    )
    record = json.loads((tmp_path / "s.json").read_text())
    assert [row["name"] for row in record["variants"]] == [
        "drafter, 3 draft tokens, constant",
        "drafter, 3 draft tokens, throughput",
    ]
    assert all(row["prompts_that_differ"] == 0 for row in record["summary"])
    assert events.count("_measure") == 1
    assert events[0] == "_measure"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--threshold", "0.5"], "only with"),
        (["--schedule", "threshold", "--threshold", "0.5", "--no-sequential-head"], "confidence head"),
        (["--num-draft-tokens", "3", "3"], "one name"),
        (["--repeats", "0"], "at least 1"),
        (["--prompts", "nowhere"], "no prompt files"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(pair, capsys, more, message):
    folders = ["--target", "nowhere", "--drafter", str(pair / "drafter"), "--prompts", str(pair / "prompts")]
    with pytest.raises(SystemExit, match="2"):
        speed.main([*folders, "--threads", str(torch.get_num_threads()), *more])
    assert message in capsys.readouterr().err


def test_a_drafter_without_a_sequential_head_is_measured_once(tmp_path):
    drafter = make_drafter(make_target(num_hidden_layers=2), markov_rank=0, enable_confidence_head=False)
    drafter.save_pretrained(tmp_path / "plain")
    variants = make_variants([str(tmp_path / "plain")], combine(None, None, None), True, "cpu", "float32")
    assert [variant.name for variant in variants] == ["plain"]


def test_a_record_is_valid_json_with_one_line_for_an_item(tmp_path):
    record = {
        "environment": environment("module", make_target(num_hidden_layers=1)),
        "rows": [{"a": [1, 2]}, {"a": []}],
    }
    write_record(tmp_path / "new" / "record.json", record)
    text = (tmp_path / "new" / "record.json").read_text()
    assert json.loads(text) == record
    assert '\n  {"a": [1, 2]},\n' in text
