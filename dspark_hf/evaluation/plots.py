"""Draw a benchmark's record: PNG files beside it.

    python -m dspark_hf.evaluation.plots docs/benchmarks/speed.json

Of `dspark_hf.evaluation.speed`: `speed_acceptance.png`, the share of draft tokens accepted at position k, given that those
before were (the paper's figure 2 in small); `speed_domains.png`, accepted length and speed ratio by domain. Of
`dspark_hf.evaluation.load`: `load_trade_off.png`, all rows' tokens a second against each row's (figure 7);
`load_budget.png`, tokens a second and verification budget by concurrent rows (figure 8). Only the record is read.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


MIN_ROUNDS = 20  # An acceptance of fewer rounds is noise, and not drawn.


def plot(path: Path) -> list[Path]:
    r"""
    Draw a record.

    Args:
        path (`Path`): The JSON file.

    Returns:
        `list[Path]`: The PNG files, beside it.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no figures for such a record.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    drawers = next((drawers for field, drawers in FIGURES.items() if field in record), None)
    if drawers is None:
        raise ValueError(f"{path} is no record of dspark_hf.evaluation.speed or load: there are no figures for it.")
    figures = {name: draw(record) for name, draw in drawers.items()}
    files = [path.with_name(f"{path.stem}_{name}.png") for name in figures]
    for figure, file in zip(figures.values(), files, strict=True):
        figure.savefig(file, dpi=150)
    return files


def _figure(panels: int, record: dict[str, Any], what: str, how: str) -> tuple[Any, Any]:
    """An empty figure with its caption, and its panels."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "dspark_hf[plots]".') from error
    figure = Figure(figsize=(max(6.0, 3.6 * panels), 4.2), layout="constrained")
    made = record["environment"]
    caption = f"{what}\n{how}; {made['dtype'].removeprefix('torch.')},\n{made['device']} ({made['hardware']}), torch threads: {made['threads']}; commit {made['commit']}"
    figure.supxlabel(caption, fontsize=7)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _speed_decoding(record: dict[str, Any]) -> str:
    decoding = record["decoding"]
    return (
        f"Greedy, batch {decoding['batch']}, at most {decoding['new_tokens']} new tokens, "
        f"{decoding['repeats']} interleaved runs a prompt"
    )


def _load_decoding(record: dict[str, Any]) -> str:
    decoding = record["decoding"]
    mode = f"temperature {decoding['temperature']}" if decoding["temperature"] else "greedy"
    return (
        f"{record['pair']['target']}, {mode}, {decoding['new_tokens']} new tokens a row, median of n = "
        f"{decoding['repeats']} interleaved runs"
    )


def _rows(record: dict[str, Any], by: str) -> dict[str, dict[str, Any]]:
    """Rows of the summary: `{name: {variant: row}}`."""
    rows: dict[str, dict[str, Any]] = {}
    for row in record["summary"]:
        if row["by"] == by:
            rows.setdefault(row["name"], {})[row["variant"]] = row
    return rows


def _draw_acceptance(record: dict[str, Any]) -> Any:
    domains = _rows(record, "domain")
    block_size = max(variant["block_size"] for variant in record["variants"])
    what = f"Share accepted of the rounds that accepted all before position k and verified it, where these are {MIN_ROUNDS} or more."
    figure, panels = _figure(len(domains), record, what, _speed_decoding(record))
    for panel, (domain, variants) in zip(panels, domains.items(), strict=True):
        for variant, row in variants.items():
            known = zip(row["conditional_acceptance_by_position"], row["rounds_by_position"], strict=True)
            shares = [share if rounds >= MIN_ROUNDS else math.nan for share, rounds in known]
            panel.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=variant)
        prompts = next(iter(variants.values()))["prompts"]
        panel.set(title=f"{domain} (n = {prompts} prompts)", xlabel="position k in the block", ylim=(0, 1))
        panel.set_xticks(range(1, block_size + 1))
    panels[0].set_ylabel("acceptance given the prefix")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", fontsize=7)
    return figure


def _draw_domains(record: dict[str, Any]) -> Any:
    domains = _rows(record, "domain") | _rows(record, "all")
    what = "Bars: median over prompts; whiskers: quartiles."
    figure, panels = _figure(2, record, what, _speed_decoding(record))
    measures = (
        ("tau_by_prompt", "accepted length τ (tokens a round)"),
        ("ratio_by_prompt", "plain seconds / DSpark seconds"),
    )
    ticks = [f"{name}\nn = {next(iter(variants.values()))['prompts']}" for name, variants in domains.items()]
    names = [variant["name"] for variant in record["variants"]]
    width = 0.8 / len(names)
    for panel, (field, label) in zip(panels, measures, strict=True):
        for number, name in enumerate(names):
            values = [variants[name][field] for variants in domains.values()]
            medians = [value["median"] for value in values]
            below = [value["median"] - value["quartile_1"] for value in values]
            above = [value["quartile_3"] - value["median"] for value in values]
            places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(values))]
            panel.bar(places, medians, width, yerr=(below, above), capsize=2, label=name)
        panel.axhline(1, color="grey", linewidth=0.8, linestyle="--")  # plain generation
        panel.set(ylabel=label, xticks=range(len(ticks)), xticklabels=ticks)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", fontsize=7)
    return figure


def _policies(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a load record by policy, R ascending."""
    policies: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(record["load"], key=lambda row: row["rows"]):
        policies.setdefault(row["policy"], []).append(row)
    return policies


