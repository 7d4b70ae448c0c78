"""Calibrated confidences (section 3.2.1): a temperature for each position, applied to the confidence logits."""

import torch


def calibrated_confidence(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    r"""
    Turn confidence logits into confidences, `c_k = sigmoid(logit_k / T_k)`.

    Args:
        logits (`torch.FloatTensor` of shape `(R, K)`): Confidence logits of positions 1 to K.
        temperatures (`torch.FloatTensor` of shape `(>= K,)`, *optional*): Calibration temperatures; `None` means 1.

    Returns:
        `torch.FloatTensor` of shape `(R, K)`: Conditional acceptance probabilities.
    """
    if temperatures is not None:
        logits = logits / temperatures[: logits.shape[1]]
    return logits.sigmoid()
