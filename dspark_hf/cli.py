"""Command line: `dspark-hf generate`, `data`, `train`, `calibrate`, `profile`, `convert` and `publish`.

    dspark-hf generate --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7 --prompt "Why is the sky blue?"
    dspark-hf data --target Qwen/Qwen3-4B --self-instruct --num-prompts 5000 --output samples.jsonl
    dspark-hf train --target Qwen/Qwen3-4B --data samples.jsonl --output my-drafter
    dspark-hf calibrate --target Qwen/Qwen3-4B --drafter my-drafter --prompts prompts.jsonl
    dspark-hf profile --target Qwen/Qwen3-4B --drafter my-drafter --rows 1 2 4 8 --output curve.png
    dspark-hf convert my-drafter for-vllm --to speculators --target Qwen/Qwen3-4B
    dspark-hf publish my-drafter --target Qwen/Qwen3-4B --repo org/my-drafter

`generate` streams text to standard output; the run's statistics end it in one line on standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, HfArgumentParser, TextStreamer, set_seed

from dspark_hf.convert import add_convert_arguments, run_convert
from dspark_hf.evaluation.calibrate import add_calibrate_arguments, run_calibrate
from dspark_hf.loading import load_target
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.profiling import add_profile_arguments, run_profile
from dspark_hf.publishing import add_publish_arguments, run_publish
from dspark_hf.scheduling import SCHEDULES
from dspark_hf.training.command import add_train_command
from dspark_hf.training.data import add_data_arguments, run_data


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 2 after an error in what was asked for."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser(arguments).parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        sys.stderr.write(f"dspark-hf {args.command}: {error}\n")
        return 2
    return 0


def generate(args: argparse.Namespace) -> None:
    """Stream a reply and end with one line of statistics."""
    target, drafter, tokenizer = load_pair(args.target, args.drafter, args.device, args.dtype)
    drafter.generation_config.update(**_scheduling(args))
    if args.seed is not None:
        set_seed(args.seed)
    output = target.generate(
        **encode_prompt(tokenizer, args.prompt, args.raw).to(target.device),
        assistant_model=drafter,
        max_new_tokens=args.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
        **_sampling(args),
    )
    sys.stderr.write(output.statistics.summary() + "\n")


def write_data(args: argparse.Namespace) -> None:
    """Let the target write samples and end with one line of counts."""
    counts = run_data(args)
    sys.stderr.write(", ".join(f"{number} {name}" for name, number in sorted(counts.items())) + "\n")


def convert(args: argparse.Namespace) -> None:
    """Convert a drafter and print a command line that runs the result."""
    sys.stdout.write(run_convert(args) + "\n")


def publish(args: argparse.Namespace) -> None:
    """Write or upload a drafter's repository and say where it is."""
    sys.stderr.write(f"published: {run_publish(args)}\n")


def load_pair(target: str, drafter: str, device: str, dtype: str) -> tuple[Any, DSparkDraftModel, Any]:
    r"""
    Load target, drafter and tokenizer onto one device.

    Args:
        target (`str`): Folder or Hub name of the target.
        drafter (`str`): Folder or Hub name of the drafter.
        device (`str`): torch device.
        dtype (`str`): `"auto"` or a torch dtype's name, for both models.
    """
    model = load_target(target, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    return model, DSparkDraftModel.from_pretrained(drafter, dtype=dtype).to(device), tokenizer


def encode_prompt(tokenizer: Any, prompt: str, raw: bool = False) -> Any:
    """Encode a prompt as the user's turn of a chat, or as it is when `raw` or when there is no chat template."""
    if not prompt.strip():
        raise ValueError("--prompt is empty: pass the text to answer.")
    if raw or tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}


def _scheduling(args: argparse.Namespace) -> dict[str, Any]:
    options = {
        "num_assistant_tokens": args.num_draft_tokens,
        "num_assistant_tokens_schedule": args.schedule,
        "assistant_confidence_threshold": args.threshold,
    }
    return {name: value for name, value in options.items() if value is not None}


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark-hf", description="DSpark speculative decoding for transformers.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=HfArgumentParser)
    data = commands.add_parser("data", dataclass_types=[], help="let a target write samples to train its drafter on")
    add_data_arguments(data)
    data.set_defaults(run=write_data)
    add_train_command(commands, arguments)
    profile = commands.add_parser("profile", dataclass_types=[], help="measure what the throughput policies go by")
    add_profile_arguments(profile)
    profile.set_defaults(run=run_profile)
    calibrate = commands.add_parser(
        "calibrate", dataclass_types=[], help="fit a drafter's confidences to what is accepted"
    )
    add_calibrate_arguments(calibrate)
    calibrate.set_defaults(run=run_calibrate)
    converting = commands.add_parser("convert", dataclass_types=[], help="write a drafter in this layout or another")
    add_convert_arguments(converting)
    converting.set_defaults(run=convert)
    publishing = commands.add_parser(
        "publish", dataclass_types=[], help="make a drafter's folder a whole Hub repository"
    )
    add_publish_arguments(publishing)
    publishing.set_defaults(run=publish)
    command = commands.add_parser("generate", dataclass_types=[], help="stream a reply and end with its statistics")
    command.set_defaults(run=generate)
    command.add_argument("--target", required=True, help="folder or Hub name of the target")
    command.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    command.add_argument("--prompt", required=True)
    command.add_argument("--raw", action="store_true", help="do not put the prompt into the chat template")
    command.add_argument("--max-new-tokens", type=int, default=256)
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    command.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    command.add_argument("--seed", type=int)
    command.add_argument(
        "--num-draft-tokens", type=int, help="most draft tokens to verify a round (default: block size)"
    )
    command.add_argument("--schedule", choices=SCHEDULES, help="default: the drafter's own")
    command.add_argument("--threshold", type=float, help="confidence threshold, with --schedule threshold")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    return parser


if __name__ == "__main__":
    sys.exit(main())
