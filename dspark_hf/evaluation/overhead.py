"""Overhead of a round: its time over one bare target forward of the same width plus one bare drafter pass.

    python -m dspark_hf.evaluation.overhead --drafter examples/smollm2-135m-dspark --output docs/benchmarks/overhead.json

A repeat runs one `generate()` call and takes the median time of its rounds of full width; then, as many times as there
were such rounds, the target's own forward over as many tokens with a cache of transformers, and the drafter's two stages
with a plain argmax, both at the middle of the text's length. All happen in one process, one after the other, so a noisy
machine disturbs them alike. Reported is the median ratio over the repeats, with its quartiles.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from dspark_hf.decoding import Decoding
from dspark_hf.drafting import Context, Drafting
from dspark_hf.evaluation.record import environment, quartiles, timed, write_record
from dspark_hf.host import cache_argument
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.reference_pair import reference_target_path
from dspark_hf.taps import TapRecorder, tapped_layers


PROMPT = "Explain step by step how a bicycle stays upright when it moves."


def measure(
    target: Any, drafter: DSparkDraftModel, inputs: Any, new_tokens: int, repeats: int
) -> list[dict[str, float]]:
    r"""
    Measure `repeats` times after one warm-up.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`DSparkDraftModel`]): Its drafter; all its draft tokens are verified.
        inputs (`BatchEncoding`): The prompt, one row.
        new_tokens (`int`): Tokens to generate; end-of-text is off.
        repeats (`int`): Number of measurements.

    Returns:
        `list[dict[str, float]]`: Seconds of a round, of a bare target forward and of a bare drafter pass, and the ratio.
    """
    length = inputs["input_ids"].shape[1] + new_tokens // 2
    bare_target, bare_drafter = _bare_passes(target, drafter, length)
    results = []
    for repeat in tqdm(range(repeats + 1), desc="overhead", unit="repeat"):
        rounds = _round_seconds(target, drafter, inputs, new_tokens)
        entry = {
            "round_s": statistics.median(rounds),
            "target_s": statistics.median(_seconds(bare_target) for _ in rounds),
            "drafter_s": statistics.median(_seconds(bare_drafter) for _ in rounds),
        }
        entry["ratio"] = entry["round_s"] / (entry["target_s"] + entry["drafter_s"])
        if repeat > 0:
            results.append(entry)
    return results


class TimedDecoding(Decoding):
    """The loop, with the seconds of its rounds of full width."""

    def _round(self) -> None:
        seconds = _seconds(super()._round)
        if self.statistics.records[-1].verified == self.drafter.config.block_size:
            self.round_seconds.append(seconds)

    def run(self) -> Any:
        self.round_seconds: list[float] = []
        return super().run()


def _round_seconds(target: Any, drafter: DSparkDraftModel, inputs: Any, new_tokens: int) -> list[float]:
    runs = []

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        runs.append(
            TimedDecoding(
                model, drafter, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        )
        return runs[-1].run()

    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    target.generate(**inputs, custom_generate=decode, **options)
    return runs[0].round_seconds


def _bare_passes(target: Any, drafter: DSparkDraftModel, length: int) -> tuple[Callable, Callable]:
    """The two passes, on random text of `length` tokens."""
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocab_size, (1, length), generator=generator).to(target.device)
    block = torch.randint(config.vocab_size, (1, 1 + config.block_size), generator=generator).to(target.device)
    cache = DynamicCache(config=target.config)
    with (
        torch.no_grad(),
        TapRecorder(target, tapped_layers(config, target), drafter.device, drafter.dtype) as recorder,
    ):
        target(input_ids=text, use_cache=True, **{cache_argument(): cache})
        taps = recorder.take()

    @torch.no_grad()
    def bare_target() -> None:
        target(input_ids=block, use_cache=True, **{cache_argument(): cache})
        layer: Any
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    drafting = Drafting(drafter, target, torch.ones_like(text, dtype=torch.bool), 0)
    slots = torch.arange(length, device=text.device)[None]
    counts = torch.tensor([length], device=text.device)
    anchor, used = block[:, 0], length + config.num_block_inputs

    @torch.no_grad()
    def bare_drafter(count: int = config.block_size + 1) -> None:
        # A round's context is as wide as the target's last forward.
        drafting.observe(Context(taps[:, -count:], slots[:, -count:], counts.clamp(max=count)))
        drafting.draft(anchor, counts, used, config.block_size, _argmax)

    bare_drafter(length)
    return bare_target, bare_drafter


def _argmax(_index: int, logits: torch.Tensor, _drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), logits


def _seconds(function: Callable[[], Any]) -> float:
    return timed(function)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name (default: the reference target)")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="JSON record to write")
    args = parser.parse_args()
    target_name = args.target or str(reference_target_path())
    target: Any = AutoModelForCausalLM.from_pretrained(target_name, dtype=args.dtype)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=args.dtype).to(args.device)
    tokenizer: Any = AutoTokenizer.from_pretrained(target_name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    results = measure(target.to(args.device), drafter, inputs.to(args.device), args.new_tokens, args.repeats)
    ratio = quartiles([entry["ratio"] for entry in results])
    record = {
        "environment": environment("dspark_hf.evaluation.overhead", target),
        "new_tokens": args.new_tokens,
        "repeats": results,
        "ratio": ratio,
    }
    for name in ("round_s", "target_s", "drafter_s"):
        milliseconds = 1000 * statistics.median(entry[name] for entry in results)
        sys.stdout.write(f"{name[:-2]:8} {milliseconds:8.2f} ms\n")
    low, median, high = ratio.values()
    sys.stdout.write(f"ratio    {median:8.3f}    quartiles {low:.3f} to {high:.3f}, n = {len(results)}\n")
    if args.output:
        write_record(args.output, record)


if __name__ == "__main__":
    main()
