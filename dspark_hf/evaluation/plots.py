"""Draw the record of `dspark_hf.evaluation.speed`: two PNG files beside it.

    python -m dspark_hf.evaluation.plots docs/benchmarks/speed.json

`speed_acceptance.png`: share of draft tokens accepted at position k, given that those before were (the paper's figure 2 in
small). `speed_domains.png`: accepted length and speed ratio by domain. Only the record is read.
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
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    figures = {"acceptance": _draw_acceptance(record), "domains": _draw_domains(record)}
    files = [path.with_name(f"{path.stem}_{name}.png") for name in figures]
    for figure, file in zip(figures.values(), files, strict=True):
        figure.savefig(file, dpi=150)
    return files


def _figure(panels: int, record: dict[str, Any], what: str) -> tuple[Any, Any]:
    """An empty figure with its caption, and its panels."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "dspark_hf[plots]".') from error
    figure = Figure(figsize=(3.6 * panels, 4.2), layout="constrained")
    made, decoding = record["environment"], record["decoding"]
    caption = (
        f"{what}\nGreedy, batch {decoding['batch']}, at most {decoding['new_tokens']} new tokens, "
        f"{decoding['repeats']} interleaved runs a prompt; {made['dtype'].removeprefix('torch.')},\n"
        f"{made['device']} ({made['hardware']}), torch threads: {made['threads']}; commit {made['commit']}"
    )
    figure.supxlabel(caption, fontsize=7)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


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
    figure, panels = _figure(len(domains), record, what)
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
    figure, panels = _figure(2, record, "Bars: median over prompts; whiskers: quartiles.")
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file of dspark_hf.evaluation.speed")
    for file in plot(parser.parse_args(arguments).record):
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