def _draw_trade_off(record: dict[str, Any]) -> Any:
    what = "Points: concurrent rows R; decoding alone, without the prompts' forward."
    figure, (panel,) = _figure(1, record, what, _load_decoding(record))
    for policy, rows in _policies(record).items():
        own, total = [row["tokens_per_s_per_row"] for row in rows], [row["tokens_per_s"]["median"] for row in rows]
        (line,) = panel.plot(own, total, marker="o", markersize=4, label=policy)
        for row, x, y in zip(rows, own, total, strict=True):
            where = {"xytext": (3, 3), "textcoords": "offset points"}
            panel.annotate(f"R={row['rows']}", (x, y), fontsize=6, color=line.get_color(), **where)
    panel.set(xlabel="tokens / s / row", ylabel="tokens / s, all rows", xlim=(0, None), ylim=(0, None))
    panel.legend(fontsize=7)
    return figure


def _draw_budget(record: dict[str, Any]) -> Any:
    what = "Whiskers: quartiles; decoding alone, without the prompts' forward. Budget: the anchor and the drafts verified."
    figure, (speed, budget) = _figure(2, record, what, _load_decoding(record))
    for policy, rows in _policies(record).items():
        places, found = [row["rows"] for row in rows], [row["tokens_per_s"] for row in rows]
        below = [value["median"] - value["quartile_1"] for value in found]
        above = [value["quartile_3"] - value["median"] for value in found]
        style = {"marker": "o", "markersize": 4, "label": policy}
        speed.errorbar(places, [value["median"] for value in found], yerr=(below, above), capsize=2, **style)
        budget.plot(places, [row["verification_budget"] for row in rows], **style)
    for panel, label in ((speed, "tokens / s, all rows"), (budget, "verification budget (tokens / row / round)")):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set(xlabel="concurrent rows R", ylabel=label, ylim=(0, None))
    figure.legend(*budget.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=7)
    return figure


FIGURES = {
    "summary": {"acceptance": _draw_acceptance, "domains": _draw_domains},
    "load": {"trade_off": _draw_trade_off, "budget": _draw_budget},
}
"""Figures by the field that only records of their kind have."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file of dspark_hf.evaluation.speed or load")
    for file in plot(parser.parse_args(arguments).record):
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
