"""Linear layers on a few rows: the same numbers in another order, and nothing left behind."""

import pytest
import torch
from conftest import FAMILIES, left_padded, make_drafter, make_target
from torch import nn

from dspark_hf import narrow


@pytest.fixture(autouse=True)
def _slow_cpu(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")


@pytest.mark.parametrize("shape", [(1, 24), (2, 24), (1, 8, 24), (2, 8, 24), (3, 8, 24), (2, 0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_are_those_of_the_layer(shape, bias):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    expected = layer(inputs)
    with torch.no_grad(), narrow.narrow_linears(layer):
        assert layer.forward.func is narrow.narrow_linear
        found = layer(inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.shape == expected.shape


def test_layers_are_restored_after_an_error_and_by_whoever_leaves_first():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="stop"), narrow.narrow_linears(layer):
        raise RuntimeError("stop")
    assert "forward" not in layer.__dict__
    outer, inner = narrow.narrow_linears(layer), narrow.narrow_linears(layer)
    outer.__enter__()
    inner.__enter__()  # finds the layer changed, and leaves it alone
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert "forward" not in layer.__dict__


def test_other_layers_and_other_cpus_are_left_alone(monkeypatch):
    class Own(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    hooked = nn.Linear(4, 4)
    hooked.forward = hooked.forward
    others = [Own(4, 4), hooked, nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4, device="meta"), nn.Embedding(4, 4)]
    assert not any(map(narrow.is_slow, others))
    assert narrow.is_slow(nn.Linear(4, 4))
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert not narrow.is_slow(nn.Linear(4, 4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[6], [3, 6, 5]])
def test_the_text_is_the_targets(family, lengths):
    target = make_target(family, eos_token_id=None)
    drafter = make_drafter(target)
    prompt = left_padded(lengths)
    plain = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter), plain)
    assert not any("forward" in module.__dict__ for module in [*target.modules(), *drafter.modules()])
