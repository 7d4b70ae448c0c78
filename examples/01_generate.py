"""The reference pair: SmolLM2-135M-Instruct alone and with a DSpark drafter, side by side. Same tokens, fewer forwards.

Both answer the prompt in turns, a few times, and are timed here and now. Then the answer is printed, on a terminal with the
drafter's accepted tokens in green, and what each forward of the target gave to it. The drafter was trained briefly: whether
it is faster is printed. Runs in float32 on the CPU.

python examples/01_generate.py
python examples/01_generate.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspark_hf
from dspark_hf.reference_pair import reference_target_path


PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."
FORWARDS_SHOWN = 12


def load(args):
    """Load target, drafter and tokenizer, and encode the prompt."""
    name = args.target or reference_target_path()
    tokenizer = AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    drafter = dspark_hf.DSparkDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return target, drafter, tokenizer, inputs


def take_turns(target, drafter, inputs, max_new_tokens, repeats):
    """Generate alone and with the drafter in turns; return the last output and the median seconds of both."""

    def run(assistant_model, tokens):
        start = time.perf_counter()
        output = target.generate(
            **inputs,
            assistant_model=assistant_model,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        return output, time.perf_counter() - start

    ways, outputs, seconds = (None, drafter), {}, {None: [], drafter: []}
    for way in ways:
        run(way, min(8, max_new_tokens))  # warm-up
    for repeat in range(repeats):
        for way in ways if repeat % 2 == 0 else reversed(ways):
            outputs[way], elapsed = run(way, max_new_tokens)
            seconds[way].append(elapsed)
    return [(outputs[way], statistics.median(seconds[way])) for way in ways]


def split_by_forward(tokenizer, tokens, rounds):
    """Text that each forward gave: accepted draft tokens, and the target's own token. The first forward is the prompt's.

    `rounds` holds the number of accepted and of committed tokens of each round.
    """
    cuts = [0, 0, 1]
    for accepted, committed in rounds:
        cuts += [cuts[-1] + accepted, cuts[-1] + committed]
    # A character of several tokens belongs to the last of them.
    texts = [tokenizer.decode(tokens[:cut], skip_special_tokens=True).rstrip("\ufffd") for cut in cuts]
    parts = [later[len(earlier) :] for earlier, later in pairwise(texts)]
    return list(zip(parts[::2], parts[1::2], strict=True))


def print_answer(together):
    """Print the text; on a terminal what was drafted is green."""
    green, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print("".join(f"{green}{drafted}{end}{own}" for drafted, own in together))


def print_forwards(alone, together):
    """Print what the first forwards gave, one a line."""
    print(f"\nforward  {'target alone':16} with drafter: «accepted draft tokens» and the target's own token")
    for number, ((_, left), (drafted, own)) in enumerate(zip(alone, together, strict=False), start=1):
        if number > FORWARDS_SHOWN:
            print("    ...")
            break
        right = (f"«{drafted}»" if drafted else "") + own
        print(f"{number:7}  {one_line(left):16} {one_line(right)}")


def one_line(text):
    return text.replace("\n", "\\n")


def print_comparison(alone, together, new_tokens, plain_s, fast_s, tau):
    """Print the numbers of both ways beside each other."""
    print(f"\n{'':18} {'target alone':>12} {'with drafter':>12}")
    print(f"{'target forwards':18} {len(alone):12} {len(together):12}")
    print(f"{'tokens a round (τ)':18} {1:12} {tau:12.2f}")
    print(f"{'tokens/s':18} {len(alone) / plain_s:12.1f} {new_tokens / fast_s:12.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the reference target, converted on first use")
    parser.add_argument("--drafter", default=str(Path(__file__).parent / "smollm2-135m-dspark"))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    target, drafter, tokenizer, inputs = load(args)
    print(f"Answering {args.repeats} times without and with the drafter, in turns ...\n")
    (plain, plain_s), (fast, fast_s) = take_turns(target, drafter, inputs, args.max_new_tokens, args.repeats)

    start = inputs["input_ids"].shape[1]
    plain_tokens, fast_tokens = plain.sequences[0, start:], fast.sequences[0, start:]
    rounds = [(record.accepted, record.committed) for record in fast.statistics.records]
    together = split_by_forward(tokenizer, fast_tokens, rounds)
    alone = split_by_forward(tokenizer, plain_tokens, [(0, 1)] * (len(plain_tokens) - 1))
    print_answer(together)
    print_forwards(alone, together)
    print_comparison(alone, together, len(fast_tokens), plain_s, fast_s, fast.statistics.tau)
    same = torch.equal(plain.sequences, fast.sequences)
    ratio = f"{plain_s / fast_s:.2f} times the target's own speed (median seconds of {args.repeats} runs each)"
    print(f"the same tokens: {'yes' if same else 'NO'}; {ratio}")
    if not same:
        raise SystemExit("The outputs differ: this is a bug (or two logits within rounding of each other).")


if __name__ == "__main__":
    main()
