"""The model card of a drafter: what it is, three ways to use it, what was measured, how it was trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dspark_hf.modeling.configuration_dspark import DSparkConfig


TAGS = ("dspark", "speculative-decoding", "custom_generate")
MARK = "<!-- Written by dspark_hf, which writes it again. Remove this line to keep changes of your own. -->"
"""Stands in every card made here. A card without it is a person's and is left alone."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    r"""
    What a card says beside the drafter's config.

    Args:
        name (`str`): Repository or folder that the examples on the card load.
        weights (`str`): Their size and dtype, such as `"25 MB in bfloat16"`.
        base_model (`str`, *optional*): Hub name of the target.
        record (`Mapping`, *optional*): Of `dspark_hf.evaluation.speed`, for the measured table.
        training (`str`, *optional*): How the drafter was trained, in Markdown.
        tags (`Sequence[str]`): More tags than [`TAGS`].
    """

    name: str
    weights: str
    base_model: str | None = None
    record: Mapping[str, Any] | None = None
    training: str | None = None
    tags: Sequence[str] = field(default=())


def model_card(config: DSparkConfig, facts: CardFacts) -> str:
    r"""
    Write a card.

    Args:
        config ([`DSparkConfig`]): The drafter's.
        facts ([`CardFacts`]): The rest.

    Raises:
        ValueError: If the record is none of `dspark_hf.evaluation.speed`.
    """
    data = ModelCardData(
        library_name="transformers",
        base_model=facts.base_model,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*TAGS, *facts.tags])),
    )
    target = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else "its target"
    sections = [
        f"---\n{data.to_yaml()}\n---\n{MARK}",
        f"# {Path(facts.name).name}: a DSpark drafter" + (f" for {facts.base_model}" if facts.base_model else ""),
        f"It proposes tokens to {target}, which decides: the text is the target's own, with fewer of its forwards "
        "([DSpark](https://arxiv.org/abs/2607.05147)). It writes no text alone.",
        shape(config, facts.weights),
        usage(facts.name, facts.base_model),
    ]
    if facts.record is not None:
        sections.append(measured(facts.record))
    if facts.training:
        sections.append(f"## Training\n\n{facts.training.strip()}")
    return "\n\n".join(sections) + "\n"


def is_written_here(card: str) -> bool:
    """Whether a card was made by [`model_card`] and not changed by a person who wants to keep the changes."""
    return MARK in card


def with_tags(card: str, tags: Sequence[str]) -> str:
    """A card, everything else as it is, with more tags."""
    parsed = ModelCard(card, ignore_metadata_errors=True)
    parsed.data["tags"] = list(dict.fromkeys([*(parsed.data.get("tags") or []), *tags]))
    return str(parsed)


def shape(config: DSparkConfig, weights: str) -> str:
    """One sentence or two about the architecture."""
    head = f"{config.markov_head_type} sequential head of rank {config.markov_rank}"
    reduced = config.draft_vocab_size < config.vocab_size
    parts = [
        f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        f"blocks of {config.block_size} tokens",
        head if config.markov_rank > 0 else "no sequential head",
        "a confidence head" if config.enable_confidence_head else "no confidence head",
        f"a draft vocabulary of {config.draft_vocab_size:,} of {config.vocab_size:,} tokens" if reduced else "",
        f"taps after the target's layers {', '.join(map(str, config.target_layer_ids))}",
        weights,
    ]
    whose = {True: "its own", False: "the target's"}
    borrowed = f"Its embedding is {whose[config.has_embedding]}, its head {whose[config.has_lm_head]}."
    return "; ".join(filter(None, parts)) + f". {borrowed}"


def usage(name: str, base_model: str | None) -> str:
    """The three ways to use a drafter."""
    target = base_model or "org/target"
    return f'''## Use

Each way needs the package `dspark_hf`, and gives the tokens (greedy, float32) or the distribution (sampling) of the target alone.

```python
import dspark_hf  # generate() now understands DSpark drafters
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}", padding_side="left")
target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
drafter = dspark_hf.DSparkDraftModel.from_pretrained("{name}", dtype=target.dtype, device_map=target.device)
inputs = tokenizer("The sky is", return_tensors="pt").to(target.device)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
```

In a pipeline:

```python
import dspark_hf
from transformers import pipeline

generator = pipeline("text-generation", model="{target}", assistant_model="{name}")
```

Without importing anything: `transformers` fetches and runs `custom_generate/generate.py` of this repository.

```python
output = target.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=64)
```'''


HEADINGS = ("prompts", "n", "τ", "plain tokens/s", "DSpark tokens/s", "ratio", "median (quartiles)", "acceptance")


def measured(record: Mapping[str, Any]) -> str:
    r"""
    The measured table of a card.

    Args:
        record (`Mapping`): Of `dspark_hf.evaluation.speed`, all of this drafter.

    Raises:
        ValueError: If it is another record.
    """
    try:
        where, decoding, rows = record["environment"], record["decoding"], record["summary"]
        tables = [_table(name, rows) for name in dict.fromkeys(row["variant"] for row in rows)]
        greedy = "Greedy" if decoding["greedy"] else "Sampled"
        conditions = (
            f"{greedy}, {where['dtype'].removeprefix('torch.')}, batch {decoding['batch']}, at most "
            f"{decoding['new_tokens']} new tokens, on {where.get('hardware', where['device'])} ({where['threads']} threads); "
            f"seconds are medians of {decoding['repeats']} runs, in turn with plain `generate()`."
        )
        versions = ", ".join(f"{name} {where[name]}" for name in ("dspark_hf", "transformers", "torch"))
    except (KeyError, TypeError, IndexError) as error:
        what = (
            f"{error} is missing"
            if isinstance(error, KeyError)
            else "it is built otherwise, or has no row for all prompts"
        )
        raise ValueError(f"This is no record of `python -m dspark_hf.evaluation.speed`: {what}.") from error
    legend = (
        "τ is the accepted length, tokens a round with the target's own; ratio is plain seconds over DSpark seconds, in total "
        "and by prompt; acceptance is by position, given that the positions before were accepted."
    )
    made = f"Measured with {versions}" + (f" (commit {where['commit']})." if where.get("commit") else ".")
    return "\n\n".join(["## Measured", conditions, *tables, legend, made])


def _table(variant: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of one variant by domain, all prompts last."""
    own = [row for row in rows if row["variant"] == variant and row["by"] != "dataset"]
    own.sort(key=lambda row: row["by"] == "all")
    lines = [_line(HEADINGS), _line(["---"] * len(HEADINGS)), *(_line(_cells(row)) for row in own)]
    prompts = own[-1]["prompts"]
    same = prompts - own[-1]["prompts_that_differ"]
    return f"**{variant}**; all runs gave the same tokens on {same} of {prompts} prompts.\n\n" + "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, median, high = (row["ratio_by_prompt"][name] for name in ("quartile_1", "median", "quartile_3"))
    return [
        row["name"],
        str(row["prompts"]),
        f"{row['tau']:.2f}",
        f"{row['plain_tokens_per_s']:.1f}",
        f"{row['dspark_tokens_per_s']:.1f}",
        f"{row['ratio']:.2f}",
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        " ".join(f"{share:.2f}" for share in row["conditional_acceptance_by_position"]),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def training_facts(folder: Path) -> str | None:
    r"""
    What `dspark-hf train` left in a drafter's folder, in a sentence or two.

    Args:
        folder (`Path`): The drafter's; its `trainer_state.json` is read.

    Returns:
        `str` in Markdown, or `None` when there is no such file.
    """
    file = folder / "trainer_state.json"
    if not file.is_file():
        return None
    state = json.loads(file.read_text(encoding="utf-8"))
    facts = [
        f"{state['global_step']:,} steps with `dspark-hf train`, {state.get('epoch') or 0:.1f} epochs, batches of "
        f"{state['train_batch_size']} a device."
    ]
    measured_on_held_out = [entry for entry in state["log_history"] if "eval_tau" in entry]
    if measured_on_held_out:
        last = measured_on_held_out[-1]
        facts.append(
            f"Teacher-forced accepted length on held-out samples after step {last['step']:,}: "
            f"{last['eval_greedy_tau']:.2f} greedy, {last['eval_tau']:.2f} at temperature 1."
        )
    return " ".join(facts)
