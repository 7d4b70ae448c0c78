"""Calibrate a drafter's confidences on prompts: `dspark-hf calibrate`.

    dspark-hf calibrate --target Qwen/Qwen3-4B --drafter my-drafter --prompts samples.jsonl
    dspark-hf calibrate --target Qwen/Qwen3-4B --drafter my-drafter --prompts prompts --temperature 0.8 --output calibrated

The target answers the prompts with the scheduler off: every round verifies its whole block, since a position that is not
verified has no label, and leaving out those that a scheduler distrusts would censor the data. A round carries its own
confidence logits, so that labels cannot be those of another. Prompts, not rounds, are split: temperatures are fitted on some
and judged on the others, the held-out ones. They are stored in the drafter's config with the setting they were fitted for.
"""

import argparse
import contextlib
import gzip
import json
import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, set_seed

from dspark_hf.calibration import (
    NUM_BINS,
    area_under_curve,
    brier_score,
    calibrated_confidence,
    expected_calibration_error,
    fit_temperatures,
    reliability_bins,
)
from dspark_hf.evaluation.plots import MIN_ROUNDS
from dspark_hf.evaluation.prompts import parse_prompt
from dspark_hf.evaluation.record import environment, write_record
from dspark_hf.loading import load_target
from dspark_hf.metrics import RoundRecord
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rounds:
    r"""
    What the confidences of N rounds said, and what happened.

    Args:
        logits (`torch.DoubleTensor` of shape `(N, K)`): Confidence logits before calibration.
        accepted (`torch.LongTensor` of shape `(N,)`): Accepted draft tokens.
        labelled (`torch.LongTensor` of shape `(N,)`): Positions with a label: K, or up to an accepted end of text.
    """

    logits: torch.Tensor
    accepted: torch.Tensor
    labelled: torch.Tensor

    @classmethod
    def from_records(cls, records: Sequence[RoundRecord]) -> "Rounds":
        """Put records of whole blocks together."""
        return cls(
            logits=torch.stack([record.confidence_logits for record in records]).double().cpu(),  # type: ignore[misc]
            accepted=torch.tensor([record.accepted for record in records]),
            labelled=torch.tensor([record.verified for record in records]),
        )


def whole_rounds(records: Sequence[RoundRecord], block_size: int, new_tokens: int) -> list[RoundRecord]:
    r"""
    The rounds of a `generate()` call that say something about every position up to the end of the text.

    Rounds so near the length limit that it cuts the block are left out: whether one is depends on earlier rounds alone.

    Args:
        records (`Sequence[RoundRecord]`): All of the call.
        block_size (`int`): γ.
        new_tokens (`int`): The limit, in new tokens a row.

    Raises:
        ValueError: If anything else but the end of the text cut a round.
    """
    kept, written = [], Counter[int]()
    for record in records:
        left = new_tokens - 1 - written[record.row]  # the first token is prefill's
        written[record.row] += record.committed
        if left <= block_size:  # a round needs room for its bonus token too
            continue
        text_ends = record.verified == record.accepted == record.committed
        if record.verified < block_size and not text_ends:
            raise ValueError(
                f"A round verified {record.verified} of {block_size} draft tokens, and its text does not end there: the others "
                "have no label, and leaving them out would bias the fit. Record with the scheduler off (schedule 'constant', no "
                "num_assistant_tokens) and without processors or stopping criteria of your own."
            )
        kept.append(record)
    return kept


def record_rounds(
    target: Any,
    drafter: DSparkDraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling_temperature: float = 0.0,
) -> Rounds:
    r"""
    Let the target answer prompts, one by one, with the scheduler off.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`DSparkDraftModel`]): Its drafter, with a confidence head.
        prompts (`Sequence[Sequence[int]]`): Token ids.
        max_new_tokens (`int`): Most tokens of an answer.
        sampling_temperature (`float`): 0 is greedy.

    Raises:
        ValueError: If the drafter has no confidence head, the temperature is negative, a round is cut short, or none is whole.
    """
    if not drafter.config.enable_confidence_head:
        raise ValueError(
            "This drafter has no confidence head (enable_confidence_head=False): there is nothing to calibrate."
        )
    if sampling_temperature < 0:
        raise ValueError(f"Expected a temperature of 0 (greedy) or more, got {sampling_temperature}.")
    options: dict[str, Any] = {"do_sample": False}
    if sampling_temperature > 0:
        options = {"do_sample": True, "temperature": sampling_temperature, "top_k": 0, "top_p": 1.0}
    options |= {"max_new_tokens": max_new_tokens, "assistant_model": drafter, "return_dict_in_generate": True}
    kept = []
    with _scheduler_off(drafter):
        for prompt in tqdm(prompts, desc="calibrate", unit="prompt"):
            ids = torch.tensor([list(prompt)], device=target.device)
            output = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            kept += whole_rounds(output.statistics.records, drafter.config.block_size, max_new_tokens)
    if not kept:
        raise ValueError(
            f"{len(prompts)} answers of at most {max_new_tokens} tokens gave no round with a whole block of "
            f"{drafter.config.block_size}. Raise --max-new-tokens, or give more prompts."
        )
    return Rounds.from_records(kept)


