"""Prompts: what the target answers to make samples, from JSON lines or from a data set of the library `datasets`.

    {"prompt": "Why is the sky blue?"}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]}

Both become ids through the target's own chat template; text goes in as it is only where that was asked for.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    r"""
    A prompt, ready for the target.

    Args:
        index (`int`): Its place in the source, from 0.
        ids (`array` of `int`): Tokens up to where the response begins; a quarter of the memory of a list.
    """

    index: int
    ids: "array[int]"


@dataclass(frozen=True, slots=True)
class Settings:
    r"""
    What decides which samples come out.

    Args:
        end_ids (`tuple[int, ...]`): Tokens that end a response.
        temperatures (`tuple[float, ...]`): Sampling temperatures, 0 for greedy; prompt i gets entry i modulo their number.
        top_k (`int`): Sample among the most likely tokens; 0 is off.
        top_p (`float`): Sample among the most likely tokens of this probability, in (0, 1]; 1 is off.
        max_new_tokens (`int`): Most tokens of a response.
        max_length (`int`): Most tokens of prompt and response; prompts that leave no room for `max_new_tokens` are dropped.
        min_response_tokens (`int`): Shorter responses are dropped.
        seed (`int`): Seed.

    Raises:
        ValueError: If a setting is out of its range.
    """

    end_ids: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 512
    max_length: int = 2048
    min_response_tokens: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"Expected temperatures of 0 (greedy) or more, got {self.temperatures}.")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top_k >= 0 and top_p in (0, 1], got {self.top_k} and {self.top_p}.")
        if not 0 < self.max_new_tokens < self.max_length:
            raise ValueError(
                f"Expected a number of new tokens between 1 and {self.max_length - 1}, so that a text of {self.max_length} "
                f"tokens has room for a prompt, got {self.max_new_tokens}. Lower --max-new-tokens."
            )


def read_prompts(
    tokenizer: Any, source: str, split: str = "train", limit: int | None = None, raw: bool = False
) -> list[Prompt]:
    r"""
    Read prompts and encode them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        source (`str`): A file of JSON lines, or the name of a data set with a column `messages` or `prompt`. An
            assistant's turn at the end of `messages` is left out: the target writes its own.
        split (`str`): Split of the data set.
        limit (`int`, *optional*): Read only the first ones.
        raw (`bool`): Encode the text of `prompt` without chat template.

    Returns:
        `list[Prompt]`: In the source's order.

    Raises:
        ValueError: If a line is no prompt, naming it, if there are none, or if there is no chat template.
        FileNotFoundError: If there is no such file.
        ImportError: If the source is a data set and `datasets` is not installed.
    """
    if not raw:
        check_chat_template(tokenizer)
    rows = itertools.islice(_rows(source, split), limit)
    prompts = [Prompt(index, array("i", _encode(tokenizer, row, name, raw))) for index, (name, row) in enumerate(rows)]
    if not prompts:
        raise ValueError(f"{source} holds no prompts. Write one JSON object a line, such as {_EXAMPLES}.")
    return prompts


def encode_chat(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    """Ids of a chat up to where the assistant's turn begins."""
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def check_chat_template(tokenizer: Any) -> None:
    """Raise `ValueError` if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "The target's tokenizer has no chat template, so it cannot tell whose turn it is. Use a target that was "
            "trained to chat, or pass --prompts with --raw to let it continue the text of each `prompt`."
        )


def digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of all indices and ids."""
    hashed = hashlib.sha256()
    for prompt in prompts:
        hashed.update(f"{prompt.index} {len(prompt.ids)} ".encode() + prompt.ids.tobytes())
    return hashed.hexdigest()


_EXAMPLES = '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


def _rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """Rows of the source, each with a name for messages."""
    path = Path(source)
    if path.is_file():
        return _lines(path)
    if path.suffix in (".jsonl", ".json"):
        raise FileNotFoundError(f"There is no file {source}.")
    return ((f"{source}[{split}]:{number}", row) for number, row in enumerate(_dataset(source, split)))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            name = f"{path.name}:{number}"
            try:
                if line.strip():
                    yield name, json.loads(line)
            except ValueError as error:  # neither JSON nor UTF-8
                raise ValueError(f"{name} is not a JSON object: {error}. Expected {_EXAMPLES}.") from error


def _dataset(source: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source} is no file, and to read a data set of that name takes `datasets`: pip install datasets (or dspark_hf[data])."
        ) from error
    return datasets.load_dataset(source, split=split)


def _encode(tokenizer: Any, row: Any, name: str, raw: bool) -> list[int]:
    content: Any = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
    if isinstance(content, str) and content.strip():
        if raw:
            return tokenizer(content)["input_ids"]
        content = [{"role": "user", "content": content}]
    if not _is_chat(content) or raw:
        what = '{"prompt": "text"} with --raw' if raw else _EXAMPLES
        raise ValueError(f"{name} is no prompt: expected {what}.")
    chat = content[:-1] if content[-1]["role"] == "assistant" else content
    try:
        return encode_chat(tokenizer, chat)
    except Exception as error:  # templates raise errors of their own
        raise ValueError(f"{name} does not go through the target's chat template: {error}") from error


def _is_chat(content: Any) -> bool:
    def is_turn(turn: Any) -> bool:
        return isinstance(turn, dict) and all(isinstance(turn.get(field), str) for field in ("role", "content"))

    return isinstance(content, list) and all(map(is_turn, content)) and any(t["role"] == "user" for t in content)
