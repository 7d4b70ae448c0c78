"""`dspark-hf profile`: measure a pair's cost curve ahead of its first use, print and draw it.

dspark-hf profile --target T --drafter D --rows 1 2 4 8 --context 256 1024 --output curve.png
"""

import argparse
import sys
from pathlib import Path

import torch

from dspark_hf.cost_curve import CostCurve, context_bucket
from dspark_hf.loading import load_target
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.taps import check_target
from dspark_hf.verification import check_verifiable


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `dspark-hf profile`."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="batch sizes (default: 1 2 4 8)")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024], help="tokens (default: 256 1024)")
    parser.add_argument("--output", type=Path, help="PNG to draw; needs matplotlib")
    parser.add_argument("--again", action="store_true", help="forget what is on disk for this pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")


def run_profile(args: argparse.Namespace) -> None:
    """Measure what is not known yet, print it in milliseconds and draw it."""
    target = load_target(args.target, args.dtype, args.device)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=args.dtype).to(args.device)
    check_target(drafter, target)
    check_verifiable(target)
    curve = CostCurve.open(target, drafter)
    if args.again:
        curve.forget()
    widths = "".join(f"{width:9}" for width in range(1, drafter.config.block_size + 2))
    sys.stdout.write("ms of drafting a whole block, and of a target forward over so many tokens of every row\n")
    sys.stdout.write(f" rows context    draft{widths}\n")
    for context in args.context:
        for rows in args.rows:
            costs = curve.costs(rows, context)
            cells = "".join(f"{1000 * seconds:9.2f}" for seconds in (costs.draft_seconds[-1], *costs.target_seconds))
            sys.stdout.write(f"{rows:5}{context_bucket(context):8}{cells}\n")
    sys.stdout.write(f"kept in {curve.path}\n")
    if args.output:
        curve.plot(args.output)
        sys.stdout.write(f"drawn in {args.output}\n")
