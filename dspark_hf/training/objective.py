"""The drafter and its losses as one module: what a `Trainer`, and DDP around it, sees.

The target is no part of it. Its embedding and the kept rows of its head are lent, frozen and not registered, so the
module's parameters and state are the drafter's alone.
"""

import torch
from torch import nn

from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.training.anchors import PackedBlocks, block_hidden_states
from dspark_hf.training.features import TargetFeatures
from dspark_hf.training.losses import DraftLosses, LossConfig, draft_losses
from dspark_hf.training.target_head import TargetHead


class DraftObjective(nn.Module):
    r"""
    Losses of a drafter on packed blocks.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): Lends its embedding and head.
        loss_config ([`LossConfig`]): Weights of the losses.
    """

    def __init__(self, drafter: DSparkDraftModel, target: TargetModel, loss_config: LossConfig):
        super().__init__()
        self.drafter = drafter
        self.loss_config = loss_config
        self.borrow(target)

    def borrow(self, target: TargetModel) -> None:
        """Take the embedding and the head's rows that the drafter reads; again when its reduced vocabulary has changed."""
        drafter = self.drafter
        embed_tokens = None if drafter.config.has_embedding else target.get_input_embeddings()
        # A tuple, so that they stay unregistered.
        self._lent = (embed_tokens, TargetHead(target, drafter.kept_token_ids))

    def forward(self, blocks: PackedBlocks, features: TargetFeatures, total_weight: torch.Tensor) -> DraftLosses:
        r"""
        Args:
            blocks ([`PackedBlocks`]): The blocks.
            features ([`TargetFeatures`]): Of the batch, `(B, T, ...)`.
            total_weight (`torch.FloatTensor`): Scalar the losses are divided by.

        Returns:
            [`DraftLosses`]
        """
        embed_tokens, head = self._lent
        hidden_states = block_hidden_states(self.drafter, blocks, features.taps, embed_tokens)
        return draft_losses(self.drafter, blocks, hidden_states, features, head, self.loss_config, total_weight)
