"""Weights that drafter and target have in common."""

import pytest
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


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_ends_where_processors_mask_all_that_the_drafter_can_propose(do_sample):
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=8)
    prompt, kept = left_padded([7]), drafter.kept_token_ids.tolist()
    settings = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": do_sample, "suppress_tokens": kept}
    output = target.generate(**prompt, **settings, assistant_model=drafter, return_dict_in_generate=True)
    assert not torch.isin(output.sequences[:, 7:], torch.tensor(kept)).any()
    assert output.statistics.verification_lengths[0] == output.statistics.rounds == 11
    if not do_sample:
        assert torch.equal(output.sequences, target.generate(**prompt, **settings))
