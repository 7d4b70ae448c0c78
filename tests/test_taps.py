"""Taps by hooks equal the hidden states that a target reports, and leave nothing behind; drafters must fit their target."""

import pytest
import torch
from conftest import FAMILIES, left_padded, make_drafter, make_target
from torch import nn
from transformers import DynamicCache

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.taps import TapRecorder, check_target, decoder_layers
from dspark_hf.verification import cache_argument


def recorder(target, layer_ids, dtype=torch.float32) -> TapRecorder:
    return TapRecorder(target, layer_ids, torch.device("cpu"), dtype)


def num_hooks(target) -> int:
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in decoder_layers(target))


@torch.no_grad()
def taps_and_states(target, layer_ids, **inputs):
    with recorder(target, layer_ids) as taps:
        states = target(**inputs, output_hidden_states=True).hidden_states
        return taps.take(), states


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_hidden_states_of_the_target(family):
    target, inputs = make_target(family), {"input_ids": torch.arange(3, 23).view(2, 10)}
    taps, states = taps_and_states(target, [-1, 0, 1, 2], **inputs)
    # `hidden_states[i + 1]` is the output of layer i, but the last entry is normed: layer 3 is compared below.
    assert torch.equal(taps, torch.cat(states[:4], dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tap_of_the_last_layer_is_raw(family):
    target, inputs = make_target(family), {"input_ids": torch.arange(3, 13)[None]}
    taps, states = taps_and_states(target, [3], **inputs)
    decoder = target.get_decoder()
    norm = decoder.ln_f if family == "gpt2" else decoder.norm
    torch.testing.assert_close(norm(taps), states[-1])
    assert not torch.allclose(taps, states[-1], atol=1e-2)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_tap_minus_1_is_the_embedding_as_the_first_layer_sees_it(family):
    """Gemma scales its embeddings; the table alone would be wrong."""
    target, input_ids = make_target(family), torch.arange(3, 13)[None]
    taps, _ = taps_and_states(target, [-1], input_ids=input_ids)
    table = nn.functional.embedding(input_ids, target.get_input_embeddings().weight)
    torch.testing.assert_close(taps, table * 32**0.5, rtol=1e-2, atol=1e-3)


def test_taps_come_in_the_order_of_the_ids_also_when_one_comes_twice():
    target, inputs = make_target(), {"input_ids": torch.arange(3, 13)[None]}
    taps, states = taps_and_states(target, [2, -1, 2, 0], **inputs)
    assert torch.equal(taps, torch.cat([states[3], states[0], states[3], states[1]], dim=-1))


def test_several_forwards_are_joined_and_taken_once():
    target, input_ids = make_target(), torch.arange(3, 15)[None]
    whole, _ = taps_and_states(target, [0, 2], input_ids=input_ids)
    with torch.no_grad(), recorder(target, [0, 2]) as taps:
        cache = {cache_argument(): DynamicCache(config=target.config)}
        for part in (input_ids[:, :5], input_ids[:, 5:6], input_ids[:, 6:9]):
            target(part, **cache)
        first = taps.take()
        target(input_ids[:, 9:], **cache)
        second = taps.take()
    assert (first.shape[1], second.shape[1]) == (9, 3)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_behind_left_padding_are_those_of_the_row_alone(family):
    target, lengths = make_target(family), [9, 4, 1]
    inputs = left_padded(lengths)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        together, _ = taps_and_states(target, [-1, 1], **inputs, position_ids=positions)
        for row, length in enumerate(lengths):
            alone, _ = taps_and_states(target, [-1, 1], input_ids=inputs["input_ids"][row : row + 1, -length:])
            torch.testing.assert_close(together[row, -length:], alone[0], atol=1e-4, rtol=0)


def test_taps_are_cast_to_the_drafters_dtype():
    with torch.no_grad(), recorder(make_target(), [1], torch.bfloat16) as taps:
        taps.layers[1](torch.randn(1, 4, 32), position_embeddings=(torch.ones(1, 4, 8), torch.zeros(1, 4, 8)))
        assert taps.take().dtype == torch.bfloat16


def test_recording_changes_no_output():
    target, input_ids = make_target(), torch.arange(3, 13)[None]
    with torch.no_grad():
        plain = target(input_ids).logits
        with recorder(target, [-1, 0, 3]):
            assert torch.equal(target(input_ids).logits, plain)


def test_hooks_are_removed_at_the_end_and_after_an_error():
    target = make_target()
    with recorder(target, [-1, 0, 3]):
        assert num_hooks(target) == 3
    assert num_hooks(target) == 0
    with pytest.raises(RuntimeError, match="boom"), recorder(target, [-1, 0, 3]):
        raise RuntimeError("boom")
    assert num_hooks(target) == 0


def test_hooks_are_removed_when_generate_fails():
    target = make_target()
    drafter = make_drafter(target)
    drafter.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.generate(torch.arange(3, 13)[None], assistant_model=drafter, max_new_tokens=5)
    assert num_hooks(target) == 0


def test_hooks_of_others_stay():
    target, calls = make_target(), []
    decoder_layers(target)[0].register_forward_hook(lambda *args: calls.append(args))
    with recorder(target, [0]):
        pass
    assert num_hooks(target) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_found(family):
    assert len(decoder_layers(make_target(family))) == 4


def test_a_target_with_its_layers_elsewhere_is_refused_by_name():
    target = make_target()
    target.model.hidden_away = target.model.layers
    del target.model.layers
    with pytest.raises(NotImplementedError, match="decoder layers of LlamaForCausalLM: LlamaModel has none of"):
        decoder_layers(target)


# Does the drafter fit the target?


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_fits_the_target_it_was_made_for(family):
    target = make_target(family)
    check_target(make_drafter(target), target)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 64}, r"expects hidden size 64 \(the target has 32\)"),
        ({"num_hidden_layers": 6}, r"expects number of layers 6 \(the target has 4\)"),
        ({"vocab_size": 99}, r"expects vocabulary size 99 \(the target has 64\)"),
        (
            {"hidden_size": 64, "num_hidden_layers": 6},
            r"hidden size 64 \(the target has 32\), number of layers 6 \(the target has 4\)\. .* for 'llama'",
        ),
    ],
)
def test_a_drafter_for_another_target_is_refused_naming_both_sides(other, message):
    drafter = make_drafter(make_target("qwen3", **other))
    with pytest.raises(ValueError, match=r"made for another target \(qwen3\): .*" + message):
        check_target(drafter, make_target())


def test_generate_refuses_before_the_first_forward():
    target = make_target()
    drafter = make_drafter(make_target(num_hidden_layers=6))
    target.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="number of layers 6"):
        target.generate(torch.arange(3, 13)[None], assistant_model=drafter, max_new_tokens=5)


def test_a_target_of_the_same_shape_in_another_family_is_accepted():
    """Shapes fit, so it is slow at worst; whether it is worth it shows in the first rounds."""
    check_target(make_drafter(make_target("qwen3")), make_target())


def test_drafter_and_target_on_different_devices_are_refused_with_the_remedy():
    target = make_target()
    with torch.device("meta"):
        drafter = DSparkDraftModel(DSparkConfig.from_target(target.config, num_hidden_layers=2))
    with pytest.raises(ValueError, match=r"drafter is on meta, the target's head on cpu. .*drafter.to\('cpu'\)"):
        check_target(drafter, target)
