"""The drafter's side of a round: context from taps, one parallel pass over the block, the sequential draw.

The drafter's cache holds keys and values of the context alone. A block's own are written to the slots from its anchor
on, where the next context overwrites them.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dspark_hf.caches import SlotCache
from dspark_hf.grouped import grouped_queries, reads_groups
from dspark_hf.host import TargetModel
from dspark_hf.judging import DrafterJudge
from dspark_hf.modeling.modeling_dspark import Choose, DSparkDraft, DSparkDraftModel, draft_attention_mask
from dspark_hf.narrow import is_plain


class BorrowedHead(nn.Linear):
    """The rows of the target's head for the tokens that a reduced vocabulary keeps."""

    def __init__(self, head: Any, kept: torch.Tensor | slice):
        size = kept.stop if isinstance(kept, slice) else len(kept)
        super().__init__(head.weight.shape[1], size, bias=False, device="meta")
        self.take(head, kept)

    @torch.inference_mode(False)  # what is made in that mode cannot be written to outside
    def take(self, head: Any, kept: torch.Tensor | slice) -> None:
        """Bring the rows up to date, where they can be in the memory they have."""
        for name in ("weight", "bias"):
            own, lent = getattr(self, name), getattr(head, name, None)
            if lent is None:
                setattr(self, name, None)
                continue
            alike = own is not None and (own.device, own.dtype) == (lent.device, lent.dtype)
            if alike and isinstance(kept, torch.Tensor):
                torch.index_select(lent.detach(), 0, kept, out=own.data)
            else:
                setattr(self, name, nn.Parameter(lent.detach()[kept], requires_grad=False))


@dataclass(frozen=True, slots=True)
class Context:
    r"""
    Taps that the drafter has not read yet.

    Args:
        taps (`torch.FloatTensor` of shape `(R, C, len(ids) * D_target)`): Consecutive columns of each row.
        slots (`torch.LongTensor` of shape `(R, C)`): Their slots.
        counts (`torch.LongTensor` of shape `(R,)`): How many of them were committed; the rest goes to the bin.
    """

    taps: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