@contextlib.contextmanager
def _scheduler_off(drafter: DSparkDraftModel) -> Iterator[None]:
    own: Any = drafter.generation_config
    drafter.generation_config = GenerationConfig()  # no option of ours: whole blocks
    try:
        yield
    finally:
        drafter.generation_config = own


def report(rounds: Rounds, temperatures: Sequence[float]) -> list[dict[str, Any]]:
    r"""
    Judge survivals by position, before and after calibration.

    Args:
        rounds ([`Rounds`]): Of held-out prompts.
        temperatures (`Sequence[float]`): One for each position.

    Returns:
        `list[dict[str, Any]]`: For each position `k`, under `before` and `after`, expected calibration error, area under the ROC
        curve (`None` when all or no rounds accepted the prefix), Brier score and the bins of the reliability diagram.
    """
    logits = rounds.logits
    survivals = {
        "before": calibrated_confidence(logits, None).cumprod(dim=1),
        "after": calibrated_confidence(logits, torch.tensor(temperatures, dtype=torch.double)).cumprod(dim=1),
    }
    rows = []
    for k, temperature in enumerate(temperatures, start=1):
        known = rounds.labelled >= k
        outcome = rounds.accepted[known] >= k
        row = {"position": k, "temperature": temperature, "rounds": len(outcome), "accepted": int(outcome.sum())}
        rows.append(row | {when: _judge(a[known, k - 1], outcome) for when, a in survivals.items()})
    return rows


