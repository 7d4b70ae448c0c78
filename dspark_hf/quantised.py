"""Quantised targets: which of them give a token the same output whatever other tokens share its forward.

Weights may be stored in any way, and activations may be rounded with a scale of their own token. A layer that looks at all
tokens of a forward at once to round them is refused: there a draft token would change the output of the tokens before it.
"""

from torch import nn

from dspark_hf.host import TargetModel


def check_quantisation(target: TargetModel) -> None:
    r"""
    Check that no layer of a target rounds the activations of a token by those of others.

    Args:
        target (`PreTrainedModel`): The target.

    Raises:
        NotImplementedError: If a layer does; the message names it and says how to quantise instead.
    """
    for name, module in target.named_modules():
        instead = what_to_do_instead(module)
        if instead is not None:
            raise NotImplementedError(
                f"Layer {name!r} of {type(target).__name__}, a quantised {type(module).__name__}, rounds the activations of all "
                f"tokens in a forward together, so draft tokens would change the output. {instead}"
            )


def what_to_do_instead(module: nn.Module) -> str | None:
    """How to quantise a layer that rounds tokens together; `None` for other layers."""
    if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return "Quantise weights only, with torchao."
    scheme = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)  # torchao
    if type(getattr(scheme, "granularity", None)).__name__ == "PerTensor":
        return "Quantise activations with granularity=PerRow(), or weights only."
    if type(module).__name__ == "Linear8bitLt" and module.state.threshold > 0:  # type: ignore[union-attr,operator]
        # bitsandbytes keeps columns of the input in half precision when a value of any token there is large.
        return "Load the target with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
    return None
