"""The acceptance rule of speculative sampling (Leviathan et al. 2023, algorithm 1; DSpark section 2.1).

Invariant: whatever distribution the draft tokens were drawn from, the accepted tokens and the bonus token are
distributed as if the target alone had written them.
"""

from dataclasses import dataclass

import torch

from dspark_hf.sampling import Sampler


SMALLEST_RESIDUAL = 1e-8


@dataclass(frozen=True, slots=True)
class Acceptance:
    r"""
    Args:
        num_accepted (`torch.LongTensor` of shape `(R,)`): Accepted draft tokens, the bonus token excluded.
        bonus_token (`torch.LongTensor` of shape `(R,)`): The target's own token that follows them.
    """

    num_accepted: torch.Tensor
    bonus_token: torch.Tensor


def accept(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    lengths: torch.Tensor,
    sampler: Sampler,
) -> Acceptance:
    r"""Accept the longest prefix that keeps the target's distribution, and draw the bonus token.

    Token k is accepted when `u * q_k(x_k) < p_k(x_k)`, so a token of probability zero never is. The bonus token comes
    from the residual `max(0, p - q)` after a rejection, from `p` otherwise, and from `p` when the residual's mass is at
    most 1e-8.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, K)`): Drafted tokens; entry `[r, k - 1]` is position k.
        draft_probs (`torch.FloatTensor` of shape `(R, K, V)`): float32, the distributions the tokens were drawn from.
        target_probs (`torch.FloatTensor` of shape `(R, K + 1, V)`): float32; row k is conditioned on k draft tokens.
        lengths (`torch.LongTensor` of shape `(R,)`): Verification lengths, each in `[0, K]`.
        sampler ([`Sampler`]): Source of randomness, or greedy.

    Returns:
        [`Acceptance`]

    Raises:
        ValueError: If the shapes disagree.

    Source: Leviathan et al. 2023, algorithm 1; DSpark section 2.1.
    """
    rows, positions = draft_tokens.shape
    if draft_probs.shape[:2] != (rows, positions) or target_probs.shape[:2] != (rows, positions + 1):
        raise ValueError(
            f"Expected draft_probs ({rows}, {positions}, V) and target_probs ({rows}, {positions + 1}, V) for "
            f"draft_tokens {tuple(draft_tokens.shape)}, got {tuple(draft_probs.shape)} and {tuple(target_probs.shape)}."
        )
    q_token = draft_probs.gather(-1, draft_tokens[..., None]).squeeze(-1)  # (R, K)
    p_token = target_probs[:, :positions].gather(-1, draft_tokens[..., None]).squeeze(-1)
    verified = torch.arange(positions, device=lengths.device) < lengths[:, None]
    passed = sampler.uniform((rows, positions), draft_tokens.device) * q_token < p_token
    num_accepted = (passed & verified).cumprod(dim=1).sum(dim=1)
    row = torch.arange(rows, device=lengths.device)
    weights = target_probs[row, num_accepted]  # (R, V)
    if positions > 0:
        residual = (weights - draft_probs[row, num_accepted.clamp(max=positions - 1)]).clamp_min(0)
        rejected = (num_accepted < lengths) & (residual.sum(dim=-1) > SMALLEST_RESIDUAL)
        weights = torch.where(rejected[:, None], residual, weights)
    return Acceptance(num_accepted, sampler.draw(weights))
