"""Linear layers on a few rows: the same numbers from packed weights, never from old ones, and nothing left behind."""

import copy
import gc

import pytest
import torch
from conftest import FAMILIES, left_padded, make_drafter, make_target
from torch import nn

from dspark_hf import narrow
from dspark_hf.drafting import _borrow_head
from dspark_hf.passes import time_passes


pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="packing is MKL's")


@pytest.fixture(autouse=True)
def _nothing_packed():
    narrow._packed.clear()


@pytest.mark.parametrize("shape", [(2, 24), (1, 8, 24), (2, 8, 24), (3, 8, 24), (32, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_are_those_of_the_layer(shape, bias):
    torch.manual_seed(0)
    layer, inputs = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    expected = layer(inputs)
    with torch.no_grad(), narrow.narrow_linears(layer):
        found = layer(inputs)
        strided = layer(inputs.transpose(0, -2).contiguous().transpose(0, -2))
    assert layer in narrow._packed
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(strided, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inputs", [torch.zeros(1, 24), torch.zeros(33, 24), torch.zeros(2, 0, 24)], ids=str)
def test_other_numbers_of_rows_pack_nothing(inputs):
    layer = nn.Linear(24, 40)
    with torch.no_grad(), narrow.narrow_linears(layer):
        assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    assert layer not in narrow._packed


def test_autocast_computes_in_its_own_dtype():
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(inputs)
        with narrow.narrow_linears(layer):
            assert torch.equal(layer(inputs), expected)


def _in_place(layer):
    with torch.no_grad():
        layer.weight[3, 5] += 1e-3


def _behind_autograd(layer):
    layer.weight.data[3, 5] += 1e-3  # peft merges adapters like this; the tensor's version stays the same


def _another_parameter(layer):
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


@pytest.mark.parametrize("change", [_in_place, _behind_autograd, _another_parameter])
def test_a_weight_that_changed_is_packed_again(change):
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    with torch.no_grad():
        for _ in range(2):
            with narrow.narrow_linears(layer):
                torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
            change(layer)


def test_a_call_beside_another_looks_at_the_weights_itself():
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    with torch.no_grad(), narrow.narrow_linears(layer):
        layer(inputs)
        _behind_autograd(layer)
        with narrow.narrow_linears(layer):
            torch.testing.assert_close(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


@pytest.mark.parametrize("swap", ["rows", "columns", "bits"])
def test_every_kind_of_change_shows(swap):
    weight = torch.randn(40, 24)
    before = narrow._fingerprint(weight)
    if swap == "bits":  # far below the rounding of any product
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    else:
        weight = weight.roll(1, dims=["rows", "columns"].index(swap))
    assert not all(map(torch.equal, before, narrow._fingerprint(weight)))


def test_gradients_flow_where_they_are_wanted():
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    with narrow.narrow_linears(layer):
        with torch.inference_mode():
            layer(inputs)
        layer(inputs).sum().backward()
    torch.testing.assert_close(layer.weight.grad, inputs.sum(dim=0).expand(40, -1))


def test_wrong_inputs_raise_as_ever():
    layer = nn.Linear(24, 8)
    with torch.no_grad(), narrow.narrow_linears(layer), pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(torch.randn(4, 16))


def test_other_default_dtypes_and_devices_do_not_reach_the_check():
    narrow._probe.cache_clear()
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.device("meta"), narrow.narrow_linears(layer):
            layer(inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer in narrow._packed


def test_a_copy_made_during_a_call_has_a_forward_of_its_own():
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    with torch.no_grad(), narrow.narrow_linears(layer):
        layer(inputs)
        copied = copy.deepcopy(layer)
    _behind_autograd(copied)
    assert torch.equal(copied(inputs), nn.functional.linear(inputs, copied.weight, copied.bias))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_nothing_is_packed_where_float32_products_may_be_rounded(precision):
    layer = nn.Linear(24, 40)
    torch.set_float32_matmul_precision(precision)
    try:
        with narrow.narrow_linears(layer):
            assert "forward" not in layer.__dict__
    finally:
        torch.set_float32_matmul_precision("highest")


def test_packed_weights_are_kept_as_long_as_their_layer():
    layer, inputs = nn.Linear(24, 40), torch.randn(3, 24)
    packed = []
    with torch.no_grad():
        for _ in range(2):
            with narrow.narrow_linears(layer):
                layer(inputs)
            packed.append(narrow._packed[layer].weight)
    assert packed[0] is packed[1]
    del layer
    gc.collect()
    assert not narrow._packed


def test_nothing_is_packed_where_memory_is_short(monkeypatch):
    packed, layer = nn.Linear(24, 40), nn.Linear(24, 40)
    with torch.no_grad(), narrow.narrow_linears(packed):
        packed(torch.randn(3, 24))
    monkeypatch.setattr(narrow, "MEMORY_SHARE", 0.0)
    with narrow.narrow_linears(layer):
        assert "forward" not in layer.__dict__
    with narrow.narrow_linears(packed):
        assert "forward" in packed.__dict__, "it takes no more memory"


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


def test_other_layers_and_other_libraries_are_left_alone(monkeypatch):
    class Own(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    hooked, transposed = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.forward = hooked.forward
    transposed.weight = nn.Parameter(transposed.weight.T)
    others = [Own(4, 4), hooked, transposed, nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4, device="meta"), nn.ReLU()]
    assert not any(map(narrow.can_pack, others))
    assert narrow.can_pack(nn.Linear(4, 4))
    layer = nn.Linear(4, 4)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    with narrow.narrow_linears(layer):
        assert "forward" not in layer.__dict__


@pytest.mark.parametrize("kept", [None, 40])
def test_the_passes_that_are_timed_use_packed_weights(kept):
    target = make_target("llama")
    drafter = make_drafter(target, **({} if kept is None else {"draft_vocab_size": kept}))
    time_passes(target, drafter, rows=1, context=8)
    lent = _borrow_head(drafter, target)
    assert (lent is target.lm_head) == (kept is None)
    layers = {target.model.layers[0].mlp.up_proj, drafter.layers[0].mlp.up_proj}
    assert {target.lm_head, lent, *layers} <= set(narrow._packed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[6], [3, 6, 5]])
def test_the_text_is_the_targets(family, lengths):
    target = make_target(family, eos_token_id=None)
    drafter = make_drafter(target)
    prompt = left_padded(lengths)
    plain = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter), plain)
    assert {target.get_output_embeddings(), drafter.layers[0].mlp.up_proj} <= set(narrow._packed)
    assert not any("forward" in module.__dict__ for module in [*target.modules(), *drafter.modules()])
