"""What choosing verification lengths costs: a policy's decision beside a forward of the target.

    python -m dspark_hf.evaluation.scheduling_cost --output docs/benchmarks/scheduling_cost.json

A decision goes from calibrated confidences `(R, K)` to lengths as a Python list. Its share is of a bare target forward over
one token of R rows behind no context, which is less than any round at that R: true shares are smaller. All decisions and
the forward take turns in one process. Confidences are random and costs are made up; neither changes the work. A policy's
name is its schedule; `throughput, greedy` is what both throughput schedules are in greedy decoding.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dspark_hf.evaluation.record import environment, quartiles, timed, write_record
from dspark_hf.reference_pair import reference_target_path
from dspark_hf.scheduling import SCHEDULES, THROUGHPUT_POLICIES, Candidates, Policy, make_policy
from dspark_hf.verification_cost import FlattenedCost, PaddedCost, VerificationCost


WARM_UP = 3  # The asynchronous form decides nothing in its first two rounds.
FORWARDS = 5
POLICIES = {schedule: (schedule, False) for schedule in SCHEDULES} | {"throughput, greedy": ("throughput", True)}
Decision = Callable[[], list[int]]


def make_decisions(rows: int, block_size: int, device: str) -> dict[tuple[str, str], Decision]:
    """A decision for each policy and kind of cost; policies that ask for no cost have the kind `none`."""
    seconds = 1e-3 + 1e-5 * torch.arange(1, rows * (1 + block_size) + 1, dtype=torch.double, device=device)
    free: dict[str, VerificationCost | None] = {"none": None}
    costs: dict[str, VerificationCost | None] = {
        "padded": PaddedCost(seconds[rows - 1 :: rows]),
        "flattened": FlattenedCost(seconds),
    }
    decisions = {}
    for name, (schedule, greedy) in POLICIES.items():
        threshold = 0.4 if schedule == "threshold" else None
        for kind, cost in (costs if schedule in THROUGHPUT_POLICIES else free).items():
            policy = make_policy(schedule, threshold, has_confidence=True, greedy=greedy)
            decisions[name, kind] = _decision(policy, cost, rows, block_size, device)
    return decisions


def _decision(policy: Policy, cost: VerificationCost | None, rows: int, block_size: int, device: str) -> Decision:
    generator = torch.Generator(device).manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(rows, block_size, generator=generator, device=device)
    caps = torch.full((rows,), block_size, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    return lambda: policy.verification_lengths(Candidates(confidence, caps, active, cost)).tolist()


@torch.no_grad()
def measure(target: Any, rows: int, block_size: int, repeats: int) -> list[dict[str, Any]]:
    r"""
    Measure all decisions for one R.

    Args:
        target (`PreTrainedModel`): The target whose forward is the measure.
        rows (`int`): R.
        block_size (`int`): K.
        repeats (`int`): Timings of each decision; the forward has fewer.

    Returns:
        `list[dict[str, Any]]`: For each policy and kind of cost, quartiles of its seconds, the median forward and the share.
    """
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
    decisions = make_decisions(rows, block_size, str(target.device))
    times: dict[tuple[str, str], list[float]] = {name: [] for name in decisions}
    forwards = []
    for repeat in range(WARM_UP + repeats):
        if repeat % max(repeats // FORWARDS, 1) == 0:
            forwards.append(timed(lambda: target(input_ids=tokens, use_cache=False))[1])
        for name in list(decisions) if repeat % 2 == 0 else list(decisions)[::-1]:
            times[name].append(timed(decisions[name])[1])
    forward = quartiles(forwards[1:] or forwards)["median"]
    return [
        {
            "rows": rows,
            "policy": policy,
            "cost": kind,
            "seconds": quartiles(seconds[WARM_UP:]),
            "forward_s": forward,
            "share": quartiles(seconds[WARM_UP:])["median"] / forward,
        }
        for (policy, kind), seconds in times.items()
    ]


COLUMNS = "{:>5} {:19} {:10} {:>22} {:>11} {:>7}"
HEADINGS = ("R", "policy", "cost", "µs (quartiles)", "forward ms", "share")


def table(summary: Sequence[dict[str, Any]]) -> str:
    """Every R, policy and kind of cost, as text."""
    return "\n".join([COLUMNS.format(*HEADINGS)] + [_line(row) for row in summary]) + "\n"


def _line(row: dict[str, Any]) -> str:
    low, median, high = (1e6 * seconds for seconds in row["seconds"].values())
    return COLUMNS.format(
        row["rows"],
        row["policy"],
        row["cost"],
        f"{median:.0f} ({low:.0f} to {high:.0f})",
        f"{1e3 * row['forward_s']:.1f}",
        f"{row['share']:.2%}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name (default: the reference target)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256], help="every R to measure (default: 1 256)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (default: 2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="JSON record to write")
    args = parser.parse_args(arguments)
    if min(*args.rows, args.block_size, args.repeats, args.threads) < 1:
        parser.error("--rows, --block-size, --repeats and --threads must be at least 1.")
    torch.set_num_threads(args.threads)
    name = args.target or str(reference_target_path())
    target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype).to(args.device)
    summary = [row for rows in args.rows for row in measure(target, rows, args.block_size, args.repeats)]
    sys.stdout.write(table(summary))
    if args.output:
        record = {
            "environment": environment("dspark_hf.evaluation.scheduling_cost", target),
            "block_size": args.block_size,
            "repeats": args.repeats,
            "scheduling_cost": summary,
        }
        write_record(args.output, record)


if __name__ == "__main__":
    main()
