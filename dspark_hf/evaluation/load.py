"""Generation under load: R rows at a time, by scheduling policy (the paper's figures 7 and 8).

    python -m dspark_hf.evaluation.load --drafter examples/smollm2-135m-dspark --prompts prompts --output docs/benchmarks/load.json

For each R, batches of R rows, each row a prompt of its own, are generated from by plain `generate()` and by every policy, which
take turns in one process, in alternating order, `--repeats` times. Prompts come from all datasets in turn; every R starts with
the first of them and goes through at least `--prompts-per-r`, from the start again when there are no more. End of text is
off, so that R rows run to the end. Timed is decoding alone, from the end of the prompt's forward on; what DSpark then does
for its statistics and its own context counts against it. The cost curve is measured before
and kept in the record, since policies choose by it; what `dspark-hf profile` measured earlier is used as it is. Every row's tokens are compared
with plain generation's (greedy only) and differences are counted.

The record is written after every R. A run that was stopped goes on with what is missing in its file, unless the settings are
others. The record names prompts by `dataset` and `index` and holds no text.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from dspark_hf.evaluation.prompts import Prompt, read_prompts
from dspark_hf.evaluation.record import environment, quartiles, write_record
from dspark_hf.evaluation.speed import Variant, measure_costs
from dspark_hf.metrics import DecodingStatistics, RoundRecord
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.options import read_options
from dspark_hf.reference_pair import reference_target_path
from dspark_hf.scheduling import SCHEDULES


PLAIN = "plain"
BASELINES = (PLAIN, "constant")  # What a throughput policy must not be slower than.
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    r"""
    How everything is generated.

    Args:
        new_tokens (`int`): Of every row, at least 2.
        temperature (`float`): 0 is greedy.
        repeats (`int`): Runs of each policy on each batch.
        prompts_per_r (`int`): Each R has as many batches as it takes to go through so many prompts.
    """

    new_tokens: int
    temperature: float
    repeats: int
    prompts_per_r: int


@dataclass(frozen=True, slots=True)
class BatchRun:
    r"""
    One `generate()` call on a batch.

    Args:
        prefill_s (`float`): Up to the end of the first forward.
        decode_s (`float`): From there to the end.
        tokens (`list[list[int]]`): New tokens of each row; the first comes from the prefill.
        statistics ([`DecodingStatistics`]): Plain generation has rounds without drafts.
    """

    prefill_s: float
    decode_s: float
    tokens: list[list[int]]
    statistics: DecodingStatistics


Runs = dict[str, list[list[BatchRun]]]
"""Runs by policy, repeat and batch."""


def make_policies(drafter: DSparkDraftModel, num_draft_tokens: int | None, threshold: float) -> list[Variant]:
    r"""
    Every schedule on one drafter.

    Args:
        drafter ([`DSparkDraftModel`]): With a confidence head.
        num_draft_tokens (`int`, *optional*): Most draft tokens a round. Defaults to the block.
        threshold (`float`): Of the threshold policy.

    Raises:
        ValueError: If options make no sense or the drafter has no confidence head.
    """
    variants = []
    for schedule in SCHEDULES:
        options = {
            "num_assistant_tokens": drafter.config.block_size if num_draft_tokens is None else num_draft_tokens,
            "num_assistant_tokens_schedule": schedule,
            "assistant_confidence_threshold": threshold if schedule == "threshold" else None,
        }
        drafter.generation_config.update(**options)
        read_options(drafter, GenerationConfig())  # refuses bad ones before anything runs
        variants.append(Variant(schedule, drafter, options))
    return variants


def mixed_prompts(prompts: Sequence[Prompt], tokenizer: Any, max_tokens: int) -> list[Prompt]:
    r"""
    Prompts of all datasets in turn; those longer than `max_tokens`, to which all others would be padded, are left out.

    Raises:
        ValueError: If none is left.
    """
    by_dataset: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.encode(tokenizer)["input_ids"].shape[1] <= max_tokens:
            by_dataset.setdefault(prompt.dataset, []).append(prompt)
    if not by_dataset:
        raise ValueError(f"No prompt has at most {max_tokens} tokens: raise --max-prompt-tokens.")
    return [prompt for turn in itertools.zip_longest(*by_dataset.values()) for prompt in turn if prompt is not None]


def make_batches(prompts: Sequence[Prompt], tokenizer: Any, rows: int, at_least: int) -> list[Any]:
    """Left-padded batches of `rows` prompts, as many as it takes for `at_least` prompts; prompts repeat when there are fewer."""
    source = itertools.cycle(prompts)
    batches = []
    for _ in range(-(-at_least // rows)):
        chats = [[{"role": "user", "content": next(source).text}] for _ in range(rows)]
        options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
        batches.append(tokenizer.apply_chat_template(chats, **options))
    return batches


def generate(target: Any, inputs: Any, new_tokens: int, temperature: float, variant: Variant | None) -> BatchRun:
    """Generate from a batch, plainly or with a policy."""
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options |= {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    if variant is not None:
        variant.drafter.generation_config.update(**variant.options)
        options["assistant_model"] = variant.drafter
    prefilled: list[float] = []

    def note_first_forward(*_: Any) -> None:
        if not prefilled:
            prefilled.append(_now(target.device))

    hook = target.register_forward_hook(note_first_forward)
    try:
        start = _now(target.device)
        output = target.generate(**inputs, **options)
        end = _now(target.device)
    finally:
        hook.remove()
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    counts = plain_statistics(len(tokens), new_tokens) if variant is None else output.statistics
    return BatchRun(prefilled[0] - start, end - prefilled[0], tokens, counts)


def _now(device: torch.device) -> float:
    """Seconds on the clock, after the device's work so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def plain_statistics(rows: int, new_tokens: int) -> DecodingStatistics:
    """Plain generation in the words of rounds: each verifies no draft and commits a token of every row."""
    records = [RoundRecord(row, verified=0, accepted=0, committed=1) for row in range(rows)] * (new_tokens - 1)
    return DecodingStatistics(block_size=0, records=records, target_forwards=new_tokens - 1)


