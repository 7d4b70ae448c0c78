"""Training data: responses that the target itself writes to prompts, one JSON object a line (`dspark-hf data`).

    {"index": 17, "prompt_ids": [1, 4093, ...], "response_ids": [55, 103, ..., 2], "temperature": 0.8, "top_k": 0, "top_p": 1.0,
     "finish": "end"}

Invariant: the file holds whole lines and no index twice, whatever ends the process, and only one process writes it, so the
same command goes on where the last one stopped. Beside it a manifest says what it was made with, and another command is refused.

Many rows are written at once, and rows that end make room for the next prompts. A greedy response is what
`target.generate` gives for the prompt alone; a sampled one depends on the seed and the prompt's index, not on its row.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer

from dspark_hf.host import TargetModel
from dspark_hf.loading import load_target
from dspark_hf.recurrent import is_recurrent
from dspark_hf.training import self_instruct
from dspark_hf.training.manifest import describe_target, refuse_other, write_manifest
from dspark_hf.training.prompts import Prompt, Settings, digest, read_prompts
from dspark_hf.training.rows import Rows
from dspark_hf.verification import check_rotary_length, check_verifiable


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class SampleFile:
    r"""
    A file of samples that always ends with a whole line.

    Args:
        path (`Path`): Where it is. A line that an earlier process did not finish is cut off.

    Raises:
        ValueError: If another process writes it, or a line is no sample or repeats an index.
    """

    def __init__(self, path: Path):
        self.path = path
        self.indices: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.size = 0
        # Unbuffered, so that nothing of a line that failed is left to be written later.
        self.file = path.open("ab", buffering=0)
        _lock(self.file)
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
            index, repeated = sample["index"], sample["index"] in self.indices
            prompt, response = len(sample["prompt_ids"]), len(sample["response_ids"])
            counts = {"samples": 1, "prompt_tokens": prompt, "response_tokens": response, sample["finish"]: 1}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{name} is no sample of this command. Choose another --output.") from error
        if repeated:
            raise ValueError(f"{name} repeats index {index}. Choose another --output.")
        self.indices.add(index)
        self.counts.update(counts)
        self.size += len(line)


def _lock(file: Any) -> None:
    """Refuse a file that another process writes, where the system can tell. Closing it unlocks it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"{file.name} is being written by another process. Several processes share the work with --shard and an --output each."
        ) from error
    except OSError:  # a file system without locks
        return


def _open_manifest(manifest: Path, samples: Path, made_with: dict[str, Any]) -> dict[str, Any]:
    """Read the manifest of a file of samples, or write one where there is neither; refuse one made with something else."""
    if not manifest.exists():
        if samples.exists():
            raise ValueError(f"{samples} has no {manifest.name}, so nothing is added to it. Choose another --output.")
        write_manifest(manifest, _manifest(made_with, complete=False))
    content = json.loads(manifest.read_text(encoding="utf-8"))
    refuse_other(samples, content["made_with"], made_with, "Choose another --output.")
    return content


def _manifest(made_with: dict[str, Any], **more: Any) -> dict[str, Any]:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"made_with": made_with, "versions": versions, **more}


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
        NotImplementedError: If DSpark cannot draft for the target, or cannot write many of its texts at once.
        OSError: If writing fails; the file is whole then.
    """
    check_verifiable(target)
    check_writes_in_slots(target)
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
        **describe_target(target),
        **dataclasses.asdict(settings),
        "prompts": len(prompts),
        "prompts_sha256": digest(prompts),
    }
    manifest = path.with_name(f"{path.name}.manifest.json")
    written = _open_manifest(manifest, path, made_with)
    with contextlib.closing(SampleFile(path)) as file:
        if written["complete"] and written["counts"].get("samples") == file.counts["samples"]:
            return Counter(written["counts"])
        waiting = [prompt for prompt in fitting if prompt.index not in file.indices]
        short = _respond(target, waiting, file, settings, num_rows)
        counts = file.counts + Counter(long_prompt=len(prompts) - len(fitting), short_response=short)
    if not file.indices:
        raise ValueError(
            f"All {short} responses are shorter than {settings.min_response_tokens} tokens. Lower the minimum."
        )
    counts += dropped or Counter()
    write_manifest(manifest, _manifest(made_with, complete=True, counts=counts))
    return counts


def check_writes_in_slots(target: TargetModel) -> None:
    """Raise `NotImplementedError` if a target keeps recurrent states, which rows that end cannot hand on."""
    if is_recurrent(target):
        raise NotImplementedError(
            f"{type(target).__name__} keeps recurrent states, so responses of different lengths cannot be written at once. Write "
            'them with generate() or a serving engine, one JSON object {"prompt_ids": [...], "response_ids": [...]} a line: '
            "dspark-hf train reads that."
        )


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
    parser.add_argument(
        "--openings", type=Path, help="with --self-instruct: file with first words of user turns, one a line"
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--output", required=True, type=Path, help="file of samples to write, or to go on with")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="K/N", help="write every N-th response, from the K-th on"
    )
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


def _shard(text: str) -> tuple[int, int]:
    """Parse `"0/2"`."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"expected K/N with 0 <= K < N, such as 0/2 and 1/2, got {text!r}")
    return int(first), int(step)


def run_data(args: argparse.Namespace) -> Counter[str]:
    """Write the samples that the options ask for; return the counts of [`write_samples`]."""
    if args.self_instruct and not args.num_prompts:
        raise ValueError("--self-instruct takes --num-prompts, the number of turns to write.")
    if args.openings and not args.self_instruct:
        raise ValueError("--openings are first words of user turns that the target goes on with: add --self-instruct.")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.target)
    turn = self_instruct.find_user_turn(tokenizer) if args.self_instruct else None
    openings = self_instruct.read_openings(tokenizer, args.openings) if args.openings else None
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
    first, step = args.shard
    if turn is None:
        prompts = prompts[first::step]
    else:
        path = args.output.with_name(f"{args.output.stem}.turns.jsonl")
        turns = turn.prompts(args.num_prompts, openings)[first::step]
        write_samples(target, turns, path, turn.settings(settings), args.rows)
        prompts, dropped = self_instruct.keep_turns(tokenizer, turn, path)
    return write_samples(target, prompts, args.output, settings, args.rows, dropped)
