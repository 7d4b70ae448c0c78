"""`dspark-hf train`: from samples to a drafter.

    dspark-hf train --target Qwen/Qwen3-4B --data samples.jsonl --output my-drafter
    dspark-hf train --target SmolLM2-135M-Instruct --data samples.jsonl.gz --output my-drafter --small-budget

Every argument of `transformers.TrainingArguments` is one here. The same command goes on from the last checkpoint in
`--output`; the finished drafter lies in `--output` itself. Several processes: `torchrun --nproc-per-node 2 -m dspark_hf.cli
train ...`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, set_seed
from transformers.trainer_utils import IntervalStrategy

from dspark_hf.host import TargetModel
from dspark_hf.loading import check_dtype, load_target
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.training.disk import writing
from dspark_hf.training.features import FeatureCache
from dspark_hf.training.manifest import check_manifest, describe_target, write_manifest
from dspark_hf.training.samples import Sample, check_vocabulary, digest, read_samples
from dspark_hf.training.trainer import DraftDataset, DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.warm_start import frequent_tokens, start_from_bigrams, unused_token


MANIFEST = "run.json"
"""Beside the checkpoints: what the run was begun with."""
SMALL_BUDGET = {
    "num_hidden_layers": 2,
    "draft_vocab_size": 8192,
    "markov_rank": 64,
    "bigram_start": True,
    "max_length": 512,
    "num_anchors": 64,
    "per_device_train_batch_size": 4,
    "learning_rate": 1.5e-3,
    "cross_entropy_weight": 0.9,
    "total_variation_weight": 0.1,
    "num_train_epochs": 2.0,
    "muon_learning_rate": 3e-3,
}
"""What worked on two CPU cores (docs/log.md). An argument that is given wins."""


@dataclass
class DrafterArguments:
    r"""
    What is trained, and on what. Fields that are `None` take the default of [`DSparkConfig.from_target`].

    Args:
        target (`str`): Folder or Hub name of the target.
        data (`list[str]`): Files of samples that the target wrote (`dspark-hf data`).
        output (`str`): Folder of the drafter and its checkpoints.
        output_dtype (`str`): dtype of the finished drafter; checkpoints are float32.
        start_from (`str`, *optional*): Drafter to go on from, with its shape.
        dtype (`str`): dtype the target runs in: `"auto"`, the checkpoint's own, or a torch dtype's name.
        feature_cache (`str`, *optional*): Folder to keep the target's features in, instead of running it every epoch.
        held_out (`int`): Samples that are only measured on.
        max_length (`int`): Longer samples are cut there, in tokens.
        bigram_start (`bool`): Whether a new drafter starts from the samples' bigrams.
        num_hidden_layers, block_size, markov_rank, draft_vocab_size, mask_token_id (`int`): Shape of a new drafter.
        markov_head_type (`str`): Kind of its sequential head.
        target_layer_ids (`list[int]`, *optional*): Its taps.
    """

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    data: list[str] = field(metadata={"help": "Files of samples that the target wrote (dspark-hf data), .gz or not."})
    output: str = field(metadata={"help": "Folder of the drafter and its checkpoints."})
    output_dtype: str = field(default="bfloat16", metadata={"help": "dtype of the finished drafter."})
    start_from: str | None = field(default=None, metadata={"help": "Drafter to go on from, with its shape."})
    dtype: str = field(default="auto", metadata={"help": "dtype the target runs in: auto, float32, bfloat16, ..."})
    feature_cache: str | None = field(default=None, metadata={"help": "Folder to keep the target's features in."})
    held_out: int = field(default=64, metadata={"help": "Samples that are only measured on."})
    max_length: int = field(default=4096, metadata={"help": "Longer samples are cut there, in tokens."})
    bigram_start: bool = field(default=False, metadata={"help": "Start from the samples' bigrams."})
    num_hidden_layers: int = field(default=5, metadata={"help": "Draft layers."})
    block_size: int = field(default=7, metadata={"help": "Draft tokens of a block."})
    markov_rank: int = field(default=256, metadata={"help": "Rank of the sequential head; 0 for none."})
    markov_head_type: str = field(default="vanilla", metadata={"help": "vanilla, gated or rnn."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Tokens that can be drafted; default: all."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Default: the last token not in the samples."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers; default: spread."})


def add_train_command(commands: Any, arguments: Sequence[str]) -> None:
    """Add the command to argparse's `commands`, which must make parsers of the type `HfArgumentParser`."""
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,  # `--small` would set the preset's flag and nothing else
        help="train a drafter on samples that its target wrote",
        dataclass_types=[DrafterArguments, DSparkTrainingArguments],
    )
    parser.add_argument("--small-budget", action="store_true", help="defaults for when there is only a CPU")
    parser.set_defaults(run=run_train, eval_strategy="epoch")
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--small-budget" in given:
        parser.set_defaults(**SMALL_BUDGET)
        if {"--start-from", "--optim"} & given:
            parser.set_defaults(muon_learning_rate=None)  # a rate for new drafters where no optimizer was chosen


def run_train(args: argparse.Namespace) -> None:
    """Train as the parsed arguments say."""
    args.output_dir = args.output
    train(_filled(DrafterArguments, args), _filled(DSparkTrainingArguments, args))


def _filled(kind: Any, args: argparse.Namespace) -> Any:
    return kind(**{item.name: getattr(args, item.name) for item in fields(kind) if item.init})


