"""The target's whole head: from the hidden state after the final norm to the logits that `target(...)` returns.

transformers computes scale and soft-cap outside the head's module, so they are repeated here, and `check_target_head`
compares with the target itself before anything is learnt from it.
"""

from typing import Any

import torch
from torch import nn

from dspark_hf.drafting import BorrowedHead
from dspark_hf.host import TargetModel


class TargetHead:
    r"""
    The target's head, all of it or the rows of a reduced vocabulary.

    Args:
        target (`PreTrainedModel`): The target.
        kept (`torch.LongTensor` of shape `(V_d,)`, *optional*): Target ids of the rows to take. `None` takes all.
    """

    def __init__(self, target: TargetModel, kept: torch.Tensor | None = None):
        text = target.config.get_text_config(decoder=True)
        head: nn.Module = target.get_output_embeddings()
        self.dtype = target.dtype
        self.module = head if kept is None else BorrowedHead(head, kept)
        # Cohere multiplies its logits, Granite divides them.
        self.scale = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1.0)
        self.softcap = getattr(text, "final_logit_softcapping", None)

    def __call__(self, last_hidden_states: torch.Tensor) -> torch.Tensor:
        """Turn hidden states after the final norm `(..., D_target)` into logits `(..., V)` or `(..., V_d)`, float32.

        They are what the target computes in its own dtype, also where the drafter trains under autocast.
        """
        with torch.autocast(last_hidden_states.device.type, enabled=False):
            logits = self.module(last_hidden_states.to(self.dtype)).float()
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def last_hidden_states(target: TargetModel, input_ids: torch.Tensor) -> Any:
    """Run the target's decoder over tokens `(B, T)`, padded on the right; hidden states after the final norm `(B, T, D)`.

    No mask is needed: attention is causal, so what is padded is seen by padding alone.
    """
    return target.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state


@torch.no_grad()
def check_target_head(target: TargetModel) -> None:
    r"""
    Check on a few tokens that [`TargetHead`] gives the target's logits.

    Raises:
        NotImplementedError: If it does not: the target does something to its logits that is not known here.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(1, 9, device=target.device)[None] % vocab_size
    expected = target(input_ids=input_ids, use_cache=False).logits.float()
    got = TargetHead(target)(last_hidden_states(target, input_ids))
    # Less than one rounding apart where the target scales or caps before it casts (gemma3, gemma4, granite in half precision).
    tolerance = 2 * torch.finfo(target.dtype).eps * expected.abs().max().item()
    error = (got - expected).abs().max().item()
    if not error <= tolerance:
        raise NotImplementedError(
            f"The logits of {type(target).__name__} are not its head applied to its last hidden state (they differ by "
            f"{error:.3g}), so soft labels would be wrong. Targets whose config names the change as `logit_scale`, "
            "`logits_scaling` or `final_logit_softcapping` can be trained on."
        )
