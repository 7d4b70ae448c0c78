"""Training data: responses that the target itself writes to prompts, one JSON object a line (`dspark-hf data`).

    {"index": 17, "prompt_ids": [1, 4093, ...], "response_ids": [55, 103, ..., 2], "temperature": 0.8, "top_k": 0, "top_p": 1.0,
     "finish": "end"}

Invariant: the file holds whole lines and no index twice, whatever ends the process, so the same command goes on where the
last one stopped. Beside it a manifest says what it was made with, and another command is refused.

Many rows are written at once, and a row that ends makes room for the next prompt at once. A greedy response is what
`target.generate` gives for the prompt alone; a sampled one depends on the seed and the prompt's index, not on its row.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer, DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from dspark_hf.caches import SlotCache
from dspark_hf.host import TargetModel, cache_argument
from dspark_hf.loading import load_target
from dspark_hf.training import self_instruct
from dspark_hf.training.prompts import Prompt, Settings, digest, read_prompts
from dspark_hf.transfer import upload
from dspark_hf.verification import Verifier, check_rotary_length, check_verifiable


LOOP_TOKENS, LOOP_PERIOD = 96, 32


class Row:
    """A prompt and what the target has written so far."""

    def __init__(self, prompt: Prompt, settings: Settings):
        self.prompt = prompt
        self.settings = settings
        self.temperature = settings.temperatures[prompt.index % len(settings.temperatures)]
        self.response: list[int] = []
        self.random = random.Random(f"{settings.seed} {prompt.index}")

    @property
    def last(self) -> tuple[int, int]:
        """The last token and its position."""
        position = len(self.prompt.ids) + len(self.response) - 1
        return (self.response or self.prompt.ids)[-1], position

    @property
    def finish(self) -> str | None:
        """Why the response ends here: `"end"`, `"length"`, `"loop"`, or `None` if it goes on."""
        if self.response[-1] in self.settings.end_ids:
            return "end"
        if len(self.response) == self.settings.max_new_tokens:
            return "length"
        return "loop" if _is_loop(self.response) else None

    def sample(self) -> dict[str, Any]:
        """The line of the file."""
        return {
            "index": self.prompt.index,
            "prompt_ids": self.prompt.ids.tolist(),
            "response_ids": self.response,
            "temperature": self.temperature,
            "top_k": self.settings.top_k,
            "top_p": self.settings.top_p,
            "finish": self.finish,
        }


class Rows:
    r"""
    The rows that the target writes at once, with keys and values in slots: the token at position i is in slot i.

    Args:
        target (`PreTrainedModel`): The target.
        num_rows (`int`): How many.
        settings ([`Settings`]): Settings.
    """

    def __init__(self, target: TargetModel, num_rows: int, settings: Settings):
        self.target = target
        self.settings = settings
        self.rows: list[Row | None] = [None] * num_rows
        self.cache = SlotCache(target.config.get_text_config(decoder=True).num_hidden_layers)
        self.warpers: Any = LogitsProcessorList()
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))

    def fill(self, waiting: Iterator[Prompt]) -> bool:
        """Give empty rows to waiting prompts; return whether there is anything to write."""
        for place, row in enumerate(self.rows):
            prompt = next(waiting, None) if row is None else None
            if prompt is not None:
                self._prefill(place, prompt)
        live = [place for place, row in enumerate(self.rows) if row is not None]
        if 0 < 2 * len(live) <= len(self.rows):  # nobody waits any more: stop computing the empty rows
            self.rows = [self.rows[place] for place in live]
            kept = upload(live, self.target.device)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[kept], layer.values[kept]
        return bool(live)

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Write one token of every row; return the rows that end with it, which are empty then."""
        device = self.target.device
        last = [row.last if row is not None else (0, 0) for row in self.rows]
        tokens, slots = upload([token for token, _ in last], device), upload([slot for _, slot in last], device)
        none = torch.ones(len(last), 0, dtype=torch.bool, device=device)
        before_first = torch.full((len(last), 1), -1, device=device)
        verifier = Verifier(self.target, self.cache, none, {"position_ids": before_first})
        used = max(slot for _, slot in last) + 1
        logits = verifier(tokens[:, None], slots[:, None], used, torch.ones_like(slots)).logits[:, 0]  # (R, V)
        chosen = self._choose(logits)
        finished = []
        for place, row in enumerate(self.rows):
            if row is not None:
                row.response.append(chosen[place])
                if row.finish is not None:
                    finished.append(row)
                    self.rows[place] = None
        return finished

    @torch.no_grad()
    def _prefill(self, place: int, prompt: Prompt) -> None:
        """Bring all but the last token of a prompt, which the next step reads, into the slots of a row."""
        ids, length = prompt.ids[:-1].tolist(), len(prompt.ids) - 1
        self.rows[place] = Row(prompt, self.settings)
        self.cache.reserve(length + self.settings.max_new_tokens)
        if not ids:
            return
        own: Any = DynamicCache()
        self.target(upload(ids, self.target.device)[None], logits_to_keep=1, **{cache_argument(): own})
        for mine, theirs in zip(self.cache.layers, own.layers, strict=True):
            if mine.keys is None:
                rows = (len(self.rows), -1, -1, -1)
                mine.lazy_initialization(theirs.keys.expand(rows), theirs.values.expand(rows))
            mine.keys[place, :, :length] = theirs.keys[0]
            mine.values[place, :, :length] = theirs.values[0]

    def _choose(self, logits: torch.Tensor) -> list[int]:
        """The next token of every row: the most likely one, or a draw with the row's own random numbers."""
        chosen = logits.argmax(dim=-1)
        places = [place for place, row in enumerate(self.rows) if row is not None and row.temperature > 0]
        sampled = [row for row in self.rows if row is not None and row.temperature > 0]
        if sampled:
            temperatures = torch.tensor([[row.temperature] for row in sampled], device=logits.device)
            numbers = torch.tensor(
                [[row.random.random()] for row in sampled], dtype=torch.double, device=logits.device
            )
            of_rows = upload(places, logits.device)
            scores = self.warpers(None, logits[of_rows] / temperatures)
            chosen[of_rows] = _invert(scores.softmax(dim=-1), numbers)
        return chosen.tolist()  # the step's host sync


