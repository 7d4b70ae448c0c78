"""Train a small DSpark drafter with a plain loop: frozen target, taps by hooks, the three losses of section 3.3.

    python examples/train_drafter.py --data samples.jsonl.gz --output my-drafter --minutes 20

Each line of the data holds `prompt_ids` and `response_ids`, text that the target wrote itself (generate
answers with it and store the ids). The target runs once over
the samples, its features stay in memory (7 KB a token for the reference target), and the drafter trains on them. The loop
is kept short to be read: it saves its weights every few minutes but cannot resume its optimiser. It runs on the CPU, wants
more than 48 samples (which it holds out), and `--taps` and `--mask-token-id` default to values for the reference target.
"""

import argparse
import gzip
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.drafting import BorrowedHead
from dspark_hf.reference_pair import reference_target_path
from dspark_hf.taps import TapRecorder, check_target
from dspark_hf.training.anchors import block_hidden_states, pack_blocks, sample_anchors
from dspark_hf.training.losses import LossConfig, aligned_target_logits, draft_losses


def load_samples(path: str, max_length: int) -> list[tuple[list[int], int]]:
    """Read `(token ids, prompt length)` pairs, cut to `max_length` tokens."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    samples = [((r["prompt_ids"] + r["response_ids"])[:max_length], len(r["prompt_ids"])) for r in rows]
    return [(ids, prompt) for ids, prompt in samples if len(ids) > prompt + 8]


def kept_tokens(samples: list, size: int) -> torch.Tensor:
    """Return the `size` tokens that the target writes most often, in ascending order."""
    counts = Counter(token for ids, prompt in samples for token in ids[prompt:])
    common = [token for token, _ in counts.most_common(size)]
    filler = (token for token in range(10**9) if token not in counts)
    while len(common) < size:
        common.append(next(filler))
    return torch.tensor(sorted(common))


@dataclass
class Sample:
    """One sequence and what the target said about it, in bfloat16."""

    ids: torch.Tensor  # (T,)
    prompt_length: int
    taps: torch.Tensor  # (T, taps * D)
    last_hidden: torch.Tensor  # (T, D), after the final norm


def run_target(target: PreTrainedModel, layer_ids: list[int], samples: list, batch: int) -> list[Sample]:
    """Run the target over `(ids, prompt length)` pairs; padding comes last, where causal attention never sees it."""
    done = []
    samples = sorted(samples, key=lambda sample: len(sample[0]))
    with torch.no_grad(), TapRecorder(target, layer_ids, target.device, torch.bfloat16) as recorder:
        for first in tqdm(range(0, len(samples), batch), desc="target", unit="batch"):
            rows = samples[first : first + batch]
            ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
            last_hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
            taps = recorder.take()
            for row, (tokens, prompt) in enumerate(rows):
                size = len(tokens)
                done.append(
                    Sample(ids[row, :size].clone(), prompt, taps[row, :size].clone(), last_hidden[row, :size].clone())
                )
    return done


class Objective:
    """The losses of one batch, and its teacher-forced greedy τ."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel, args: argparse.Namespace):
        self.target, self.drafter, self.args = target, drafter, args
        self.lm_head = BorrowedHead(target.get_output_embeddings(), drafter.kept_token_ids)
        self.config = LossConfig(cross_entropy=args.ce_weight, total_variation=args.tv_weight)

    def __call__(self, samples: list[Sample]) -> tuple[torch.Tensor, float]:
        drafter, target = self.drafter, self.target
        ids = pad_sequence([sample.ids for sample in samples], batch_first=True)
        taps = pad_sequence([sample.taps for sample in samples], batch_first=True)
        last_hidden = pad_sequence([sample.last_hidden for sample in samples], batch_first=True)
        padding = pad_sequence([torch.ones_like(sample.ids) for sample in samples], batch_first=True)
        prompts = torch.tensor([sample.prompt_length for sample in samples])
        response = padding * (torch.arange(ids.shape[1]) >= prompts[:, None])
        anchors = sample_anchors(response, self.args.anchors, drafter.config.block_size, padding)
        blocks = pack_blocks(drafter.config, ids, response, anchors, padding)
        target_logits = aligned_target_logits(blocks, last_hidden, target.get_output_embeddings())
        with torch.autocast("cpu", torch.bfloat16):
            hidden = block_hidden_states(drafter, blocks, taps, target.get_input_embeddings())
            losses = draft_losses(drafter, blocks, hidden, target_logits, self.lm_head, self.config)
        return losses.total, losses.metrics.greedy_tau.item()


