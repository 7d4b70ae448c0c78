"""The reference pair: SmolLM2-135M-Instruct, alone and with a DSpark drafter. Same tokens, fewer target forwards.

The drafter was trained briefly: it shows the mechanism, and whether it is faster is printed. Runs in float32 on the CPU.

python examples/01_generate.py
python examples/01_generate.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspark_hf
from dspark_hf.reference_pair import reference_target_path


PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain how it works."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the reference target, converted on first use")
    parser.add_argument("--drafter", default=str(Path(__file__).parent / "smollm2-135m-dspark"))
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    target_name = args.target or reference_target_path()
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
    drafter = dspark_hf.DSparkDraftModel.from_pretrained(args.drafter, dtype=torch.float32)

    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}

    def run(**more):
        start = time.perf_counter()
        output = target.generate(**inputs, **options, **more)
        return output, time.perf_counter() - start

    run(assistant_model=drafter)  # warm-up
    plain, plain_seconds = run()
    fast, fast_seconds = run(assistant_model=drafter)

    new_tokens = fast.sequences.shape[1] - inputs["input_ids"].shape[1]
    print(tokenizer.decode(fast.sequences[0, -new_tokens:], skip_special_tokens=True))
    print()
    same = torch.equal(plain.sequences, fast.sequences)
    print(f"target alone   {new_tokens / plain_seconds:6.1f} tokens/s, {new_tokens} target forwards")
    print(
        f"with drafter   {new_tokens / fast_seconds:6.1f} tokens/s, {1 + fast.statistics.target_forwards} target forwards"
    )
    print(f"the same tokens: {'yes' if same else 'NO'}; {fast.statistics.summary()}")
    if not same:
        raise SystemExit("The outputs differ: this is a bug (or two logits within rounding of each other).")


if __name__ == "__main__":
    main()
