"""Accepted length, acceptance by position and speed on files of prompts, beside plain `generate()`.

    python -m dspark_hf.evaluation.speed --drafter examples/smollm2-135m-dspark --prompts prompts --output docs/benchmarks/speed.json

For each prompt, plain generation and every variant (a drafter with its decoding options) take turns in one process, in
alternating order, `--repeats` times; a noisy machine disturbs them alike. All are greedy, stop at the target's end of text
and are timed whole, prefill included. A prompt's ratio is its median plain seconds over its median DSpark seconds. Every
run's tokens are compared with the first plain run's, and differences are counted. The record names prompts by `dataset` and
`index` and holds no text.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dspark_hf.cost_curve import CostCurve, context_bucket
from dspark_hf.evaluation.prompts import Prompt, read_prompts
from dspark_hf.evaluation.record import environment, quartiles, timed, write_record
from dspark_hf.metrics import DecodingStatistics
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.options import read_options
from dspark_hf.reference_pair import reference_target_path
from dspark_hf.scheduling import SCHEDULES, THROUGHPUT_POLICIES


SCHEDULE = "num_assistant_tokens_schedule"


@dataclass(frozen=True, slots=True)
class Variant:
    r"""
    A drafter with decoding options, one of those that are compared.

    Args:
        name (`str`): In tables and plots.
        drafter ([`DSparkDraftModel`]): The drafter; variants may share one when their options have the same names.
        options (`dict[str, Any]`): Set on the drafter's `generation_config` before each run.
    """

    name: str
    drafter: DSparkDraftModel
    options: dict[str, Any]

    @property
    def schedule(self) -> str | None:
        """The policy it runs with, its own or the drafter's."""
        if SCHEDULE in self.options:
            return self.options[SCHEDULE]
        return getattr(self.drafter.generation_config, SCHEDULE, None)

    def row(self) -> dict[str, Any]:
        """Its line in the record."""
        head = self.drafter.markov_head
        return {
            "name": self.name,
            "block_size": self.drafter.config.block_size,
            "sequential_head": None if head is None else self.drafter.config.markov_head_type,
            "options": self.options,
        }


@dataclass(frozen=True, slots=True)
class Run:
    r"""
    One `generate()` call.

    Args:
        seconds (`float`): Of the whole call.
        tokens (`list[int]`): New tokens.
        statistics ([`DecodingStatistics`]): Plain generation has no rounds.
    """

    seconds: float
    tokens: list[int]
    statistics: DecodingStatistics = field(default_factory=lambda: DecodingStatistics(block_size=0))


@dataclass(frozen=True, slots=True)
class Measurement:
    r"""
    A variant on a prompt, beside plain generation.

    Args:
        prompt ([`Prompt`]): The prompt.
        variant (`str`): Name of the variant.
        plain (`list[Run]`): Plain runs, at least one.
        dspark (`list[Run]`): The variant's runs, interleaved with these.
    """

    prompt: Prompt
    variant: str
    plain: list[Run]
    dspark: list[Run]

    @property
    def statistics(self) -> DecodingStatistics:
        """Of all runs: a throughput policy need not draft the same in each."""
        records = [record for run in self.dspark for record in run.statistics.records]
        return DecodingStatistics(self.dspark[0].statistics.block_size, records)

    @property
    def plain_seconds(self) -> float:
        """Median of the plain runs."""
        return statistics.median(run.seconds for run in self.plain)

    @property
    def dspark_seconds(self) -> float:
        """Median of the variant's runs."""
        return statistics.median(run.seconds for run in self.dspark)

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that is not the same in all runs; `None` when all texts are the same."""
        texts = [run.tokens for run in self.plain + self.dspark]
        columns = itertools.zip_longest(*texts)  # a text that is over differs from one that goes on
        return next((index for index, tokens in enumerate(columns) if len(set(tokens)) > 1), None)

    def row(self) -> dict[str, Any]:
        """Its line in the record."""
        return {
            "variant": self.variant,
            "dataset": self.prompt.dataset,
            "domain": self.prompt.domain,
            "index": self.prompt.index,
            "tokens": len(self.plain[0].tokens),
            "plain_s": [round(run.seconds, 4) for run in self.plain],
            "dspark_s": [round(run.seconds, 4) for run in self.dspark],
            "rounds": self.statistics.rounds,
            "tau": self.statistics.tau if self.statistics.rounds else None,
            "first_difference": self.first_difference,
        }


def make_variants(
    drafters: Sequence[str], settings: Sequence[dict[str, Any]], without_head: bool, device: str, dtype: str
) -> list[Variant]:
    r"""
    Load drafters and combine each with each of the settings.

    Args:
        drafters (`Sequence[str]`): Folders or Hub names.
        settings (`Sequence[dict[str, Any]]`): Decoding options, see [`combine`].
        without_head (`bool`): Also measure each drafter with its sequential head switched off.
        device (`str`): torch device.
        dtype (`str`): Name of a torch dtype.

    Raises:
        ValueError: If options make no sense, or two variants have one name.
    """
    variants = []
    for path, head in itertools.product(drafters, (True, False) if without_head else (True,)):
        drafter = DSparkDraftModel.from_pretrained(path, dtype=dtype).to(device)
        if not head:
            if drafter.markov_head is None:
                continue
            switch_sequential_head_off(drafter)
        for options in settings:
            drafter.generation_config.update(**options)
            read_options(drafter, GenerationConfig())  # refuses bad ones before anything runs
            variants.append(Variant(_name(path, head, options), drafter, options))
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError(
            f"Two variants have one name: {[variant.name for variant in variants]}. Give each value once, and drafters' "
            "folders different names."
        )
    return variants


def switch_sequential_head_off(drafter: DSparkDraftModel) -> None:
    """Draft from the base logits alone. The confidence head goes too: it speaks of drafts with the other head."""
    drafter.markov_head = drafter.confidence_head = None
    drafter.config.enable_confidence_head = False


def combine(
    num_draft_tokens: Sequence[int] | None, schedules: Sequence[str] | None, thresholds: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Every combination of decoding options; what is not given stays the drafter's own."""
    choices = {
        "num_assistant_tokens": num_draft_tokens,
        SCHEDULE: schedules,
        "assistant_confidence_threshold": thresholds,
    }
    given = {name: values for name, values in choices.items() if values is not None}
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