def build_drafter(target: PreTrainedModel, samples: list, args: argparse.Namespace) -> DSparkDraftModel:
    config = DSparkConfig.from_target(
        target.config,
        num_hidden_layers=args.layers,
        target_layer_ids=args.taps,
        markov_rank=args.rank,
        draft_vocab_size=args.draft_vocab,
        mask_token_id=args.mask_token_id,
    )
    drafter = DSparkDraftModel(config)
    drafter.d2t.copy_(kept_tokens(samples, args.draft_vocab) - torch.arange(args.draft_vocab))
    return drafter


def save(drafter: DSparkDraftModel, output: Path) -> None:
    """Write a bfloat16 copy beside the old one, then swap."""
    copy = DSparkDraftModel(drafter.config)
    copy.load_state_dict(drafter.state_dict())
    partial = output.with_name(output.name + ".partial")
    copy.to(torch.bfloat16).save_pretrained(partial)
    output.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.replace(output / file.name)
    partial.rmdir()


def learning_rate(progress: float) -> float:
    """Warm-up over the first 4 %, then cosine to zero (section 5.1)."""
    return min(progress / 0.04, 0.5 * (1 + math.cos(math.pi * progress)))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    target_path = args.target or reference_target_path()
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).eval().requires_grad_(False)
    samples = load_samples(args.data, args.max_length)
    held_out, samples = samples[:48], random.sample(samples[48:], min(args.samples, len(samples) - 48))
    drafter = DSparkDraftModel.from_pretrained(args.start) if args.start else build_drafter(target, samples, args)
    drafter = drafter.float().train()
    check_target(drafter, target)
    objective = Objective(target, drafter, args)
    held_out = run_target(target, drafter.config.target_layer_ids, held_out, args.batch)
    pool = run_target(target, drafter.config.target_layer_ids, samples, args.batch)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=args.lr, weight_decay=0.0)
    start, saved, step, average = time.monotonic(), time.monotonic(), 0, None
    bar = tqdm(total=round(args.minutes * 60), unit="s", desc="training")
    while (elapsed := time.monotonic() - start) < args.minutes * 60:
        optimiser.param_groups[0]["lr"] = args.lr * max(learning_rate(elapsed / (args.minutes * 60)), 1e-3)
        first = random.randrange(max(len(pool) - args.batch, 1))  # the pool is sorted by length: little padding
        loss, tau = objective(pool[first : first + args.batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        average = tau if average is None else 0.97 * average + 0.03 * tau
        bar.set_postfix(step=step, loss=f"{loss.item():.3f}", tau=f"{average:.3f}")
        bar.update(round(time.monotonic() - start) - bar.n)
        if time.monotonic() - saved > 300:
            save(drafter, args.output)
            saved = time.monotonic()
    bar.close()
    save(drafter, args.output)
    with torch.no_grad():
        torch.manual_seed(0)
        taus = [objective(held_out[i : i + 16])[1] for i in range(0, len(held_out), 16)]
    tqdm.write(f"{step} steps; held-out teacher-forced greedy tau {sum(taus) / len(taus):.3f}; saved in {args.output}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name of the target (default: the reference target)")
    parser.add_argument("--data", required=True, help="JSON lines with prompt_ids and response_ids, .gz or not")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start", help="drafter to go on from")
    parser.add_argument("--samples", type=int, default=1600, help="samples to train on")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time once the target has run")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 7, 14, 20, 27])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--mask-token-id", type=int, default=16, help="a token that the target never writes")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=24, help="blocks a sequence")
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ce-weight", type=float, default=0.9)
    parser.add_argument("--tv-weight", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
