"""The target's own law over all continuations of a prompt, by enumeration: no drafter, no cache, no sampling.

The settings' processors are written out here in the host's order; `tests/test_distribution.py` compares them with the
scores that plain `generate` returns.
"""

import itertools

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def processors_of(settings: dict) -> LogitsProcessorList:
    """Processors of the arguments of `generate`, in the host's order."""
    unknown = settings.keys() - PROCESSORS.keys()
    if unknown:
        raise ValueError(f"No processor is known for {sorted(unknown)}.")
    return LogitsProcessorList(make(settings[name]) for name, make in PROCESSORS.items() if name in settings)


def columns_hidden_from_processors(mask: torch.Tensor) -> int:
    """Left pads that the repetition penalty, the one setting here that reads the text, does not count.

    The host leaves them out since its penalty takes an offset for each row; before, it penalised the pad token.
    """
    try:
        RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.zeros(1, dtype=torch.long))
    except ValueError:
        return 0
    return int((mask == 0).sum())


def all_sequences(vocab_size: int, length: int) -> torch.Tensor:
    """All `V ** length` sequences in lexicographic order, `(V ** length, length)`."""
    sequences = list(itertools.product(range(vocab_size), repeat=length))
    return torch.tensor(sequences, dtype=torch.long).view(len(sequences), length)


def target_logits(target, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Logits of left-padded rows in one forward without a cache, `(R, L, V)`."""
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        return target(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False).logits


def prefix_logits(target, prompt: torch.Tensor, mask: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Raw logits after every prefix of up to `length` - 1 tokens; entry k is `(V ** k, V)`."""
    vocab, columns = target.config.vocab_size, prompt.shape[0]
    tails = all_sequences(vocab, length - 1)
    rows = torch.cat([prompt.expand(len(tails), -1), tails], dim=1)
    masks = torch.cat([mask.expand(len(tails), -1), torch.ones_like(tails)], dim=1)
    logits = target_logits(target, rows, masks)[:, columns - 1 :]  # (V ** (length - 1), length, V)
    return [logits[:: vocab ** (length - 1 - k), k] for k in range(length)]


def exact_law(prompt: torch.Tensor, mask: torch.Tensor, logits: list[torch.Tensor], settings: dict) -> torch.Tensor:
    """Law of the next `len(logits)` tokens after a prompt, `(V,) * len(logits)`, float64; `logits` as above."""
    vocab = logits[0].shape[-1]
    processors, seen = processors_of(settings), prompt[columns_hidden_from_processors(mask) :]
    law = torch.ones(1, dtype=torch.float64)
    for k, after_prefix in enumerate(logits):
        tails = all_sequences(vocab, k)
        prefixes = torch.cat([seen.expand(len(tails), -1), tails], dim=1)
        law = (law[:, None] * processors(prefixes, after_prefix.clone()).double().softmax(dim=-1)).flatten()
    return law.view((vocab,) * len(logits))


def marginal(law: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Law of the tokens at some places of a sequence."""
    others = [axis for axis in range(law.dim()) if axis not in axes]
    return law.sum(dim=others) if others else law


def conditional_laws(target, texts: torch.Tensor, prompt_mask: torch.Tensor, settings: dict) -> torch.Tensor:
    """Law of each token after the prompt given its own history, `(R, L - P, V)`, float64, for texts `(R, L)`.

    All texts continue one prompt, whose mask is `prompt_mask` `(P,)`.
    """
    columns = len(prompt_mask)
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(texts.shape[1] - columns)]).expand_as(texts)
    logits, processors = target_logits(target, texts, mask), processors_of(settings)
    first = columns_hidden_from_processors(prompt_mask)
    laws = [
        processors(texts[:, first:column], logits[:, column - 1].clone()).double().softmax(dim=-1)
        for column in range(columns, texts.shape[1])
    ]
    return torch.stack(laws, dim=1)
