"""Muon for the weight matrices of the draft layers, AdamW for the rest, as one optimizer that a `Trainer` can drive.

Muon orthogonalises the momentum of a matrix, so that all of its directions learn alike. That is no rule for tables of which
each row is seen now and then (the sequential head, an embedding) or for norms: these keep AdamW.
"""

from typing import Any

import torch

from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


class MuonWithAdamW(torch.optim.Optimizer):
    r"""
    Two optimizers in step.

    Args:
        muon (`torch.optim.Muon`): For one set of parameters.
        adamw (`torch.optim.AdamW`): For another.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self._parts = {"muon": muon, "adamw": adamw}
        # The groups are shared, so a scheduler that sets their learning rates reaches both.
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]


def check_muon(learning_rate: float) -> None:
    r"""
    Check that Muon can train at a rate.

    Raises:
        ValueError: If the rate is negative.
        ImportError: If torch is older than 2.9 and has no Muon.
    """
    if learning_rate < 0:
        raise ValueError(f"Muon's learning rate must not be negative, got {learning_rate}.")
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(
            f"Muon needs torch 2.9 or newer, this is {torch.__version__}. Update it, or pass --muon-learning-rate 0."
        )


def muon_with_adamw(
    drafter: DSparkDraftModel, muon_learning_rate: float, learning_rate: float, weight_decay: float = 0.0, **adamw: Any
) -> MuonWithAdamW:
    r"""
    Build the optimizer of a drafter.

    Args:
        drafter ([`DSparkDraftModel`]): Its trainable parameters are split: matrices of the draft layers and of the tap
            projection go to Muon, everything else to AdamW.
        muon_learning_rate (`float`): Of Muon, scaled so that an update is as large as one of AdamW at that rate.
        learning_rate (`float`): Of AdamW.
        weight_decay (`float`): Of everything with two dimensions.
        adamw: Other options of `torch.optim.AdamW`.

    Returns:
        [`MuonWithAdamW`]
    """
    trainable = {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}
    tables = {name: weight for name, weight in trainable.items() if weight.dim() == 2}
    matrices = {name: weight for name, weight in tables.items() if name.startswith(("layers.", "fc."))}
    muon = torch.optim.Muon(
        matrices.values(), lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [tables[name] for name in tables if name not in matrices], "weight_decay": weight_decay},
        {"params": [trainable[name] for name in trainable if name not in tables], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return MuonWithAdamW(muon, torch.optim.AdamW(filled, lr=learning_rate, **adamw))
