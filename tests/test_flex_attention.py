"""Flex attention over packed blocks: the mask of SDPA as a function, and the same numbers forward.

The library takes flex attention on accelerators alone. Here its masks are forced on the CPU, uncompiled, which reads the mask's
function but not its tiles: these are compared with the dense mask. Compiled, and for gradients, it needs the test marked `gpu`.

Tolerance: the same float32 operations in another order.
"""

import pytest
import torch
from conftest import VOCAB, left_padded, make_drafter, make_target
from test_anchors import TOLERANCE, VARIANTS
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers.integrations import flex_attention as transformers_flex

from dspark_hf import DSparkDraftModel
from dspark_hf.training import anchors as anchors_module
from dspark_hf.training.anchors import (
    block_hidden_states,
    pack_blocks,
    packed_attention_mask,
    packed_block_mask,
    packed_visibility,
    sample_anchors,
)


TILE = 128


@pytest.fixture(scope="module")
def target():
    return make_target().requires_grad_(False)


@pytest.fixture
def _uncompiled(monkeypatch):
    def attend(query, key, value, training=False, **kwargs):  # noqa: ARG001  # the signature of what it replaces
        return flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", attend)
    # Not even traced, where torch can do without: a trace takes seconds.
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False
    )


def packed(drafter, columns=20, num_anchors=17):
    """Blocks and taps of two rows with several sequences, padding between them and dummies."""
    generator = torch.Generator().manual_seed(columns)
    last = columns - 13
    sequence_ids = torch.tensor([[1] * 9 + [2] * (columns - 9), [3] * 6 + [0] * 2 + [1] * 5 + [2] * last])
    input_ids = torch.randint(3, VOCAB, sequence_ids.shape, generator=generator)
    loss_mask = (torch.rand(sequence_ids.shape, generator=generator) < 0.9).long()
    anchors = sample_anchors(loss_mask, num_anchors, drafter.config.block_size, sequence_ids, generator)
    blocks = pack_blocks(drafter.config, input_ids, loss_mask, anchors, sequence_ids)
    return blocks, torch.randn(*sequence_ids.shape, drafter.fc.in_features, generator=generator)


def hidden_states(drafter, target, attention, **shape):
    drafter.set_attn_implementation(attention)
    blocks, taps = packed(drafter, **shape)
    assert (~blocks.block_keep_mask).any()
    with pytest.MonkeyPatch.context() as patch:
        if attention == "flex_attention":
            patch.setattr(
                anchors_module, "packed_masks", lambda drafter, blocks: packed_block_mask(drafter.config, blocks)
            )
        return block_hidden_states(drafter, blocks, taps, target.get_input_embeddings())


def assert_same_forward(drafter, target, **shape):
    expected = hidden_states(drafter, target, "sdpa", **shape)
    actual = hidden_states(drafter, target, "flex_attention", **shape)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_masks_function_and_its_tiles_are_the_dense_mask(target, variant):
    drafter = make_drafter(target, **VARIANTS[variant])
    blocks, _ = packed(drafter, columns=150, num_anchors=148)
    tiles = packed_block_mask(drafter.config, blocks)
    for layer_type, mask in packed_attention_mask(drafter.config, blocks, torch.float32).items():
        visible = packed_visibility(drafter.config, blocks, layer_type)
        rows, _, queries, keys = mask.shape
        assert torch.equal(create_mask(visible, rows, 1, queries, keys, device="cpu"), mask == 0)
        padded = torch.nn.functional.pad(mask == 0, (0, -keys % TILE, 0, -queries % TILE))
        expected = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).any(dim=5).any(dim=3)
        assert torch.equal(tiles[layer_type].to_dense().bool(), expected)
        assert not expected.all()
    assert set(tiles) == set(drafter.config.layer_types)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("variant", VARIANTS)
def test_flex_attention_gives_the_numbers_of_sdpa(target, variant):
    assert_same_forward(make_drafter(target, **VARIANTS[variant]).requires_grad_(False), target)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_flex_attention_shares_keys_among_heads(target, heads):
    shape = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    assert_same_forward(make_drafter(target, **shape).requires_grad_(False), target)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("qk_norm", [True, False])
def test_flex_attention_runs_under_autocast(target, qk_norm):
    drafter = make_drafter(target, qk_norm=qk_norm).requires_grad_(False)
    exact = hidden_states(drafter, target, "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        rounded = hidden_states(drafter, target, "flex_attention").float()
    assert (rounded - exact).abs().mean() < 0.05  # as in test_anchors


def test_a_drafter_with_flex_attention_trains_on_the_cpu_through_sdpa(target):
    drafter, found = make_drafter(target), []
    blocks, taps = packed(drafter)
    for attention in ("sdpa", "flex_attention"):
        drafter.set_attn_implementation(attention)
        hidden = block_hidden_states(drafter, blocks, taps, target.get_input_embeddings())
        found.append([hidden, *torch.autograd.grad(hidden.square().mean(), list(drafter.layers.parameters()))])
    torch.testing.assert_close(*found, atol=0, rtol=0)


def test_a_drafter_loaded_for_flex_attention_drafts_with_dense_masks(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    drafter = DSparkDraftModel.from_pretrained(tmp_path, attn_implementation="flex_attention").eval()
    assert drafter.config._attn_implementation == "flex_attention"
    outputs = []
    for attention in ("flex_attention", "sdpa"):
        drafter.set_attn_implementation(attention)
        settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
        outputs.append(target.generate(**left_padded([7, 4]), **settings, assistant_model=drafter))
    flex, sdpa = outputs
    assert torch.equal(flex.sequences, sdpa.sequences)
    assert flex.statistics.verification_lengths == sdpa.statistics.verification_lengths


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_flex_attention_are_those_of_sdpa_on_a_gpu(target):
    drafter = make_drafter(target, head_dim=16, layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    drafter, gradients = drafter.cuda(), []
    for attention in ("sdpa", "flex_attention"):
        drafter.set_attn_implementation(attention)
        blocks, taps = packed(drafter, columns=150, num_anchors=40)
        blocks = type(blocks)(*(getattr(blocks, name).cuda() for name in blocks.__dataclass_fields__))
        hidden = block_hidden_states(drafter, blocks, taps.cuda(), target.get_input_embeddings().cuda())
        weights = list(drafter.layers.parameters())
        gradients.append(torch.autograd.grad(hidden.square().mean(), weights))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)
