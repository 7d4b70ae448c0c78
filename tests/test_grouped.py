"""Attention without repeated keys: the same numbers, on the CPU alone, and nothing left behind."""

import os

import pytest
import torch
from conftest import make_drafter, make_target
from transformers.integrations import sdpa_attention

from dspark_hf.grouped import SWITCH, grouped_queries


HAS_SWITCH = hasattr(sdpa_attention, "os")  # transformers 5.24 reads it from the environment
CPU = torch.device("cpu")


@pytest.mark.skipif(not HAS_SWITCH, reason="this release of transformers has no switch, and copies")
def test_a_round_repeats_no_keys_and_gives_the_same_text(monkeypatch):
    target = make_target(num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=None)
    drafter = make_drafter(target)
    prompt, options = torch.tensor([[5, 6, 7, 8, 9]]), {"max_new_tokens": 16, "do_sample": False}
    plain = target.generate(prompt, **options)
    repeat, counted = sdpa_attention.repeat_kv, []
    monkeypatch.setattr(
        sdpa_attention, "repeat_kv", lambda states, groups: counted.append(1) or repeat(states, groups)
    )
    monkeypatch.delenv(SWITCH, raising=False)
    assert torch.equal(target.generate(prompt, **options, assistant_model=drafter), plain)
    assert not counted
    monkeypatch.setenv(SWITCH, "0")  # a user's own setting stands
    assert torch.equal(target.generate(prompt, **options, assistant_model=drafter), plain)
    assert counted


def test_the_cpu_kernel_gives_the_same_numbers_either_way():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, 40, 16, generator=generator)
    mask = torch.zeros(2, 1, 3, 40).masked_fill(torch.rand(2, 1, 3, 40, generator=generator) < 0.3, -1e30)
    attend = torch.nn.functional.scaled_dot_product_attention
    repeated = [sdpa_attention.repeat_kv(states, 3) for states in (key, value)]
    assert torch.equal(attend(query, key, value, mask, enable_gqa=True), attend(query, *repeated, mask))


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_the_switch_is_as_it_was_afterwards(monkeypatch, setting):
    monkeypatch.delenv(SWITCH, raising=False)
    if setting is not None:
        monkeypatch.setenv(SWITCH, setting)
    with grouped_queries(CPU):
        assert os.environ[SWITCH] == (setting or "1")
    assert os.environ.get(SWITCH) == setting
    with grouped_queries(torch.device("cuda")):
        assert os.environ.get(SWITCH) == setting
