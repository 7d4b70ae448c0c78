"""Training of a drafter on samples that its frozen target wrote, as a `transformers.Trainer`.

What is saved, resumed and averaged over ranks is the drafter alone. A step draws anchors, packs their blocks, reads the
target's features (from disk, or by running the target) and takes the losses of section 3.3, divided by the position
weight of all ranks.
"""

import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.taps import check_target, tapped_layers
from dspark_hf.training.anchors import PackedBlocks, label_columns, pack_blocks, sample_anchors
from dspark_hf.training.disk import writing
from dspark_hf.training.features import FeatureCache, FeatureExtractor, TargetFeatures, pad_features
from dspark_hf.training.losses import LossConfig, total_position_weight
from dspark_hf.training.muon import check_muon, muon_with_adamw
from dspark_hf.training.objective import DraftObjective
from dspark_hf.training.samples import Sample
from dspark_hf.training.tally import Tally
from dspark_hf.training.target_head import check_target_head


logger = logging.getLogger(__name__)


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    r"""
    `TrainingArguments` with the paper's learning rate, schedule and epochs (section 5.1 and the released configs), and what a
    drafter needs. Batch size and dtype are left as they are there.

    Args:
        num_anchors (`int`): Blocks of a sequence in a step.
        cross_entropy_weight, total_variation_weight, confidence_weight (`float`): Weights of the losses.
        loss_decay (`float`): Constant of the position weights, in positions.
        muon_learning_rate (`float`, *optional*): Train the matrices of the draft layers with Muon at this rate, and the rest
            with AdamW at `learning_rate`; what is logged as learning rate is Muon's. `None` or 0 means the optimizer of
            `optim` for all.

    Raises:
        ValueError: If the rate of Muon is negative.
        ImportError: If torch is older than 2.9 and has no Muon.
    """

    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    warmup_steps: float = 0.04
    lr_scheduler_type: str = "cosine"
    max_grad_norm: float = 1.0
    num_train_epochs: float = 10.0
    num_anchors: int = field(default=512, metadata={"help": "Blocks of a sequence in a step."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    total_variation_weight: float = field(default=0.9, metadata={"help": "Weight of the total variation."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float = field(default=4.0, metadata={"help": "Constant of the position weights, in positions."})
    muon_learning_rate: float | None = field(
        default=None, metadata={"help": "Train the matrices of the draft layers with Muon at this rate; 0 is off."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without one the order of a resumed run would hang on what drew random numbers before it.
        if self.data_seed is None:
            self.data_seed = self.seed
        if self.muon_learning_rate:
            check_muon(self.muon_learning_rate)

    @property
    def loss_config(self) -> LossConfig:
        """The weights of the losses."""
        return LossConfig(
            self.cross_entropy_weight, self.total_variation_weight, self.confidence_weight, self.loss_decay
        )


class DraftDataset(Dataset):
    r"""
    Samples, with their features where those are on disk.

    Args:
        samples (`Sequence[Sample]`): All samples.
        indices (`Sequence[int]`): Which of them belong to this set.
        cache ([`FeatureCache`], *optional*): Their features.
    """

    def __init__(self, samples: Sequence[Sample], indices: Sequence[int], cache: FeatureCache | None = None):
        self.samples = samples
        self.indices = indices
        self.cache = cache

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index = self.indices[item]
        sample = self.samples[index]
        input_ids = torch.tensor(sample.input_ids)
        entry: dict[str, Any] = {
            "name": sample.name,
            "input_ids": input_ids,
            "sequence_ids": torch.ones_like(input_ids),
            "loss_mask": torch.arange(len(input_ids)) >= sample.prompt_length,
        }
        if self.cache is not None:
            entry["features"] = self.cache[index]
        return entry


def collate(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad entries of [`DraftDataset`] on the right into tensors `(B, T, ...)`, features under their own names."""
    batch = {
        name: pad_sequence([entry[name] for entry in entries], batch_first=True)
        for name in ("input_ids", "sequence_ids", "loss_mask")
    }
    if "features" in entries[0]:
        features = pad_features([entry["features"] for entry in entries])
        batch |= {item.name: getattr(features, item.name) for item in fields(features)}
    return batch | {"name": [entry["name"] for entry in entries]}


class DSparkTrainer(Trainer):
    r"""
    Trains a drafter.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter; trained in float32, under autocast when the arguments say so.
        target (`PreTrainedModel`): Its target, frozen.
        args ([`DSparkTrainingArguments`]): How to train.
        train_dataset ([`DraftDataset`]): Samples to learn from.
        eval_dataset ([`DraftDataset`], *optional*): Held-out samples.
        kwargs: Passed on to `Trainer`.

    Raises:
        ValueError: If drafter and target do not belong together.
        NotImplementedError: If soft labels cannot be made from the target's hidden states.
    """

    args: DSparkTrainingArguments

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: TargetModel,
        args: DSparkTrainingArguments,
        train_dataset: DraftDataset,
        eval_dataset: DraftDataset | None = None,
        **kwargs: Any,
    ):
        args.remove_unused_columns = False
        # torch.nn.DataParallel cannot split packed blocks; torchrun uses several GPUs.
        args._n_gpu = min(args.n_gpu, 1)
        target.eval().requires_grad_(False).to(args.device)
        drafter = drafter.float().to(args.device)
        check_target(drafter, target)
        check_target_head(target)
        objective: Any = DraftObjective(drafter, target, args.loss_config)
        objective.accepts_loss_kwargs = False  # a micro-batch divides by its own weight
        super().__init__(
            model=objective,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self.drafter = drafter
        self.extractor = FeatureExtractor(target, tapped_layers(drafter.config, target))
        self._skipped: set[str] = set()
        self._since_log = self._tally()

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """The optimizer of the arguments, or Muon beside AdamW."""
        ours = self.args
        if not ours.muon_learning_rate or self.optimizer is not None:
            return super().create_optimizer(*args)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise NotImplementedError(
                "Muon needs whole matrices, which FSDP and DeepSpeed split. Train with DDP, or without --muon-learning-rate."
            )
        betas = (ours.adam_beta1, ours.adam_beta2)
        self.optimizer = muon_with_adamw(
            self.drafter,
            ours.muon_learning_rate,
            ours.learning_rate,
            ours.weight_decay,
            betas=betas,
            eps=ours.adam_epsilon,
        )
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch, with anchors from torch's global generator."""
        blocks, features = self._prepare_blocks(inputs)
        weight = total_position_weight(blocks.supervised, self.args.loss_decay)
        # DDP takes the mean of the ranks' gradients, so each divides by the mean weight.
        divisor = self.accelerator.reduce(weight, "mean").clamp_min(1e-6)
        losses = model(blocks, features, divisor)
        self._since_log.add(losses, divisor, weight)
        return (losses.total, losses) if return_outputs else losses.total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each loss, and the accepted length, since the last log to what `Trainer` logs."""
        if "loss" in logs:
            logs = logs | self._since_log.report("", self._summed) | {"skipped_samples": len(self.skipped_samples())}
            self._since_log = self._tally()
        super().log(logs, start_time)

    @torch.no_grad()
    @torch.random.fork_rng(devices=[])  # the loader draws a seed, which a resumed run does not draw again
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Losses and teacher-forced acceptance on held-out samples, always on the same anchors."""
        objective: Any = self.accelerator.unwrap_model(self.model)
        objective.eval()
        generator = torch.Generator(device=self.args.device).manual_seed(0)
        tally, one = self._tally(), torch.ones((), device=self.args.device)
        for inputs in dataloader:
            blocks, features = self._prepare_blocks(self._prepare_inputs(inputs), generator)
            tally.add(
                objective(blocks, features, one), one, total_position_weight(blocks.supervised, self.args.loss_decay)
            )
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = tally.report(f"{metric_key_prefix}_", self._summed)
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))  # type: ignore[arg-type]

    def skipped_samples(self) -> set[str]:
        """Names of the samples whose features were not finite, in training or evaluation, on any rank, since this process began."""
        from accelerate.utils import gather_object

        return set(gather_object(sorted(self._skipped)))

    def _tally(self) -> Tally:
        return Tally(self.drafter.config.block_size, self.args.device)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values, "sum")

    def _prepare_blocks(
        self, inputs: dict[str, Any], generator: torch.Generator | None = None
    ) -> tuple[PackedBlocks, TargetFeatures]:
        """Blocks of a batch of [`collate`], and what the target says about it."""
        config, input_ids, loss_mask = self.drafter.config, inputs["input_ids"], inputs["loss_mask"]
        sequence_ids = inputs["sequence_ids"]
        anchors = sample_anchors(loss_mask, self.args.num_anchors, config.block_size, sequence_ids, generator)
        blocks = pack_blocks(config, input_ids, loss_mask, anchors, sequence_ids)
        if "taps" in inputs:
            features = TargetFeatures(**{item.name: inputs[item.name] for item in fields(TargetFeatures)})
        else:
            features = self.extractor(input_ids, label_columns(blocks))
        return self._without_broken_rows(blocks, features, inputs["name"])

    def _without_broken_rows(
        self, blocks: PackedBlocks, features: TargetFeatures, names: list[str]
    ) -> tuple[PackedBlocks, TargetFeatures]:
        """Take rows whose features are not finite out of supervision, and say which."""
        finite = features.taps.isfinite().all(dim=-1) & features.last_hidden_states.isfinite().all(dim=-1)
        finite = finite.all(dim=1)
        if finite.all():
            return blocks, features
        broken = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
        self._skipped.update(broken)
        logger.warning("The target's features of %s are not finite: skipped.", ", ".join(broken))
        supervised = blocks.supervised & finite[:, None, None]
        return replace(blocks, supervised=supervised), features.where_rows(finite)

    def _save_checkpoint(self, *args: Any) -> None:
        folder = Path(self.args.output_dir)  # type: ignore[arg-type]  # given a value by TrainingArguments
        with writing(folder, "run the same command again: it goes on from the last whole checkpoint"):
            super()._save_checkpoint(*args)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:  # some releases of transformers ask every rank
            return
        folder = Path(output_dir or self.args.output_dir)  # type: ignore[arg-type]  # as above
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".partial-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        # Written beside, then moved, so that a process that is killed leaves no half-written file.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
            self.drafter.save_pretrained(partial)
            torch.save(self.args, Path(partial) / "training_args.bin")
            for file in Path(partial).iterdir():
                file.replace(folder / file.name)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except KeyError as error:
            raise ValueError(
                f"{checkpoint} was written with another optimizer. Go on with the --optim and --muon-learning-rate it was trained "
                "with, or start from its drafter in another folder: --start-from."
            ) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, self.drafter)
        self.accelerator.unwrap_model(self.model).borrow(self.extractor.target)  # `d2t` came with the weights

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
