"""Weights that drafter and target have in common."""

import torch
from conftest import left_padded, make_drafter, make_target


def owning_drafter(target, same: bool):
    drafter = make_drafter(target, has_embedding=True, has_lm_head=True)
    if same:
        with torch.no_grad():
            drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
            drafter.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return drafter


def test_equal_embedding_and_head_are_held_in_memory_once():
    target = make_target()
    drafter = owning_drafter(target, same=True)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    prompt = left_padded([7])
    expected = target.generate(**prompt, max_new_tokens=6)
    assert torch.equal(target.generate(**prompt, max_new_tokens=6, assistant_model=drafter), expected)
    assert drafter.embed_tokens.weight is target.get_input_embeddings().weight
    assert drafter.lm_head.weight is target.get_output_embeddings().weight
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_an_embedding_of_its_own_stays_its_own():
    target = make_target()
    drafter = owning_drafter(target, same=False)
    embedding, head = drafter.embed_tokens.weight, drafter.lm_head.weight
    target.generate(**left_padded([7]), max_new_tokens=6, assistant_model=drafter)
    assert drafter.embed_tokens.weight is embedding
    assert drafter.lm_head.weight is head
