"""Prompts that the target writes itself: its chat template up to the user's turn, continued by sampling.

What it writes there is what it was trained to read there, so no other data are needed (Magpie, arXiv 2406.08464). Openings,
the first words of user turns, steer it towards what a drafter's users will ask.
"""

import dataclasses
import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from dspark_hf.training.prompts import Prompt, Settings, check_chat_template, encode_chat


SENTINEL = "dspark0user0turn"
TEMPERATURE = 1.0
TOP_K = 50
"""A small target's rare tokens are noise: a user turn of them is one that nobody would write."""
MAX_TOKENS = 128
MIN_WORDS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class UserTurn:
    r"""
    Where a chat template puts the user's text.

    Args:
        prefix_ids (`list[int]`): What comes before it.
        end_id (`int`): The token that ends it.
    """

    prefix_ids: list[int]
    end_id: int

    def prompts(self, count: int, openings: list[list[int]] | None = None) -> list[Prompt]:
        """As many prompts of a user's turn, which begins with one of the openings, taken in turns."""
        openings = openings or [[]]
        return [Prompt(index, array("i", self.prefix_ids + openings[index % len(openings)])) for index in range(count)]

    def settings(self, settings: Settings) -> Settings:
        """Settings for writing user turns, given those for the responses."""
        return dataclasses.replace(
            settings,
            end_ids=tuple(sorted({self.end_id, *settings.end_ids})),
            temperatures=(TEMPERATURE,),
            top_k=TOP_K,
            top_p=1.0,
            max_new_tokens=min(MAX_TOKENS, settings.max_new_tokens),
            min_response_tokens=0,
            seed=settings.seed + 1,  # else turn and response of an index would be drawn with the same numbers
        )


def find_user_turn(tokenizer: Any) -> UserTurn:
    r"""
    Find the user's turn by rendering one whose text is known.

    Raises:
        ValueError: If there is no chat template, or if nothing but ordinary text ends the user's turn, so that the target
            cannot say where its own ends.
    """
    check_chat_template(tokenizer)
    chat = [{"role": "user", "content": SENTINEL}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition(SENTINEL)
    prefix_ids, rest = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
    if not prefix_ids or not rest or rest[0] not in special_ids(tokenizer):
        raise ValueError(
            "The target cannot write user turns of its own: its chat template has no special token behind the user's text, "
            f"but {after[:20]!r}. Pass --prompts."
        )
    return UserTurn(prefix_ids, rest[0])


def read_openings(tokenizer: Any, path: Path) -> list[list[int]]:
    r"""
    Read the first words of user turns, a line each.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        path (`Path`): A text file; empty lines do not count, nor does space around a line.

    Returns:
        `list[list[int]]`: Their ids.

    Raises:
        ValueError: If there is none.
        FileNotFoundError: If there is no such file.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    openings = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines if line]
    if not openings:
        raise ValueError(f"{path} holds no openings. Write the first words of a user's turn in each line.")
    return openings


def special_ids(tokenizer: Any) -> set[int]:
    """Ids that are no text."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def keep_turns(tokenizer: Any, turn: UserTurn, path: Path) -> tuple[list[Prompt], Counter[str]]:
    r"""
    Filter the turns that the target wrote and make prompts of them.

    Dropped are turns that did not end by themselves (at the limit of length or in a loop), turns with a special token
    inside, fewer than 3 words or nothing beyond an opening, and all but the first of those that differ only in case and space.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        turn ([`UserTurn`]): Where the turns begin.
        path (`Path`): Samples whose responses are the turns, or the rest of those that have an opening.

    Returns:
        `list[Prompt]` in the order of their indices, and how many turns were dropped, by reason.

    Raises:
        ValueError: If none is left.
    """
    with path.open(encoding="utf-8") as lines:
        samples = sorted((json.loads(line) for line in lines), key=lambda sample: sample["index"])
    special = special_ids(tokenizer)
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for sample in samples:
        written = sample["response_ids"][:-1]
        ids = sample["prompt_ids"][len(turn.prefix_ids) :] + written
        text = tokenizer.decode(ids).strip()
        words = text.lower().split()
        if sample["finish"] != "end":
            dropped[f"turn_{sample['finish']}"] += 1
        elif special.intersection(ids):
            dropped["turn_special_token"] += 1
        elif len(words) < MIN_WORDS or not tokenizer.decode(written).strip():
            dropped["turn_short"] += 1
        elif " ".join(words) in seen:
            dropped["turn_duplicate"] += 1
        else:
            seen.add(" ".join(words))
            chat = [{"role": "user", "content": text}]
            prompts.append(Prompt(sample["index"], array("i", encode_chat(tokenizer, chat))))
    if not prompts:
        raise ValueError(
            f"None of the {len(samples)} user turns in {path} is fit for a prompt: {dict(dropped)}. Ask for more with "
            "--num-prompts and another --output, or pass --prompts."
        )
    return prompts, dropped
