"""Generation under load and the cost of a decision: what is counted, records that go on, figures."""

import json

import pytest
import torch
from conftest import make_drafter, make_scripted, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.cost_curve import ENOUGH_REPEATS
from dspark_hf.evaluation import load, plots, scheduling_cost
from dspark_hf.evaluation.load import BatchRun, Settings, make_batches, make_policies, mixed_prompts, summarise
from dspark_hf.evaluation.prompts import Prompt
from dspark_hf.metrics import DecodingStatistics, RoundRecord
from dspark_hf.scheduling import SCHEDULES


POLICIES = ["plain", *SCHEDULES]
NEW_TOKENS = 12


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(64)}, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="word2", pad_token="word0", padding_side="left"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Options of a small run on a tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(num_hidden_layers=2)
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    (folder / "prompts").mkdir()
    texts = {"sums": "word5 word9 word11", "talk": "word21 word8"}
    for name, text in texts.items():
        line = {"dataset": name, "domain": "math", "index": 3, "turns": [text]}
        (folder / "prompts" / f"{name}.jsonl").write_text(json.dumps(line))
    folders = [f"--{name}={folder / name}" for name in ("target", "drafter", "prompts")]
    counts = ["--new-tokens=6", "--repeats=2", "--prompts-per-r=2"]
    return [*folders, *counts, f"--threads={torch.get_num_threads()}"]


@pytest.fixture(scope="module")
def record_path(arguments, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "load.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_hf.cost_curve.default_cache_dir", lambda: path.parent)
        patch.setattr("dspark_hf.passes.REPEATS", ENOUGH_REPEATS)
        load.main([*arguments, "--rows", "1", "2", "--output", str(path)])
    return path