def train(arguments: DrafterArguments, training: DSparkTrainingArguments) -> DSparkTrainer:
    r"""
    Train a drafter and save it, or go on where an earlier run of the same command stopped.

    Args:
        arguments ([`DrafterArguments`]): What to train, and on what.
        training ([`DSparkTrainingArguments`]): How.

    Returns:
        [`DSparkTrainer`]: After training.

    Raises:
        ValueError: If the data are empty, too short or of another target, or too few to hold some out, or if `output` holds a
            run that was begun with other data or another drafter.
        OSError: If a disk is full.
    """
    check_dtype(arguments.output_dtype)
    set_seed(training.seed)
    output = Path(arguments.output)
    checkpoint = last_checkpoint(output)
    start = arguments.start_from if checkpoint is None else checkpoint
    drafter = None if start is None else DSparkDraftModel.from_pretrained(start)
    block_size = arguments.block_size if drafter is None else drafter.config.block_size
    samples = [sample for path in arguments.data for sample in read_samples(path, arguments.max_length, block_size)]
    held_out, learnt = _split(len(samples), arguments.held_out)
    target = load_target(arguments.target, arguments.dtype, training.device)
    check_vocabulary(samples, target.config.get_text_config(decoder=True).vocab_size)
    begun_with = describe_run(target, samples, arguments)
    if checkpoint is not None:
        check_manifest(
            output / MANIFEST, begun_with, "Choose another --output; --start-from goes on from its drafter."
        )
    if drafter is None:
        drafter = new_drafter(target, [samples[index] for index in learnt], arguments)
    cache = None if arguments.feature_cache is None else FeatureCache(Path(arguments.feature_cache), samples)
    trainer = DSparkTrainer(
        drafter,
        target,
        training,
        train_dataset=DraftDataset(samples, learnt, cache),
        eval_dataset=DraftDataset(samples, held_out, cache),
    )
    if checkpoint is None and trainer.is_world_process_zero():
        write_manifest(output / MANIFEST, begun_with)
    if cache is not None:
        cache.fill(trainer.extractor, training.process_index, training.world_size)
        trainer.accelerator.wait_for_everyone()
    _run(trainer, checkpoint)
    if training.eval_strategy != IntervalStrategy.NO and not _is_measured(trainer.state):
        trainer.evaluate()
    drafter.to(getattr(torch, arguments.output_dtype))
    with writing(output, "run the same command again"):
        trainer.save_model()
        trainer.save_state()
    return trainer


def _split(count: int, held_out: int) -> tuple[Sequence[int], Sequence[int]]:
    """Which of `count` samples are held out, evenly spread, and which are learned from."""
    if not 0 < held_out < count:
        raise ValueError(f"--held-out must lie in [1, {count - 1}], some of the {count} samples, got {held_out}.")
    held = range(0, count, count // held_out)[:held_out]
    return held, sorted(set(range(count)) - set(held))


def describe_run(target: TargetModel, samples: Sequence[Sample], arguments: DrafterArguments) -> dict[str, Any]:
    """What a run that goes on must have been begun with: target, samples, and the shape and start of the drafter."""
    elsewhere = {"target", "dtype", "data", "output", "output_dtype", "feature_cache"}
    asked = {name: value for name, value in asdict(arguments).items() if name not in elsewhere}
    return {**describe_target(target), **asked, "samples": len(samples), "sha256_of_samples": digest(samples)}


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run that is whole: `Trainer` writes its state last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _run(trainer: DSparkTrainer, checkpoint: Path | None) -> None:
    """Train from a checkpoint on; where its run is over, only load what it ended with: `Trainer` would take one more step."""
    if checkpoint is None:
        trainer.train()
        return
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    args = trainer.args
    if state.global_step >= args.max_steps if args.max_steps > 0 else state.epoch >= args.num_train_epochs:
        best = Path(state.best_model_checkpoint or "").name if args.load_best_model_at_end else ""
        trainer._load_from_checkpoint(str(checkpoint.parent / best if best else checkpoint))
        trainer.state = state
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint))


def _is_measured(state: TrainerState) -> bool:
    """Whether the held-out samples were measured after the last step. A checkpoint is written before, and does not know."""
    return any(entry["step"] == state.global_step and "eval_loss" in entry for entry in state.log_history)


def new_drafter(target: TargetModel, samples: Sequence[Sample], arguments: DrafterArguments) -> DSparkDraftModel:
    """Build a drafter for the target; its draft vocabulary, mask token and sequential head come from the samples."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    shape = {
        name: getattr(arguments, name)
        for name in ("num_hidden_layers", "block_size", "markov_rank", "markov_head_type", "draft_vocab_size")
    }
    if arguments.target_layer_ids is not None:
        shape["target_layer_ids"] = arguments.target_layer_ids
    mask_token_id = arguments.mask_token_id
    config = DSparkConfig.from_target(
        target.config,
        mask_token_id=unused_token(samples, vocab_size) if mask_token_id is None else mask_token_id,
        confidence_head_with_markov=arguments.markov_rank > 0,
        **shape,
    )
    drafter = DSparkDraftModel(config)
    if config.draft_vocab_size < vocab_size:
        kept = frequent_tokens(samples, config.draft_vocab_size, vocab_size)
        drafter.d2t.copy_(kept - torch.arange(len(kept)))
    if arguments.bigram_start and config.markov_rank > 0:
        start_from_bigrams(drafter, samples)
    return drafter