def measure(target: Any, batches: Sequence[Any], variants: Sequence[Variant], settings: Settings) -> Runs:
    """Run plain generation and every policy on every batch, in turns."""
    order = [None, *variants]
    runs: Runs = {_name(variant): [[] for _ in range(settings.repeats)] for variant in order}
    for number, inputs in enumerate(batches):
        for repeat in range(settings.repeats):
            for variant in order if (number + repeat) % 2 == 0 else reversed(order):
                set_seed(repeat)
                done = generate(target, inputs, settings.new_tokens, settings.temperature, variant)
                runs[_name(variant)][repeat].append(done)
    return runs


def _name(variant: Variant | None) -> str:
    return PLAIN if variant is None else variant.name


def warm_up(
    target: Any, batches: Sequence[Any], variants: Sequence[Variant], settings: Settings
) -> list[dict[str, Any]]:
    """Run everything once, after all costs that policies will ask for were measured; return these."""
    rows = len(batches[0]["input_ids"])
    columns = [inputs["input_ids"].shape[1] for inputs in batches]
    costs = measure_costs(target, variants[0].drafter, rows, columns, settings.new_tokens)
    for variant in (None, *variants):
        generate(target, batches[0], min(WARM_UP_TOKENS, settings.new_tokens), settings.temperature, variant)
    return costs


def summarise(runs: Runs, greedy: bool) -> list[dict[str, Any]]:
    """One row for each policy, all of one R."""
    seconds = {name: [sum(run.decode_s for run in batches) for batches in own] for name, own in runs.items()}
    better = min(BASELINES, key=lambda name: statistics.median(seconds[name]))
    first_plain = runs[PLAIN][0]
    batch_rows = len(first_plain[0].tokens)
    tokens = sum(len(row) - 1 for run in first_plain for row in run.tokens)  # without those of the prefill
    summary = []
    for name, own in runs.items():
        records = [record for batches in own for run in batches for record in run.statistics.records]
        speed = quartiles([tokens / total for total in seconds[name]])
        differ = sum(_rows_that_differ(plain, others) for plain, *others in zip(first_plain, *own, strict=True))
        summary.append(
            {
                "rows": batch_rows,
                "policy": name,
                "batches": len(first_plain),
                "tokens": tokens,
                "prefill_s": [round(sum(run.prefill_s for run in batches), 4) for batches in own],
                "decode_s": [round(total, 4) for total in seconds[name]],
                "tokens_per_s": speed,
                "tokens_per_s_per_row": speed["median"] / batch_rows,
                "ratio_to": better,
                "ratio": quartiles([a / b for a, b in zip(seconds[better], seconds[name], strict=True)]),
                "verification_budget": 1 + statistics.fmean(record.verified for record in records),
                "tau": statistics.fmean(record.committed for record in records),
                "rounds": [sum(run.statistics.target_forwards for run in batches) for batches in own],
                "drafted": statistics.fmean(record.confidence_logits is not None for record in records),
                "rows_that_differ": differ if greedy else None,
            }
        )
    return summary


def _rows_that_differ(plain: BatchRun, others: Sequence[BatchRun]) -> int:
    """Rows of a batch whose tokens are not the plain ones in all of the runs."""
    texts = zip(plain.tokens, *(run.tokens for run in others), strict=True)
    return sum(any(row != of_plain for row in rows) for of_plain, *rows in texts)