def run(decode_s, verified, texts, drafts=True):
    """A run of two rows with a round for each number of `verified` drafts, half of which were accepted."""
    logits = torch.zeros(4) if drafts else None
    records = [RoundRecord(number % 2, v, v // 2, v // 2 + 1, logits) for number, v in enumerate(verified)]
    statistics = DecodingStatistics(4, records, target_forwards=len(records) // 2)
    return BatchRun(0.5, decode_s, texts, statistics)


RIGHT = [[1, 2, 3], [4, 5, 6]]


def hand_made(texts=RIGHT):
    """One batch, two repeats: constant is the better baseline."""
    return {
        "plain": [[run(2.0, [0, 0, 0, 0], RIGHT, drafts=False)], [run(4.0, [0, 0, 0, 0], RIGHT, drafts=False)]],
        "constant": [[run(1.0, [4, 4], RIGHT)], [run(2.0, [4, 4], RIGHT)]],
        "throughput": [[run(2.0, [2, 0], RIGHT)], [run(2.0, [2, 4], texts)]],
    }


def test_a_summary_compares_with_the_better_baseline_of_the_same_repeat():
    rows = {row["policy"]: row for row in summarise(hand_made(), greedy=True)}
    plain, constant, throughput = rows.values()
    assert {row["rows"] for row in rows.values()} == {2}
    assert {row["ratio_to"] for row in rows.values()} == {"constant"}
    assert {row["tokens"] for row in rows.values()} == {4}  # the first of each row comes from the prefill
    assert (plain["verification_budget"], plain["tau"], plain["drafted"]) == (1, 1, 0)
    assert (constant["verification_budget"], constant["tau"], constant["drafted"]) == (5, 3, 1)
    assert throughput["verification_budget"] == 1 + (2 + 0 + 2 + 4) / 4
    assert throughput["tau"] == (2 + 1 + 2 + 3) / 4
    assert constant["tokens_per_s"]["median"] == (4 / 1 + 4 / 2) / 2
    assert constant["tokens_per_s_per_row"] == 1.5
    assert throughput["ratio"]["median"] == (1 / 2 + 2 / 2) / 2
    assert plain["ratio"]["median"] == 0.5
    assert plain["rounds"] == [2, 2]
    assert plain["prefill_s"] == [0.5, 0.5]


@pytest.mark.parametrize(("texts", "differ"), [(RIGHT, 0), ([[1, 2, 3], [4, 5, 7]], 1), ([[1, 9, 3], [4, 5]], 2)])
def test_rows_that_differ_in_any_repeat_are_counted(texts, differ):
    rows = {row["policy"]: row["rows_that_differ"] for row in summarise(hand_made(texts), greedy=True)}
    assert rows == {"plain": 0, "constant": 0, "throughput": differ}
    assert {row["rows_that_differ"] for row in summarise(hand_made(texts), greedy=False)} == {None}


def test_the_table_shows_the_numbers():
    line = load.table(summarise(hand_made(), greedy=True)).splitlines()[-1]
    assert line.split() == [
        *("2", "throughput", "2.0", "(2.0", "to", "2.0)", "1.00", "3.00", "2.00", "1", "1.00", "0"),
        *("0.750", "(0.625", "to", "0.875)", "of", "constant"),
    ]
    assert load.table(summarise(hand_made(), greedy=False)).splitlines()[-1].split()[11] == "-"


def test_datasets_take_turns_and_long_prompts_are_left_out():
    texts = [("a", "word1"), ("a", "word1 word2"), ("a", "word1 word2 word3 word4"), ("b", "word5"), ("c", "word6")]
    prompts = [Prompt(dataset, "math", number, text) for number, (dataset, text) in enumerate(texts)]
    chosen = mixed_prompts(prompts, make_tokenizer(), max_tokens=3)
    assert [prompt.index for prompt in chosen] == [0, 3, 4, 1]
    with pytest.raises(ValueError, match=r"No prompt has at most 0 tokens: raise --max-prompt-tokens"):
        mixed_prompts(prompts, make_tokenizer(), max_tokens=0)


def test_batches_are_left_padded_and_prompts_repeat():
    prompts = [Prompt("a", "math", 0, "word5"), Prompt("b", "math", 0, "word6 word7"), Prompt("c", "math", 0, "word8")]
    first, second = make_batches(prompts, make_tokenizer(), rows=2, at_least=3)
    assert first["input_ids"].tolist() == [[0, 5], [6, 7]]
    assert first["attention_mask"].tolist() == [[0, 1], [1, 1]]
    assert second["input_ids"].tolist() == [[8], [5]]


def test_policies_take_turns_after_a_warm_up(monkeypatch):
    turns = []

    def generate(_target, _inputs, new_tokens, _temperature, variant):
        turns.append((load._name(variant), new_tokens))
        return run(1.0, [0, 0], RIGHT)

    monkeypatch.setattr(load, "generate", generate)
    target = make_target(num_hidden_layers=2)
    variants = make_policies(make_drafter(target), 2, 0.4)
    batches = [{"input_ids": torch.zeros(2, 3)}] * 2
    settings = Settings(20, 0.0, repeats=2, prompts_per_r=4)
    (costs,) = load.warm_up(target, batches, variants, settings)
    assert (costs["rows"], costs["bucket"], len(costs["target_seconds"])) == (2, 256, 5)
    runs = load.measure(target, batches, variants, settings)
    names = [name for name, _ in turns]
    assert names == POLICIES + POLICIES + POLICIES[::-1] + POLICIES[::-1] + POLICIES
    assert [new for _, new in turns] == [8] * 5 + [20] * 20
    assert {name: [len(batches) for batches in own] for name, own in runs.items()} == dict.fromkeys(POLICIES, [2, 2])


def test_rows_go_on_after_the_end_of_text():
    target = make_target(num_hidden_layers=2)
    inputs = {"input_ids": torch.tensor([[5, 9, 11], [21, 33, 8]]), "attention_mask": torch.ones(2, 3).long()}
    ended = load.generate(target, inputs, NEW_TOKENS, 0.0, None).tokens[0]
    target.generation_config.eos_token_id = ended[2]
    constant, *_ = make_policies(make_drafter(target), None, 0.4)
    for variant in (None, constant):
        found = load.generate(target, inputs, NEW_TOKENS, 0.0, variant)
        assert found.tokens[0] == ended
        assert sum(record.committed for record in found.statistics.records) == 2 * (NEW_TOKENS - 1)
        assert found.prefill_s > 0
        assert found.decode_s > 0


def test_a_perfect_drafter_takes_fewer_rounds_for_the_same_rows():
    target = make_target(num_hidden_layers=2)
    inputs = {"input_ids": torch.tensor([[5, 9, 11], [21, 33, 8]]), "attention_mask": torch.ones(2, 3).long()}
    plain = load.generate(target, inputs, NEW_TOKENS, 0.0, None)
    drafter = make_scripted(target, lambda row, position: plain.tokens[row][min(position - 3, NEW_TOKENS - 1)])
    constant, *_ = make_policies(drafter, None, 0.4)
    own = load.generate(target, inputs, NEW_TOKENS, 0.0, constant)
    of_plain, of_constant = summarise({"plain": [[plain]], "constant": [[own]]}, greedy=True)
    assert (of_plain["rounds"], of_constant["rounds"]) == ([11], [3])
    assert of_constant["rows_that_differ"] == 0
    assert of_constant["tau"] == pytest.approx(11 / 3)


def test_a_drafter_without_confidences_is_refused():
    drafter = make_drafter(make_target(num_hidden_layers=2), enable_confidence_head=False)
    with pytest.raises(ValueError, match="confidence head"):
        make_policies(drafter, None, 0.4)


def test_a_run_gives_a_record_without_text(record_path):
    text = record_path.read_text()
    assert "word" not in text
    record = json.loads(text)
    assert [(row["rows"], row["policy"]) for row in record["load"]] == [(r, name) for r in (1, 2) for name in POLICIES]
    assert [row["batches"] for row in record["load"]] == [2] * 5 + [1] * 5
    assert {row["rows_that_differ"] for row in record["load"]} == {0}
    assert [row["rows"] for row in record["costs"]] == [1, 2]
    assert record["prompts"] == [{"dataset": name, "domain": "math", "index": 3} for name in ("sums", "talk")]
    assert all(row["verification_budget"] == row["tau"] == 1 for row in record["load"] if row["policy"] == "plain")
    assert list(record_path.parent.glob("*.partial")) == []


def test_a_stopped_run_goes_on_with_what_is_missing(record_path, arguments, monkeypatch, capsys):
    record = json.loads(record_path.read_text())
    for name in ("costs", "load"):
        record[name] = [row for row in record[name] if row["rows"] == 2]
    path = record_path.with_name("stopped.json")
    path.write_text(json.dumps(record))
    measured = []

    def measure(_target, batches, _variants, _settings):
        measured.append(len(batches[0]["input_ids"]))
        if measured[-1] == 4:
            raise KeyboardInterrupt
        texts = [[1, 2, 3]] * measured[-1]
        return {name: [[run(1.0, [0], texts)]] for name in POLICIES}

    monkeypatch.setattr(load, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        load.main([*arguments, "--rows", "2", "1", "4", "--output", str(path)])
    assert measured == [1, 4]
    now = json.loads(path.read_text())
    assert [row["rows"] for row in now["costs"]] == [1, 2]
    kept = now["load"]
    assert [row["rows"] for row in kept] == [1] * 5 + [2] * 5
    assert kept[5:] == record["load"]
    load.main([*arguments, "--rows", "1", "2", "--output", str(path)])
    assert measured == [1, 4]
    assert sum(" of constant" in line or " of plain" in line for line in capsys.readouterr().out.splitlines()) == 11


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rows", "0"], "at least 1"),
        (["--new-tokens", "1"], "at least 2"),
        (["--temperature", "-1"], "0 or more"),
        (["--threshold", "2"], "threshold"),
        (["--max-prompt-tokens", "1"], "No prompt"),
        (["--repeats", "3", "--output", "{record}"], "another decoding, which cannot be continued"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(record_path, arguments, monkeypatch, capsys, more, message):
    monkeypatch.setattr(load, "measure", None)
    with pytest.raises(SystemExit, match="2"):
        load.main([*arguments, *(option.format(record=record_path) for option in more)])
    assert message in capsys.readouterr().err


def test_figures_are_drawn_beside_the_record(record_path):
    pytest.importorskip("matplotlib")
    files = plots.plot(record_path)
    assert [file.name for file in files] == ["load_trade_off.png", "load_budget.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_record_without_figures_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no record of"):
        plots.plot(tmp_path / "other.json")


def test_every_decision_is_timed_beside_a_forward(arguments, tmp_path, capsys):
    path = tmp_path / "cost.json"
    target = [option for option in arguments if option.startswith(("--target", "--threads"))]
    scheduling_cost.main([*target, "--rows", "1", "3", "--repeats", "6", "--output", str(path)])
    summary = json.loads(path.read_text())["scheduling_cost"]
    kinds = [("constant", "none"), ("threshold", "none")]
    names = ("throughput", "throughput_async", "throughput, greedy")
    assert {(row["policy"], row["cost"]) for row in summary} == {
        *kinds,
        *((name, cost) for name in names for cost in ("padded", "flattened")),
    }
    assert [row["rows"] for row in summary] == [1] * 8 + [3] * 8
    assert all(row["share"] == row["seconds"]["median"] / row["forward_s"] > 0 for row in summary)
    assert len(capsys.readouterr().out.splitlines()) == 17


def test_decisions_are_lengths_and_differ_by_cost():
    decisions = scheduling_cost.make_decisions(rows=3, block_size=4, device="cpu")
    for decide in decisions.values():
        for _ in range(3):
            lengths = decide()
            assert len(lengths) == 3
            assert all(0 <= length <= 4 for length in lengths)
