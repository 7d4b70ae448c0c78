"""From scores to tokens: the distribution, and the draw from exactly that distribution.

A token and the probabilities it was drawn from always come from the same float32 tensor, otherwise speculative
sampling is biased. Greedy decoding is the one-hot distribution at the largest score, on the same path, and uses no
randomness.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampler:
    r"""
    Args:
        do_sample (`bool`): Sample, or take the most likely token.
        generator (`torch.Generator`, *optional*): Source of randomness; `None` is torch's global generator.
    """

    do_sample: bool
    generator: torch.Generator | None = None

    def distribution(self, scores: torch.Tensor) -> torch.Tensor:
        """Turn processed scores `(..., V)` into float32 probabilities of the same shape."""
        if self.do_sample:
            return scores.float().softmax(dim=-1)
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores, dtype=torch.float32).scatter_(-1, best, 1.0)

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        """Draw one index from each row of non-negative `weights` `(..., V)`, which need not be normalised.

        The largest of `weights / e`, e independent and exponential, is distributed as the weights are, and needs no
        synchronisation with the host. An entry of zero weight is never drawn from a row that has another.
        """
        if not self.do_sample:
            return weights.argmax(dim=-1)
        noise = torch.empty_like(weights).exponential_(generator=self.generator)
        return (weights / noise.clamp_min(torch.finfo(weights.dtype).tiny)).argmax(dim=-1)

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Draw float32 numbers in [0, 1); zeros when greedy, where the acceptance test does not depend on them."""
        if not self.do_sample:
            return torch.zeros(shape, device=device)
        return torch.rand(shape, device=device, generator=self.generator)
