"""What `return_dict_in_generate=True` returns: the host's fields in the host's shapes, and the run's statistics."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspark_hf.metrics import DecodingStatistics


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    r"""
    Output of `generate()` with a DSpark drafter.

    Args:
        statistics ([`DecodingStatistics`], *optional*): Rounds, τ, acceptance by position, time by phase.
    """

    statistics: DecodingStatistics | None = None


class OutputRecorder:
    """Collects scores, logits, hidden states and attentions, one entry for each token of the batch."""

    def __init__(self, config: GenerationConfig):
        returned = bool(config.return_dict_in_generate)
        self.scores: tuple | None = () if returned and config.output_scores else None
        self.logits: tuple | None = () if returned and config.output_logits else None
        self.attentions: tuple | None = () if returned and config.output_attentions else None
        self.hidden_states: tuple | None = () if returned and config.output_hidden_states else None

    @property
    def wanted(self) -> bool:
        return any(kept is not None for kept in (self.scores, self.logits, self.attentions, self.hidden_states))

    def add(self, scores: torch.Tensor, logits: torch.Tensor, outputs: Any, index: int | None, used: int) -> None:
        r"""
        Record one token of every row.

        Args:
            scores (`torch.FloatTensor` of shape `(R, V)`): Processed.
            logits (`torch.FloatTensor` of shape `(R, V)`): Raw.
            outputs (`ModelOutput`): Of the forward that gave them.
            index (`int`, *optional*): Which input token of that forward; `None` keeps all, for prefill.
            used (`int`): Columns of the cache that plain generation would have had.
        """
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        column = slice(None) if index is None else slice(index, index + 1)
        if self.attentions is not None:
            # Implementations that compute no attention weights return None in their place.
            layers = tuple(None if layer is None else layer[:, :, column, :used] for layer in outputs.attentions)
            self.attentions += (layers,)
        if self.hidden_states is not None:
            self.hidden_states += (tuple(layer[:, column] for layer in outputs.hidden_states),)
