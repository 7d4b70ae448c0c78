"""A target spread over two pretended GPUs, for tests/test_more_targets.py: run as a program.

Tensors carry a device and no data (`FakeTensorMode`), and operations that mix devices raise, as on real ones. What this
does not show: numbers, streams, and copies that a real device would make late.
"""

import sys

import pytest
import torch
from conftest import make_drafter, make_target
from torch._subclasses import FakeTensorMode


try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as pretend
except ImportError:
    sys.stdout.write("no pretended devices\n")
    sys.exit()

from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from dspark_hf.caches import SlotCache
from dspark_hf.drafting import Context, Drafting, check_lending
from dspark_hf.taps import TapRecorder, check_target
from dspark_hf.verification import Verifier


def place(module: torch.nn.Module, device: torch.device) -> None:
    """Give a module's tensors a device, in a `FakeTensorMode`."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(
                    torch.empty(value.shape, device=device), requires_grad=False
                )
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)


def spread(target, first: torch.device, second: torch.device) -> None:
    """Embedding and half of the layers on the first device, the rest and the head on the second."""
    decoder, skipped = target.model, target._skip_keys_device_placement
    parts = [
        (decoder.embed_tokens, first),
        (decoder.rotary_emb, first),
        (decoder.norm, second),
        (target.lm_head, second),
    ]
    parts += [(layer, first if index < 2 else second) for index, layer in enumerate(decoder.layers)]
    for module, device in parts:
        place(module, device)
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys=skipped))
    add_hook_to_module(target, AlignDevicesHook(execution_device=first, io_same_device=True, skip_keys=skipped))


def main() -> None:
    pretend("pretended")
    first, second = torch.device("pretended", 0), torch.device("pretended", 1)
    target = make_target("qwen3")
    drafter = make_drafter(target, target_layer_ids=[-1, 0, 2, 3])
    with FakeTensorMode(), torch.no_grad():
        spread(target, first, second)
        place(drafter, first)
        with pytest.raises(ValueError, match="drafter is on pretended:0, the target's head on pretended:1"):
            check_target(drafter, target)
        place(drafter, second)
        check_target(drafter, target)
        check_lending(drafter, target)
        rows = torch.ones(2, 7, dtype=torch.bool, device=second)
        positions = torch.arange(7, device=second).expand(2, -1)
        verifier = Verifier(target, SlotCache(4), rows, {"position_ids": positions})
        slots = torch.arange(7, 10, device=second).expand(2, -1)
        with TapRecorder(target, [-1, 0, 2, 3], drafter.device, drafter.dtype) as recorder:
            logits = verifier(torch.ones_like(slots), slots, 10, torch.full((2,), 3, device=second)).logits
            taps = recorder.take()
        assert [layer.keys.device for layer in verifier.cache.layers] == [first, first, second, second]
        drafting = Drafting(drafter, target, rows, 0)
        drafting.observe(Context(taps, slots - 7, torch.full((2,), 3, device=second)))
        anchors = torch.full((2,), 5, device=second)
        draft = drafting.draft(
            anchors,
            slots[:, 0],
            12,
            4,
            lambda _index, scores, _drafted: (scores.argmax(dim=-1), scores.softmax(dim=-1)),
        )
        assert {taps.device, logits.device, draft.tokens.device} == {second}
    sys.stdout.write("taps, logits and draft met on pretended:1\n")


if __name__ == "__main__":
    main()
