"""Recurrent states: what linear-attention, state-space and convolution layers remember of a text.

A state sums up every token so far. A slot can be overwritten and hidden by a mask; a rejected token cannot be taken out
of a state. So the states are saved before a verification. Afterwards a row that kept all of its input tokens keeps its
states, and the tokens that the other rows kept are run once more from the saved ones.

That is exact only for layers that go on from their state when several tokens come at once. Some families' layers start
from nothing then, in some releases of transformers; those are refused.
"""

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dspark_hf.caches import SlotCache
from dspark_hf.host import TargetModel
from dspark_hf.transfer import upload


RECURRENT_TYPES = {"linear_attention", "conv", "hybrid", "mamba"}
LAYERS_WITHOUT_MASK = ("linear_attention", "conv", "hybrid", "moe", "mlp")
# Families whose layers were found to go on from their state: in every release, and in those whose layers can record
# their past: transformers rewrote the layers of the second kind together with that, between 5.10.2 and 5.17.0.
CONTINUING = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
CONTINUING_LATER = {"bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h"}
LAYERS_WERE_REWRITTEN = hasattr(LinearAttentionCacheLayerMixin, "activate_past_recording")


def has_recurrent_states(config: PreTrainedConfig) -> bool:
    """Whether a decoder's configuration names layers with states that are no keys and values."""
    return not RECURRENT_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


def is_recurrent(target: TargetModel) -> bool:
    """Whether a target keeps states that are no keys and values, by its class or its decoder's configuration."""
    return getattr(target, "_is_stateful", False) or has_recurrent_states(target.config.get_text_config(decoder=True))


def check_recurrent(target: TargetModel) -> None:
    r"""
    Check that a target has no recurrent states, or states that go on when several tokens come at once.

    Args:
        target (`PreTrainedModel`): The target.

    Raises:
        NotImplementedError: If its states do not, or nobody has looked; the message names the alternative.
    """
    if not is_recurrent(target):
        return
    config = target.config.get_text_config(decoder=True)
    name, kind = type(target).__name__, config.model_type
    instead = "Call generate() without `assistant_model` for this target."
    if kind in CONTINUING_LATER and not LAYERS_WERE_REWRITTEN:
        raise NotImplementedError(
            f"{name} keeps a recurrent state that it forgets when several tokens come at once in transformers "
            f"{transformers.__version__}, so DSpark cannot verify a draft. Upgrade transformers, or call generate() without "
            "`assistant_model`."
        )
    if kind not in CONTINUING | CONTINUING_LATER:
        raise NotImplementedError(
            f"{name} keeps a recurrent state that is not known to go on when several tokens come at once, so DSpark cannot "
            f"verify a draft. Known are {', '.join(sorted(CONTINUING | CONTINUING_LATER))}. {instead}"
        )
    if "hybrid" not in config.layer_types and "full_attention" not in config.layer_types:
        raise NotImplementedError(f"{name} has no attention layer, whose cache tells how long the text is. {instead}")


def check_ranks(target: TargetModel, synced_gpus: bool) -> None:
    r"""
    Check that several ranks, which must run the same forwards, do not have to replay tokens.

    Args:
        target (`PreTrainedModel`): The target.
        synced_gpus (`bool`): Whether ranks wait for each other in every forward.

    Raises:
        NotImplementedError: If they do, and the target has recurrent states.
    """
    if synced_gpus and has_recurrent_states(target.config.get_text_config(decoder=True)):
        raise NotImplementedError(
            f"{type(target).__name__} keeps recurrent states, so how many forwards a round takes depends on what was "
            "rejected, and ranks under FSDP or ZeRO-3 would wait for each other. Give every rank the whole target, or call "
            "generate() without `assistant_model`."
        )


class RecurrentStates:
    r"""
    The states in a cache, one tensor `(R, ...)` for each layer and kind of state.

    Args:
        cache ([`SlotCache`]): The cache. Target forwards update its states in place.
    """

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        """Keep a copy of the states as they are now."""
        self._saved = [state.clone() for state in self.cache.recurrent_states]

    def rewind(self, counts: list[int], width: int, run: Callable[[int, int], None]) -> int:
        r"""
        Bring the states to where each row's text is now.

        All rows run the columns that some row needs, and each row's states are taken when its own columns are done. That
        takes as many forwards as there are different counts, and no copy of anybody's keys and values.

        Args:
            counts (`list[int]`): Columns that each row kept, in `[0, width]`.
            width (`int`): Columns that the target has run since [`save`].
            run (`Callable[[int, int], None]`): Runs columns `first` to `end` - 1 of all rows through the target.

        Returns:
            `int`: Forwards that it took.
        """
        if all(count == width for count in counts):
            return 0
        current = self.cache.recurrent_states
        right = [state.clone() for state in current]  # those of rows that kept every column
        _copy_rows(self._saved, right, counts, 0)
        for state, saved in zip(current, self._saved, strict=True):
            state.copy_(saved)
        ends = sorted(set(counts) - {0, width})
        for first, end in zip([0, *ends], ends, strict=False):
            run(first, end)
            _copy_rows(current, right, counts, end)
        for state, own in zip(current, right, strict=True):
            state.copy_(own)
        return len(ends)


def _copy_rows(source: list[torch.Tensor], target: list[torch.Tensor], counts: list[int], count: int) -> None:
    """Copy the rows with a given count."""
    chosen = [row for row, own in enumerate(counts) if own == count]
    if not chosen:
        return
    on_device = {device: upload(chosen, device) for device in {state.device for state in source}}
    for old, new in zip(source, target, strict=True):
        rows = on_device[old.device]
        new[rows] = old[rows]