def _name(path: str, head: bool, options: dict[str, Any]) -> str:
    parts = [Path(path).name]
    if "num_assistant_tokens" in options:
        parts.append(f"{options['num_assistant_tokens']} draft tokens")
    if options.get(SCHEDULE, "threshold") != "threshold":
        parts.append(options[SCHEDULE])
    if "assistant_confidence_threshold" in options:
        parts.append(f"threshold {options['assistant_confidence_threshold']}")
    return ", ".join(parts if head else [*parts, "sequential head off"])


def generate(target: Any, inputs: Any, new_tokens: int, variant: Variant | None = None) -> Run:
    """Generate greedily, plainly or with a variant's drafter."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
    if variant is not None:
        variant.drafter.generation_config.update(**variant.options)
        options["assistant_model"] = variant.drafter
    output, seconds = timed(lambda: target.generate(**inputs, **options))
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(seconds, tokens) if variant is None else Run(seconds, tokens, output.statistics)


def measure_costs(
    target: Any, drafter: DSparkDraftModel, rows: int, prompt_columns: Sequence[int], new_tokens: int
) -> list[dict[str, Any]]:
    """Measure what throughput policies will ask the cost curve for, so that no timed run does; return it, a line each."""
    curve = CostCurve.open(target, drafter)
    buckets = {context_bucket(columns + new) for columns in prompt_columns for new in range(1, new_tokens)}
    return [{"rows": rows, "bucket": bucket} | asdict(curve.costs(rows, bucket)) for bucket in sorted(buckets)]


def measure(
    target: Any, tokenizer: Any, prompts: Sequence[Prompt], variants: Sequence[Variant], new_tokens: int, repeats: int
) -> list[Measurement]:
    r"""
    Measure every variant on every prompt, after a warm-up on the first.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): The target's, with a chat template.
        prompts (`Sequence[Prompt]`): What to answer.
        variants (`Sequence[Variant]`): What to compare.
        new_tokens (`int`): Most tokens to generate.
        repeats (`int`): Runs of each on each prompt.

    Returns:
        `list[Measurement]`: One for each prompt and variant.
    """
    order = [None, *variants]
    drafters = {variant.drafter for variant in variants if variant.schedule in THROUGHPUT_POLICIES}
    columns = [prompt.encode(tokenizer)["input_ids"].shape[1] for prompt in prompts] if drafters else []
    for drafter in drafters:
        measure_costs(target, drafter, 1, columns, new_tokens)
    for variant in order:
        generate(target, prompts[0].encode(tokenizer).to(target.device), new_tokens, variant)
    measurements = []
    for prompt in tqdm(prompts, desc="speed", unit="prompt"):
        inputs = prompt.encode(tokenizer).to(target.device)
        runs: list[list[Run]] = [[] for _ in order]
        for repeat in range(repeats):
            turns = list(zip(order, runs, strict=True))
            for variant, done in turns if repeat % 2 == 0 else reversed(turns):
                done.append(generate(target, inputs, new_tokens, variant))
        plain, *others = runs
        measurements += [
            Measurement(prompt, variant.name, plain, dspark) for variant, dspark in zip(variants, others, strict=True)
        ]
    return measurements


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row for each variant and domain, dataset and all prompts."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for found in measurements:
        for kind, name in (("domain", found.prompt.domain), ("dataset", found.prompt.dataset), ("all", "all")):
            groups.setdefault((found.variant, kind, name), []).append(found)
    return [
        {"variant": variant, "by": kind, "name": name} | _summary(group)
        for (variant, kind, name), group in groups.items()
    ]


def _summary(group: Sequence[Measurement]) -> dict[str, Any]:
    """Rounds, tokens and seconds pooled over prompts; quartiles over prompts."""
    records = [record for found in group for record in found.statistics.records]
    pooled = DecodingStatistics(group[0].statistics.block_size, records)
    plain_s, dspark_s = sum(found.plain_seconds for found in group), sum(found.dspark_seconds for found in group)
    # Rounds that verified position k with all before it accepted. Positions that no round reached end the lists.
    reached = [sum(r.accepted >= k and r.verified > k for r in records) for k in range(pooled.block_size)]
    positions = sum(count > 0 for count in reached)
    return {
        "prompts": len(group),
        "rounds": pooled.rounds,
        "tau": pooled.tau,
        "tau_by_prompt": quartiles([found.statistics.tau for found in group]),
        "verified_per_round": sum(record.verified for record in records) / max(len(records), 1),
        "rounds_by_position": reached[:positions],
        "acceptance_by_position": pooled.acceptance_by_position[:positions],
        "conditional_acceptance_by_position": pooled.conditional_acceptance_by_position[:positions],
        "plain_tokens_per_s": sum(len(found.plain[0].tokens) for found in group) / plain_s,
        "dspark_tokens_per_s": sum(len(found.dspark[0].tokens) for found in group) / dspark_s,
        "ratio": plain_s / dspark_s,
        "ratio_by_prompt": quartiles([found.plain_seconds / found.dspark_seconds for found in group]),
        "prompts_that_differ": sum(found.first_difference is not None for found in group),
    }


COLUMNS = "{:10} {:>7} {:>6} {:>8} {:>8} {:>6}  {:21} {}"
HEADINGS = ("", "prompts", "tau", "plain/s", "DSpark/s", "ratio", "median (quartiles)", "acceptance by position")


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary by domain and over all prompts, as text."""
    lines = ["/s: tokens a second; ratio: plain seconds over DSpark seconds; acceptance: given the positions before"]
    for variant in dict.fromkeys(row["variant"] for row in summary):
        rows = {row["name"]: row for row in summary if row["variant"] == variant and row["by"] != "dataset"}
        total = rows.pop("all")
        lines += ["", variant, COLUMNS.format(*HEADINGS)]
        lines += [_line(row) for row in (*rows.values(), total)]
        lines.append(f"prompts where not all runs gave the same tokens: {total['prompts_that_differ']}")
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    low, median, high = row["ratio_by_prompt"].values()
    return COLUMNS.format(
        row["name"],
        row["prompts"],
        f"{row['tau']:.2f}",
        f"{row['plain_tokens_per_s']:.1f}",
        f"{row['dspark_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}",
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        " ".join(f"{share:.2f}" for share in row["conditional_acceptance_by_position"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name (default: the reference target)")
    parser.add_argument("--drafter", required=True, nargs="+", help="folders or Hub names; several are compared")
    parser.add_argument("--prompts", required=True, type=Path, help="folder with *.jsonl files of prompts")
    parser.add_argument("--per-dataset", type=int, default=20, help="first prompts of each dataset (default: 20)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--num-draft-tokens", type=int, nargs="+", help="most draft tokens a round; several are compared"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="+", help="default: the drafter's own")
    parser.add_argument(
        "--threshold", type=float, nargs="+", help="several are compared; 0 verifies every draft token"
    )
    parser.add_argument(
        "--no-sequential-head", action="store_true", help="also measure without that and the confidence head"
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (default: 2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="JSON record to write")
    args = parser.parse_args(arguments)
    if min(args.per_dataset, args.new_tokens, args.repeats, args.threads) < 1:
        parser.error("--per-dataset, --new-tokens, --repeats and --threads must be at least 1.")
    torch.set_num_threads(args.threads)
    settings = combine(args.num_draft_tokens, args.schedule, args.threshold)
    try:
        prompts = read_prompts(args.prompts, args.per_dataset)
        variants = make_variants(args.drafter, settings, args.no_sequential_head, args.device, args.dtype)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    name = args.target or str(reference_target_path())
    target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(name)
    measurements = measure(target, tokenizer, prompts, variants, args.new_tokens, args.repeats)
    summary = summarise(measurements)
    sys.stdout.write(table(summary))
    if args.output:
        record = {
            "environment": environment("dspark_hf.evaluation.speed", target),
            "decoding": {"greedy": True, "batch": 1, "new_tokens": args.new_tokens, "repeats": args.repeats},
            "variants": [variant.row() for variant in variants],
            "summary": summary,
            "prompts": [found.row() for found in measurements],
        }
        write_record(args.output, record)


if __name__ == "__main__":
    main()
