"""Samples: what a drafter trains on, one JSON object a line.

    {"prompt_ids": [1, 4093, ...], "response_ids": [55, 103, ...], ...}

The response was written by the target itself (`dspark-hf data`); only its tokens are supervised. Other fields of a line,
such as the sampling settings, are not read. A file whose name ends in `.gz` is gzip.
"""

import gzip
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    r"""
    A prompt and the target's response.

    Args:
        name (`str`): Where it came from, `path:line`, for messages.
        input_ids (`list[int]`): Prompt and response, ids of the target's vocabulary.
        prompt_length (`int`): How many of them are the prompt's.
    """

    name: str
    input_ids: list[int]
    prompt_length: int


def read_samples(path: str | Path, max_length: int, block_size: int) -> list[Sample]:
    r"""
    Read a file of samples.

    Args:
        path (`str` or `Path`): JSON lines, gzip when the name ends in `.gz`.
        max_length (`int`): Longer samples are cut there, in tokens.
        block_size (`int`): Samples that cannot fill a block are left out, and their number is logged: fewer than
            `block_size + 1` tokens, or fewer than 2 of a response.

    Returns:
        `list[Sample]`: In the file's order.

    Raises:
        ValueError: If a line is no sample, naming it, or no sample is left.
    """
    path = Path(path)
    samples = [_cut(sample, max_length) for sample in _parse(path)]
    if not samples:
        raise ValueError(f"{path} holds no samples: it is empty. Write some with `dspark-hf data`.")
    long_enough = [sample for sample in samples if _fills_a_block(sample, block_size)]
    if not long_enough:
        raise ValueError(
            f"None of the {len(samples)} samples of {path} fills a block: that takes {block_size + 1} tokens, 2 of them of "
            f"the response, within the first {max_length}. Use longer responses, a larger maximum length or a smaller block."
        )
    if len(long_enough) < len(samples):
        logger.warning(
            "%d of %d samples of %s are shorter than a block of %d tokens and are left out.",
            len(samples) - len(long_enough),
            len(samples),
            path,
            block_size,
        )
    return long_enough


def check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise `ValueError` naming the first sample with a token that a vocabulary of this size does not have."""
    for sample in samples:
        if max(sample.input_ids) >= vocab_size:
            raise ValueError(
                f"{sample.name} holds token {max(sample.input_ids)}, but the target's vocabulary ends at {vocab_size - 1}: it was "
                "written by another target or tokenizer. Write samples with this one: `dspark-hf data`."
            )


def digest(samples: Sequence[Sample]) -> str:
    """SHA-256 of the samples' tokens, for manifests."""
    sha256 = hashlib.sha256()
    for sample in samples:
        sha256.update(json.dumps([sample.prompt_length, sample.input_ids]).encode())
    return sha256.hexdigest()


def _parse(path: Path) -> Iterator[Sample]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _sample(line, f"{path}:{number}")


def _sample(line: str, name: str) -> Sample:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not a JSON object: {error}. Each line must be one sample.") from error
    prompt, response = (_ids(row, field, name) for field in ("prompt_ids", "response_ids"))
    return Sample(name, prompt + response, len(prompt))


def _ids(row: Any, field: str, name: str) -> list[int]:
    ids = row.get(field) if isinstance(row, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{name} has no `{field}`: expected a list of token ids. `dspark-hf data` writes such lines.")
    return ids


def _cut(sample: Sample, max_length: int) -> Sample:
    return Sample(sample.name, sample.input_ids[:max_length], min(sample.prompt_length, max_length))


def _fills_a_block(sample: Sample, block_size: int) -> bool:
    response = len(sample.input_ids) - sample.prompt_length
    return len(sample.input_ids) > block_size and response > 1