COLUMNS = "{:>4} {:16} {:>24} {:>7} {:>6} {:>6} {:>7} {:>8} {:>7}  {}"
HEADINGS = ("R", "policy", "tokens/s (quartiles)", "per row", "budget", "tau", "rounds", "drafted", "differ", "ratio")


def table(summary: Sequence[dict[str, Any]]) -> str:
    """Every R and policy, as text."""
    lines = [
        "budget: 1 + draft tokens verified in a row's round; drafted: share of rounds; differ: rows with other tokens than plain",
        "ratio: tokens a second over those of the better of plain and constant, in the same repeat",
        COLUMNS.format(*HEADINGS),
    ]
    return "\n".join(lines + [_line(row) for row in summary]) + "\n"


def _line(row: dict[str, Any]) -> str:
    speed, ratio = row["tokens_per_s"], row["ratio"]
    return COLUMNS.format(
        row["rows"],
        row["policy"],
        f"{speed['median']:.1f} ({speed['quartile_1']:.1f} to {speed['quartile_3']:.1f})",
        f"{row['tokens_per_s_per_row']:.2f}",
        f"{row['verification_budget']:.2f}",
        f"{row['tau']:.2f}",
        f"{statistics.median(row['rounds']):g}",
        f"{row['drafted']:.2f}",
        "-" if row["rows_that_differ"] is None else row["rows_that_differ"],
        f"{ratio['median']:.3f} ({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f}) of {row['ratio_to']}",
    )


def measured_before(path: Path | None, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    r"""
    The costs and rows in the record of a run that was stopped; none if there is no such file.

    Args:
        path (`Path`, *optional*): The record.
        settings (`dict[str, Any]`): Fields that it must have; of its environment the command may be another.

    Raises:
        ValueError: If they are others, naming them.
    """
    if path is None or not path.exists():
        return {"costs": [], "load": []}
    record = json.loads(path.read_text(encoding="utf-8"))
    given = json.loads(json.dumps(settings))
    for fields in (record.get("environment", {}), given["environment"]):
        fields.pop("command", None)
    others = [name for name, value in given.items() if record.get(name) != value]
    if others:
        raise ValueError(
            f"{path} holds a run with another {' and '.join(others)}, which cannot be continued: remove it, or give another "
            "--output."
        )
    return {name: record[name] for name in ("costs", "load")}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name (default: the reference target)")
    parser.add_argument("--drafter", required=True, help="folder or Hub name; with a confidence head")
    parser.add_argument("--prompts", required=True, type=Path, help="folder with *.jsonl files of prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="every R to measure")
    parser.add_argument("--per-dataset", type=int, default=8, help="first prompts of each dataset (default: 8)")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="leave longer ones out (default: 256)")
    parser.add_argument("--prompts-per-r", type=int, default=8, help="in as many batches as it takes (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of every row (default: 64)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-draft-tokens", type=int, help="most draft tokens a round (default: the block)")
    parser.add_argument("--threshold", type=float, default=0.4, help="of the threshold policy (default: 0.4)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (default: 2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="JSON record to write, or to go on with")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if min(*args.rows, args.per_dataset, args.prompts_per_r, args.repeats, args.threads, args.new_tokens - 1) < 1:
        parser.error("Counts must be at least 1, and --new-tokens at least 2.")
    if args.temperature < 0:
        parser.error(f"--temperature must be 0 or more, got {args.temperature}.")
    torch.set_num_threads(args.threads)
    settings = Settings(args.new_tokens, args.temperature, args.repeats, args.prompts_per_r)
    name = args.target or str(reference_target_path())
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, padding_side="left")
        prompts = mixed_prompts(read_prompts(args.prompts, args.per_dataset), tokenizer, args.max_prompt_tokens)
        drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=args.dtype).to(args.device)
        variants = make_policies(drafter, args.num_draft_tokens, args.threshold)
        target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype).to(args.device)
        fixed = {
            "environment": environment("dspark_hf.evaluation.load", target),
            "pair": {"target": Path(name).name, "drafter": args.drafter},
            "decoding": asdict(settings),
            "variants": [variant.row() for variant in variants],
            "prompts": [{"dataset": p.dataset, "domain": p.domain, "index": p.index} for p in prompts],
        }
        found = measured_before(args.output, fixed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    missing = sorted(set(args.rows) - {row["rows"] for row in found["load"]})
    for rows in tqdm(missing, desc="load", unit="R"):
        batches = [inputs.to(target.device) for inputs in make_batches(prompts, tokenizer, rows, args.prompts_per_r)]
        found["costs"] += warm_up(target, batches, variants, settings)
        found["load"] += summarise(measure(target, batches, variants, settings), greedy=args.temperature == 0)
        for entries in found.values():
            entries.sort(key=lambda row: row["rows"])
        if args.output:
            write_record(args.output, fixed | found)
    sys.stdout.write(table(found["load"]))


if __name__ == "__main__":
    main()
