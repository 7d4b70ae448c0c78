"""Attention without repeated keys: the same text, on the CPU alone, and nothing left behind."""

import os

import pytest
import torch
from conftest import make_drafter, make_target
from transformers.integrations import sdpa_attention

from dspark_hf.grouped import SWITCH, grouped_queries, reads_groups


HAS_SWITCH = hasattr(sdpa_attention, "os")  # transformers 5.24 reads it from the environment
PROMPT, OPTIONS = torch.tensor([[5, 6, 7, 8, 9]]), {"max_new_tokens": 16, "do_sample": False}


def grouped_pair():
    target = make_target(num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=None)
    return target, make_drafter(target)


@pytest.mark.skipif(not HAS_SWITCH, reason="this release of transformers has no switch, and copies")
def test_a_round_repeats_no_keys_and_gives_the_same_text(monkeypatch):
    target, drafter = grouped_pair()
    monkeypatch.delenv(SWITCH, raising=False)
    plain = target.generate(PROMPT, **OPTIONS)
    repeat, counted = sdpa_attention.repeat_kv, []
    monkeypatch.setattr(
        sdpa_attention, "repeat_kv", lambda states, groups: counted.append(1) or repeat(states, groups)
    )
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=drafter), plain)
    of_prompt = len(counted)
    assert of_prompt <= 2 * target.config.num_hidden_layers
    monkeypatch.setenv(SWITCH, "0")  # a user's own setting stands
    assert torch.equal(target.generate(PROMPT, **OPTIONS, assistant_model=drafter), plain)
    assert len(counted) > 3 * of_prompt + 8


def test_forwards_over_one_token_are_those_of_plain_generation(monkeypatch):
    target, drafter = grouped_pair()
    monkeypatch.delenv(SWITCH, raising=False)
    seen = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"].shape[1], os.environ.get(SWITCH))),
        with_kwargs=True,
    )
    drafter.generation_config.num_assistant_tokens = 2
    target.generate(PROMPT, **OPTIONS, assistant_model=drafter)
    _prompt, *rounds = seen
    assert {width for width, _ in rounds} == {1, 2, 3}  # the text ends with shorter ones
    assert all(switch == (None if width == 1 else "1") for width, switch in rounds)


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
    with grouped_queries(True):
        assert os.environ[SWITCH] == (setting or "1")
    assert os.environ.get(SWITCH) == setting
    with grouped_queries(False):
        assert os.environ.get(SWITCH) == setting


def test_only_models_that_are_all_on_the_cpu_want_it():
    target, _ = grouped_pair()
    on_cpu = reads_groups(target)
    target.lm_head.to("meta")  # offloaded
    assert not reads_groups(target)
    assert on_cpu == (tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13))
