"""The user's logits processors and warpers, applied to drafter and target alike.

Two kinds. Stateless built-in ones treat each row on its own: they are applied to all positions of a block at once, and
to the drafter's scores. Any other may count calls, keep state or look at the row's index: it is called exactly as plain
generation would call it, for the whole batch and one committed token after the other, and never for the drafter.
"""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from dspark_hf.transfer import upload


IGNORE_HISTORY = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
}
READ_HISTORY = {
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
}
RUN_THE_MODEL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor")


class Processors:
    r"""
    The processors of one `generate()` call.

    Args:
        processors (`LogitsProcessorList`): As the host prepared them.
        only_stateless (`bool`): Leave out all that are not stateless, for the drafter.
    """

    def __init__(self, processors: LogitsProcessorList, only_stateless: bool = False):
        stateless = [processor for processor in processors if is_stateless(processor)]
        self.all_stateless = len(stateless) == len(processors)
        self.processors: Any = LogitsProcessorList(stateless) if only_stateless else processors
        self.read_history = any(type(processor).__name__ not in IGNORE_HISTORY for processor in self.processors)

    def __len__(self) -> int:
        return len(self.processors)

    def __call__(
        self, scores: torch.Tensor, tokens: torch.Tensor, rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        r"""
        Process stateless processors' scores for any mix of rows and lengths.

        Args:
            scores (`torch.FloatTensor` of shape `(N, V)`): float32.
            tokens (`torch.LongTensor` of shape `(R, L)`): The batch's tokens, left pads included.
            rows (`list[int]`): Row of the batch that each of the N entries belongs to.
            lengths (`list[int]`): Columns of that row that come before the token to choose.

        Returns:
            `torch.FloatTensor` of shape `(N, V)`
        """
        if not self.read_history:
            return self.processors(tokens[:, :0], scores)
        processed = torch.empty_like(scores)
        for length in sorted(set(lengths)):
            chosen = [n for n, own in enumerate(lengths) if own == length]
            entries = upload(chosen, scores.device)
            of_rows = upload([rows[n] for n in chosen], scores.device)
            processors: Any = LogitsProcessorList(_for_rows(processor, of_rows) for processor in self.processors)
            processed[entries] = processors(tokens[of_rows, :length], scores[entries])
        return processed


def is_stateless(processor: object) -> bool:
    """Whether a processor is a built-in that treats every row alone and remembers nothing; subclasses are not."""
    kind = type(processor)
    return kind.__module__ == logits_process.__name__ and kind.__name__ in IGNORE_HISTORY | READ_HISTORY


def check_processors(processors: LogitsProcessorList) -> None:
    """Refuse processors that run the model themselves.

    Raises:
        NotImplementedError: With the alternative.
    """
    for processor in processors:
        if type(processor).__name__ in RUN_THE_MODEL:
            raise NotImplementedError(
                f"{type(processor).__name__} (guidance_scale) runs the model itself, which DSpark does not support. Leave it "
                "out, or call generate() without `assistant_model`."
            )


def _for_rows(processor: object, rows: torch.Tensor) -> object:
    """The same processor for a choice of rows: the repetition penalty keeps one prompt length for each row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    chosen = copy.copy(processor)
    chosen.prompt_ignore_length = ignored.to(rows.device)[rows]  # type: ignore[attr-defined]
    return chosen
