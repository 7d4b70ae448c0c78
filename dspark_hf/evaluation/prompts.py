"""Prompts: what is generated from, one JSON object a line.

    {"dataset": "gsm8k", "domain": "math", "index": 0, "turns": ["Janet has ...", ...]}

`turns` are a user's messages, of which the first is used; `index` is the prompt's place in the original data. Records name
a prompt by `dataset` and `index` and never hold its text.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


EXPECTED = {"dataset": str, "domain": str, "index": int, "turns": list}


@dataclass(frozen=True, slots=True)
class Prompt:
    r"""
    One prompt.

    Args:
        dataset (`str`): Where it comes from.
        domain (`str`): What it is about, such as math, code or chat.
        index (`int`): Its place in the original data.
        text (`str`): The user's message.
    """

    dataset: str
    domain: str
    index: int
    text: str

    def encode(self, tokenizer: Any) -> Any:
        """Token ids of the message in the target's chat template, one row."""
        chat = [{"role": "user", "content": self.text}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def read_prompts(folder: str | Path, per_dataset: int) -> list[Prompt]:
    r"""
    Read the files `*.jsonl` of a folder.

    Args:
        folder (`str` or `Path`): The folder.
        per_dataset (`int`): Only the first so many prompts of each dataset.

    Returns:
        `list[Prompt]`: In the order of the files' names.

    Raises:
        ValueError: If there are no such files, one is empty, or a line is no prompt, naming it.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise ValueError(f"There are no prompt files (*.jsonl) in {folder}: pass a folder that holds some.")
    prompts, counts = [], Counter[str]()
    for file in files:
        for prompt in _read_file(file):
            counts[prompt.dataset] += 1
            if counts[prompt.dataset] <= per_dataset:
                prompts.append(prompt)
    return prompts


def _read_file(file: Path) -> list[Prompt]:
    with file.open(encoding="utf-8") as lines:
        prompts = [parse_prompt(line, f"{file.name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file.name} is empty: remove it, or fill it with one prompt a line.")
    return prompts


def parse_prompt(line: str, name: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not a JSON object: {error}. Each line must be one prompt.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{name} is not a JSON object. Each line must be one prompt.")
    for field, kind in EXPECTED.items():
        if not isinstance(row.get(field), kind):
            raise ValueError(f"{name} has no `{field}` of type {kind.__name__}, got {type(row.get(field)).__name__}.")
    if not row["turns"] or not isinstance(row["turns"][0], str) or not row["turns"][0].strip():
        raise ValueError(
            f"{name} must have a user's message, a string that is not empty, as the first of its `turns`."
        )
    return Prompt(row["dataset"], row["domain"], row["index"], row["turns"][0])