def _judge(survival: torch.Tensor, outcome: torch.Tensor) -> dict[str, Any]:
    bins = reliability_bins(survival, outcome)
    measures = {
        "ece": expected_calibration_error(survival, outcome),
        "auc": area_under_curve(survival, outcome),
        "brier": brier_score(survival, outcome),
    }
    return {name: None if math.isnan(value) else value for name, value in measures.items()} | {
        "bin_counts": bins.counts.tolist(),
        "bin_predicted": bins.predicted.tolist(),
        "bin_accepted": bins.accepted.tolist(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A report as text."""
    lines = [
        "Of the survival a_k on the held-out prompts, before -> after calibration.",
        f"{'k':>2} {'T_k':>5} {'rounds':>7} {'accepted':>9}  {'ECE':15} {'AUC':15} {'Brier':15}",
    ]
    for row in rows:
        changes = [
            " -> ".join(
                "none" if row[when][name] is None else f"{row[when][name]:.3f}" for when in ("before", "after")
            )
            for name in ("ece", "auc", "brier")
        ]
        share = f"{row['accepted'] / row['rounds']:.1%}" if row["rounds"] else "none"
        counts = f"{row['position']:2} {row['temperature']:5.2f} {row['rounds']:7} {share:>9}"
        lines.append("  ".join([counts, *(f"{change:14}" for change in changes)]).rstrip())
    return "\n".join(lines) + "\n"


def draw(record: dict[str, Any], figure: Any) -> None:
    """Draw the reliability diagram of a record: how often prefixes were accepted, against how often they were predicted to."""
    rows, made = record["positions"], record["environment"]
    figure.set_size_inches(2.6 * len(rows), 3.4)
    panels = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
    for panel, row in zip(panels, rows, strict=True):
        panel.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
        for when in ("before", "after"):
            columns = zip(*(row[when][name] for name in ("bin_counts", "bin_predicted", "bin_accepted")), strict=True)
            means = [(predicted / n, accepted / n) for n, predicted, accepted in columns if n >= MIN_ROUNDS]
            error = "" if row[when]["ece"] is None else f" (ECE {row[when]['ece']:.3f})"
            panel.plot([x for x, _ in means], [y for _, y in means], marker="o", markersize=3, label=f"{when}{error}")
        panel.set(
            title=f"k = {row['position']}, n = {row['rounds']}", xlabel="survival $a_k$", xlim=(0, 1), ylim=(0, 1)
        )
        panel.legend(fontsize=6)
    panels[0].set_ylabel("share of accepted prefixes")
    temperature = record["decoding"]["temperature"]
    figure.supxlabel(
        f"{NUM_BINS} bins, drawn where they hold {MIN_ROUNDS} rounds or more, of {record['prompts']['held_out']} held-out prompts; "
        f"{'greedy' if temperature is None else f'temperature {temperature}'}, batch 1; {made['dtype'].removeprefix('torch.')}, "
        f"{made['device']} ({made['hardware']}); commit {made['commit']}",
        fontsize=7,
    )


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('The reliability diagram needs matplotlib: pip install "dspark_hf[plots]".') from error
    return Figure(layout="constrained")


def read_prompt_ids(source: Path, tokenizer: Any) -> list[list[int]]:
    r"""
    Read prompts to calibrate on; one that is there twice is taken once, so that it is not on both sides of a split.

    Args:
        source (`Path`): A file of JSON lines, gzip when its name ends in `.gz`, or a folder of `*.jsonl`. A line is a prompt of
            the benchmarks (`turns`) or a sample of `dspark-hf data` (`prompt_ids`).
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Raises:
        ValueError: If there is none, or a line is neither, naming it.
    """
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    prompts: dict[tuple[int, ...], None] = {}
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    prompts[_prompt_ids(line, f"{file.name}:{number}", tokenizer)] = None
    if not prompts:
        raise ValueError(f"{source} holds no prompts: pass a file of JSON lines, or a folder with *.jsonl files.")
    return [list(prompt) for prompt in prompts]


def _prompt_ids(line: str, name: str, tokenizer: Any) -> tuple[int, ...]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None  # `parse_prompt` says what is wrong
    if isinstance(row, dict) and "prompt_ids" in row:
        return tuple(row["prompt_ids"])
    return tuple(parse_prompt(line, name).encode(tokenizer)["input_ids"][0].tolist())


def split_prompts(
    prompts: Sequence[list[int]], limit: int, held_out_fraction: float, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Draw at most `limit` prompts and split them: to fit on, and held out."""
    if not 0 < held_out_fraction < 1 or min(limit, len(prompts)) < 2:
        raise ValueError(
            f"Expected two prompts or more, and a held-out fraction between 0 and 1, got {min(limit, len(prompts))} prompts and "
            f"{held_out_fraction}."
        )
    drawn = random.Random(seed).sample(list(prompts), min(limit, len(prompts)))
    held_out = min(max(round(held_out_fraction * len(drawn)), 1), len(drawn) - 1)
    return drawn[held_out:], drawn[:held_out]


def save_temperatures(source: str, folder: Path, fields: dict[str, Any]) -> None:
    r"""
    Store fields in a drafter's config.

    Args:
        source (`str`): Folder or Hub name of the drafter.
        folder (`Path`): Where it goes. In the drafter's own folder only `config.json` is replaced, in one piece; anywhere else
            the whole drafter is saved, its weights as they are.
        fields (`dict[str, Any]`): `confidence_temperatures` and `confidence_calibration`.
    """
    if folder.resolve() != Path(source).resolve():
        drafter = DSparkDraftModel.from_pretrained(source, dtype="auto")
        drafter.config.update(fields)
        drafter.save_pretrained(folder)
        return
    config = folder / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | fields
    partial = config.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(config)


def _output_folder(drafter: str, output: Path | None) -> Path:
    """Where the drafter goes; `ValueError` if its own config cannot hold temperatures and no other folder is given."""
    folder, config = output or Path(drafter), Path(drafter) / "config.json"
    holds = (
        config.is_file()
        and json.loads(config.read_text(encoding="utf-8")).get("model_type") == DSparkConfig.model_type
    )
    if folder.resolve() == Path(drafter).resolve() and not holds:
        raise ValueError(
            f"{drafter} is no folder of a drafter in this package's layout, so its config cannot hold temperatures. Give another "
            "--output: the drafter is saved there with them."
        )
    return folder


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `dspark-hf calibrate`."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument("--prompts", required=True, type=Path, help="file or folder of prompts, or a file of samples")
    parser.add_argument(
        "--output", type=Path, help="folder to save the drafter in (default: its own, changing its config)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--num-prompts", type=int, default=200, help="most prompts, drawn at random (default: 200)")
    parser.add_argument("--held-out-fraction", type=float, default=0.3, help="prompts only judged on (default: 0.3)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")


def run_calibrate(args: argparse.Namespace) -> None:
    """Record, fit, judge and save; the record and the reliability diagram lie beside the drafter."""
    figure, folder = _figure(), _output_folder(args.drafter, args.output)
    prompts = read_prompt_ids(args.prompts, AutoTokenizer.from_pretrained(args.target))
    fitting, held_out = split_prompts(prompts, args.num_prompts, args.held_out_fraction, args.seed)
    target = load_target(args.target, args.dtype, args.device)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=target.dtype).to(args.device)
    set_seed(args.seed)
    seen, unseen = (
        record_rounds(target, drafter, part, args.max_new_tokens, args.temperature) for part in (fitting, held_out)
    )
    fit = fit_temperatures(seen.logits, seen.accepted, seen.labelled)
    for warning in fit.warnings:
        logger.warning(warning)
    rows = report(unseen, fit.temperatures)
    sys.stdout.write(table(rows))
    setting = {"do_sample": args.temperature > 0, "temperature": args.temperature or None}
    record = {
        "environment": environment("dspark_hf.cli", target),
        "decoding": setting | {"batch": 1, "new_tokens": args.max_new_tokens, "seed": args.seed},
        "prompts": {"fit": len(fitting), "held_out": len(held_out)},
        "rounds": {"fit": fit.rounds, "held_out": len(unseen.logits)},
        "warnings": fit.warnings,
        "positions": rows,
    }
    calibration = {
        "confidence_temperatures": list(fit.temperatures),
        "confidence_calibration": setting | {"rounds": fit.rounds},
    }
    save_temperatures(args.drafter, folder, calibration)
    write_record(folder / "calibration.json", record)
    draw(record, figure)
    figure.savefig(folder / "calibration.png", dpi=150)
