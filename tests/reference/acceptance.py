"""The law of one drafted position under rules for accepting it, by enumeration over the drafted token, in float64."""

import torch


def normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum()


def speculative_law(p: torch.Tensor, q: torch.Tensor, verified: torch.Tensor | None = None) -> torch.Tensor:
    r"""
    Law of the first committed token when the draft token comes from `q` and is tested against `p` (Leviathan et al.).

    Args:
        p (`torch.DoubleTensor` of shape `(V,)`): The target's law.
        q (`torch.DoubleTensor` of shape `(V,)`): The law that the draft token is drawn from.
        verified (`torch.BoolTensor` of shape `(V,)`, *optional*): Draft tokens that are sent to the target; the others
            are dropped and the target draws on its own. It is lossless only if it is the same for all tokens.
    """
    p, q = p.double(), q.double()
    law = torch.zeros_like(p)
    residual = (p - q).clamp_min(0)
    correction = normalised(residual) if residual.sum() > 0 else p
    for token in range(len(p)):
        if q[token] == 0:
            continue
        if verified is not None and not verified[token]:
            law += q[token] * p
            continue
        accept = min(1.0, float(p[token] / q[token]))
        law[token] += q[token] * accept
        law += q[token] * (1 - accept) * correction
    return law


def own_probability_law(p: torch.Tensor, q: torch.Tensor, threshold: float) -> torch.Tensor:
    """The same when a draft token is dropped because its own draft probability is below a threshold: biased."""
    return speculative_law(p, q, verified=q >= threshold)