class Drafting:
    r"""
    A drafter at work on one batch.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): Lends its embedding and head where the drafter has none.
        prompt_mask (`torch.BoolTensor` of shape `(R, P)`): False for padding; P is the number of columns in the target's
            cache after prefill.
        first_slot (`int`): First column whose taps are known; earlier ones were in a cache that the user passed.
        judge ([`DrafterJudge`], *optional*): Looks at the first blocks.
    """

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: TargetModel,
        prompt_mask: torch.Tensor,
        first_slot: int,
        judge: DrafterJudge | None = None,
    ):
        self.drafter = drafter
        self.judge = judge
        self.embed_tokens = None if drafter.config.has_embedding else target.get_input_embeddings()
        self.lm_head = drafter.lm_head if drafter.config.has_lm_head else _borrow_head(drafter, target)
        self.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.cache = SlotCache(drafter.config.num_hidden_layers)
        self.visible = prompt_mask.clone()
        self.visible[:, :first_slot] = False
        self.prompt_positions = (prompt_mask.cumsum(dim=1) - 1).clamp_min(0)  # (R, P)
        self.padding = (~prompt_mask).sum(dim=1, keepdim=True)  # (R, 1)
        self.reads_groups = reads_groups(drafter)
        self.unread: list[Context] = []

    def observe(self, context: Context) -> None:
        """Keep taps until the next draft reads them."""
        self.unread.append(context)

    def draft(
        self, anchor: torch.Tensor, slots: torch.Tensor, used: int, num_tokens: int, choose: Choose
    ) -> DSparkDraft:
        r"""
        Draft a block for every row.

        Args:
            anchor (`torch.LongTensor` of shape `(R,)`): The anchors.
            slots (`torch.LongTensor` of shape `(R,)`): Their slots.
            used (`int`): A number of slots that covers every row's block.
            num_tokens (`int`): Tokens to draw, at least 1.
            choose (`Choose`): Draws them.

        Returns:
            [`DSparkDraft`] of `num_tokens` tokens for each row.
        """
        config = self.drafter.config
        anchor = anchor.clamp(max=config.vocab_size - 1)  # a padded target may write what the drafter has no row for
        block_slots = slots[:, None] + torch.arange(config.num_block_inputs, device=slots.device)
        self.cache.reserve(used)  # first, since growing moves the bin
        taps, context_slots, positions = self._read_context()
        self.cache.prepare(torch.cat([context_slots, block_slots], dim=1), used)
        keys = torch.arange(used, device=slots.device)[None]
        known = self.visible
        valid = torch.cat([known, known.new_ones(known.shape[0], used - known.shape[1])], dim=1)
        masks = draft_attention_mask(config, block_slots, keys, self.drafter.dtype, valid)
        # A sharded target may keep its embedding on another device than its head.
        block = self.drafter.embed(self.drafter.block_input_ids(anchor), self.embed_tokens).to(self.drafter.device)
        with grouped_queries(self.reads_groups):
            hidden = self.drafter(
                block,
                self.drafter.project_context(taps),
                self._positions(block_slots),
                positions,
                masks,
                self.cache,
            ).last_hidden_state
        if self.judge is not None and self.judge.watches_slots:
            self.judge.look(hidden, anchor, self.lm_head)
        return self.drafter.draft(hidden, anchor, choose, num_tokens, self.lm_head, self.vocab_size)

    def _read_context(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unread taps with their slots and positions; what was not committed goes to the cache's bin."""
        taps, slots, positions = [], [], []
        for context in self.unread:
            columns = torch.arange(context.slots.shape[1], device=context.slots.device)
            committed = columns < context.counts[:, None]
            taps.append(context.taps)
            slots.append(torch.where(committed, context.slots, self.cache.bin))
            positions.append(self._positions(context.slots))
        self.unread.clear()
        return torch.cat(taps, dim=1), torch.cat(slots, dim=1), torch.cat(positions, dim=1)

    def _positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Position of each slot's token in its text, padding not counted."""
        columns = self.prompt_positions.shape[1]
        in_prompt = self.prompt_positions.gather(1, slots.clamp(max=columns - 1))
        return torch.where(slots < columns, in_prompt, slots - self.padding)


def share_with_target(drafter: DSparkDraftModel, target: TargetModel) -> None:
    """Let the drafter's embedding and head use the target's memory where they are equal, instead of a second copy.

    This changes the drafter: its two weights move to the target's memory and stop requiring gradients (they are the
    target's, frozen, by section 3.1). A drafter in training is left alone. The comparison reads both, so each pair is
    compared once.
    """
    compared = _compared_with.get(drafter)
    if drafter.training or (compared is not None and compared() is target):
        return
    _compared_with[drafter] = weakref.ref(target)
    pairs: list[tuple[Any, Any]] = [
        (drafter.embed_tokens, target.get_input_embeddings()),
        (drafter.lm_head, target.get_output_embeddings()),
    ]
    for own, lent in pairs:
        if own is None or not is_plain(lent):
            continue
        alike = [own.weight.shape, own.weight.dtype, own.weight.device] == [
            lent.weight.shape,
            lent.weight.dtype,
            lent.weight.device,
        ]
        if alike and own.weight.grad is None and torch.equal(own.weight, lent.weight):
            own.weight.requires_grad_(False)
            own.weight.data = lent.weight.data


_compared_with: weakref.WeakKeyDictionary[DSparkDraftModel, weakref.ref] = weakref.WeakKeyDictionary()


def check_lending(drafter: DSparkDraftModel, target: TargetModel) -> None:
    r"""
    Check, before any forward, that the target can lend its embedding and head in the way the drafter reads them.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        target (`PreTrainedModel`): The target.

    Raises:
        NotImplementedError: If the drafter takes rows of a weight that is quantised or not at hand.
    """
    config = drafter.config
    takes_rows = not config.has_lm_head and _borrowed_rows(drafter, target) is not None
    if takes_rows and not is_plain(target.get_output_embeddings()):
        raise NotImplementedError(
            "A drafter with fewer tokens than its target takes rows of the target's head, which cannot be done with a quantised "
            "head. Load the target with its head in full precision, or use a drafter that has a head of its own."
        )
    embedding: Any = target.get_input_embeddings()
    scales_rows = not config.has_embedding and config.embedding_scale is not None
    if scales_rows and not (is_plain(embedding) and embedding.weight.device == drafter.device):
        raise NotImplementedError(
            "This drafter scales rows of the target's embedding itself, which cannot be done with one that is quantised, "
            "offloaded or on another device than the drafter. Load the target with its embedding in full precision, beside its "
            "head."
        )


def _borrowed_rows(drafter: DSparkDraftModel, target: TargetModel) -> torch.Tensor | slice | None:
    """The rows `(V_d,)` of the target's head that a drafter without a head takes, `None` for the whole of it.

    All but the padding of a vocabulary is a slice: a view, where indices would copy the head in every call.
    """
    kept = drafter.kept_token_ids
    if kept is None and drafter.config.vocab_size < target.config.get_text_config(decoder=True).vocab_size:
        return slice(drafter.config.vocab_size)
    return kept


def _borrow_head(drafter: DSparkDraftModel, target: TargetModel) -> nn.Module:
    """The target's head, or its rows for a reduced vocabulary. Copied rows stay in memory for the next call."""
    head: Any = target.get_output_embeddings()
    kept = _borrowed_rows(drafter, target)
    if not isinstance(kept, torch.Tensor):
        return head if kept is None else BorrowedHead(head, kept)
    of_head = _borrowed.setdefault(head, weakref.WeakKeyDictionary())
    if drafter in of_head:
        of_head[drafter].take(head, kept)
    else:
        of_head[drafter] = BorrowedHead(head, kept)
    return of_head[drafter]


_borrowed: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[DSparkDraftModel, BorrowedHead]]
_borrowed = weakref.WeakKeyDictionary()