def _invert(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw from `probs` `(R, V)` with uniform float64 `numbers` `(R, 1)`; near probabilities give near draws.

    Inverting the cumulative sums takes one number a row, and never gives an entry of probability 0.
    """
    sums = probs.cumsum(dim=-1, dtype=torch.double)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True).squeeze(1)


def _is_loop(ids: list[int]) -> bool:
    """Whether the last 96 tokens repeat with a period of at most 32."""
    tail = ids[-LOOP_TOKENS:]
    return len(tail) == LOOP_TOKENS and any(tail[n:] == tail[:-n] for n in range(1, LOOP_PERIOD + 1))


class SampleFile:
    r"""
    A file of samples that always ends with a whole line.

    Args:
        path (`Path`): Where it is; a line that an earlier process did not finish is cut off.

    Raises:
        ValueError: If another line is no sample.
    """

    def __init__(self, path: Path):
        self.path = path
        self.indices: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.size = 0
        # Unbuffered, so that nothing of a line that failed is left to be written later.
        self.file = path.open("ab", buffering=0)
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    self._count(line, f"{path.name}:{number}")
        self.file.truncate(self.size)

    def append(self, sample: dict[str, Any]) -> None:
        """Write a sample; if that fails, the file ends with the one before, and `OSError` says so."""
        line = json.dumps(sample).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            self.file.truncate(self.size)
            raise OSError(
                error.errno,
                f"{error.strerror}; its {self.counts['samples']} samples are whole. Make room, then run the same command again",
                str(self.path),
            ) from error
        self._count(line, str(self.path))

    def close(self) -> None:
        self.file.close()

    def _count(self, line: bytes, name: str) -> None:
        try:
            sample = json.loads(line)
            self.indices.add(sample["index"])
            prompt, response = len(sample["prompt_ids"]), len(sample["response_ids"])
            counts = {"samples": 1, "prompt_tokens": prompt, "response_tokens": response, sample["finish"]: 1}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{name} is no sample of this command. Choose another --output.") from error
        self.counts.update(counts)
        self.size += len(line)


def _open_manifest(manifest: Path, samples: Path, made_with: dict[str, Any]) -> dict[str, Any]:
    """Read the manifest of a file of samples, or write one where there is neither; refuse one made with something else."""
    if not manifest.exists():
        if samples.exists():
            raise ValueError(f"{samples} has no {manifest.name}, so nothing is added to it. Choose another --output.")
        _write_manifest(manifest, made_with, complete=False)
    content = json.loads(manifest.read_text(encoding="utf-8"))
    old, new = content["made_with"], json.loads(json.dumps(made_with))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        what = "; ".join(f"{name} was {old.get(name)}, is now {new.get(name)}" for name in names)
        raise ValueError(f"{samples} was made with other settings: {what}. Choose another --output.")
    return content


def _write_manifest(manifest: Path, made_with: dict[str, Any], **more: Any) -> None:
    """Write or replace a manifest in one piece."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = json.dumps({"made_with": made_with, "versions": versions, **more}, indent=1)
    new = manifest.with_suffix(".new")
    new.write_text(content + "\n", encoding="utf-8")
    new.replace(manifest)


def write_samples(
    target: TargetModel,
    prompts: list[Prompt],
    path: Path,
    settings: Settings,
    num_rows: int = 64,
    dropped: Counter[str] | None = None,
) -> Counter[str]:
    r"""
    Let the target respond to prompts, or go on with that.

    Args:
        target (`PreTrainedModel`): The target, on its device and in eval mode.
        prompts (`list[Prompt]`): The prompts.
        path (`Path`): File of samples, in the order in which responses end.
        settings ([`Settings`]): Settings.
        num_rows (`int`): Responses written at once; memory grows with it, speed too up to some point.
        dropped (`Counter[str]`, *optional*): What was dropped before, for the manifest.

    Returns:
        `Counter[str]`: Numbers of samples, of their tokens, of what ended them, and of what was dropped.

    Raises:
        ValueError: If the file was made with other settings, no prompt is short enough, or no response long enough.
        NotImplementedError: If DSpark cannot draft for the target.
        OSError: If writing fails; the file is whole then.
    """
    check_verifiable(target)
    check_rotary_length(target, settings.max_length)
    if num_rows < 1:
        raise ValueError(f"Expected 1 row or more, got {num_rows}.")
    room = settings.max_length - settings.max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if not fitting:
        raise ValueError(f"All {len(prompts)} prompts are longer than {room} tokens: raise --max-length.")
    path.parent.mkdir(parents=True, exist_ok=True)
    made_with = {
        "target": target.config.name_or_path,
        "revision": getattr(target.config, "_commit_hash", None),
        "dtype": str(target.dtype),
        **dataclasses.asdict(settings),
        "prompts": len(prompts),
        "prompts_sha256": digest(prompts),
    }
    manifest = path.with_name(f"{path.name}.manifest.json")
    written = _open_manifest(manifest, path, made_with)
    if written["complete"]:
        return Counter(written["counts"])
    with contextlib.closing(SampleFile(path)) as file:
        waiting = [prompt for prompt in fitting if prompt.index not in file.indices]
        short = _respond(target, waiting, file, settings, num_rows)
        counts = file.counts + Counter(long_prompt=len(prompts) - len(fitting), short_response=short)
    if not file.indices:
        raise ValueError(
            f"All {short} responses are shorter than {settings.min_response_tokens} tokens. Lower the minimum."
        )
    counts += dropped or Counter()
    _write_manifest(manifest, made_with, complete=True, counts=counts)
    return counts


def _respond(target: TargetModel, prompts: list[Prompt], file: SampleFile, settings: Settings, num_rows: int) -> int:
    """Append the responses to all prompts; return how many were too short."""
    rows = Rows(target, min(num_rows, len(prompts)), settings)
    waiting = iter(prompts)
    short = tokens = 0
    start = time.perf_counter()
    done, total = len(file.indices), len(file.indices) + len(prompts)
    with tqdm(total=total, initial=done, unit="sample", desc=file.path.name, miniters=0, mininterval=1) as bar:
        while rows.fill(waiting):
            tokens += sum(row is not None for row in rows.rows)
            finished = rows.step()
            for row in finished:
                if len(row.response) < settings.min_response_tokens:
                    short += 1
                else:
                    file.append(row.sample())
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update(len(finished))
    return short


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `dspark-hf data`."""
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", help="file of JSON lines with `prompt` or `messages`, or name of a data set")
    prompts.add_argument("--self-instruct", action="store_true", help="let the target write the user's turns too")
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--output", required=True, type=Path, help="file of samples to write, or to go on with")
    parser.add_argument("--num-prompts", type=int, help="turns to write, or prompts to read (default: all)")
    parser.add_argument("--split", default="train", help="split of the data set (default: train)")
    parser.add_argument("--raw", action="store_true", help="do not put the text of `prompt` into the chat template")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="in turns (default: 0 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=2048, help="of prompt and response (default: 2048)")
    parser.add_argument("--min-response-tokens", type=int, default=8, help="drop shorter responses (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64, help="responses written at once (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's own), float32, bfloat16, ...")


def run_data(args: argparse.Namespace) -> Counter[str]:
    """Write the samples that the options ask for; return the counts of [`write_samples`]."""
    if args.self_instruct and not args.num_prompts:
        raise ValueError("--self-instruct takes --num-prompts, the number of turns to write.")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.target)
    turn = self_instruct.find_user_turn(tokenizer) if args.self_instruct else None
    if turn is None:
        prompts = read_prompts(tokenizer, args.prompts, args.split, args.num_prompts, args.raw)
    target = load_target(args.target, args.dtype, args.device)
    ends = target.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    settings = Settings(
        end_ids=tuple(ends) if isinstance(ends, list) else (ends,) * (ends is not None),
        temperatures=tuple(args.temperature),
        top_k=args.top_k,
        top_p=args.top_p,
        max_new_tokens=args.max_new_tokens,
        max_length=min(args.max_length, target.config.get_text_config(decoder=True).max_position_embeddings),
        min_response_tokens=args.min_response_tokens,
        seed=args.seed,
    )
    dropped = None
    if turn is not None:
        path = args.output.with_name(f"{args.output.stem}.turns.jsonl")
        write_samples(target, turn.prompts(args.num_prompts), path, turn.settings(settings), args.rows)
        prompts, dropped = self_instruct.keep_turns(tokenizer, path)
    return write_samples(target, prompts, args.output, settings, args.rows, dropped)
