"""Weights that drafter and target have in common."""

import gc

import pytest
import torch
from conftest import left_padded, make_drafter, make_target

from dspark_hf.drafting import BorrowedHead, Drafting, _borrow_head, _borrowed, check_lending


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
    assert drafter.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert drafter.lm_head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_sharing_leaves_each_model_free_to_be_cast_and_the_target_safe_from_training():
    target = make_target()
    drafter = owning_drafter(target, same=True)
    before = target.get_input_embeddings().weight.clone()
    target.generate(**left_padded([7]), max_new_tokens=6, assistant_model=drafter)
    optimiser = torch.optim.SGD(drafter.parameters(), lr=1.0, weight_decay=0.1)
    inputs = drafter.embed_tokens(torch.tensor([[3, 4, 5, 6]]))
    positions = torch.arange(4)[None]
    context = drafter.project_context(torch.randn(1, 2, drafter.fc.in_features))
    drafter(inputs, context, positions + 2, positions[:, :2]).last_hidden_state.sum().backward()
    optimiser.step()
    assert torch.equal(target.get_input_embeddings().weight, before)
    drafter.to(torch.bfloat16)
    assert target.get_input_embeddings().weight.dtype == torch.float32
    target.generate(**left_padded([7]), max_new_tokens=6, assistant_model=drafter)
    target.to(torch.bfloat16)
    target.generate(**left_padded([7]), max_new_tokens=6, assistant_model=drafter)


@pytest.mark.parametrize("reason", ["different", "training"])
def test_an_embedding_of_its_own_stays_its_own(reason):
    target = make_target()
    drafter = owning_drafter(target, same=reason == "training").train(reason == "training")
    before = drafter.embed_tokens.weight.data_ptr(), drafter.lm_head.weight.data_ptr()
    target.generate(**left_padded([7]), max_new_tokens=6, assistant_model=drafter)
    assert (drafter.embed_tokens.weight.data_ptr(), drafter.lm_head.weight.data_ptr()) == before


def test_a_reduced_vocabulary_cannot_borrow_from_a_quantised_head():
    target = make_target()
    drafter = make_drafter(target, draft_vocab_size=8)
    target.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(NotImplementedError, match="quantised head"):
        check_lending(drafter, target)


def test_float8_passes_for_no_plain_weight():
    target = make_target()
    target.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 32).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(NotImplementedError, match="quantised head"):
        check_lending(make_drafter(target, draft_vocab_size=8), target)


@pytest.mark.parametrize("bias", [False, True])
def test_borrowed_rows_follow_the_head_in_memory_that_is_kept(bias):
    target = make_target()
    if bias:
        target.lm_head = torch.nn.Linear(target.config.hidden_size, 64)
    drafter = make_drafter(target, draft_vocab_size=8)
    with torch.inference_mode():
        head = _borrow_head(drafter, target)
    memory = head.weight.data_ptr()
    for _ in range(2):
        target.lm_head.weight.data.normal_()
        if bias:
            target.lm_head.bias.data.normal_()
        assert _borrow_head(drafter, target) is head
        assert torch.equal(head.weight, target.lm_head.weight[drafter.kept_token_ids])
        assert not bias or torch.equal(head.bias, target.lm_head.bias[drafter.kept_token_ids])
        assert head.weight.data_ptr() == memory
    target.lm_head.bias = None if bias else torch.nn.Parameter(torch.randn(64))
    assert (_borrow_head(drafter, target).bias is None) == bias
    target.to(torch.bfloat16)
    assert _borrow_head(drafter, target).weight.dtype == torch.bfloat16
    assert _borrow_head(make_drafter(target, draft_vocab_size=8), target) is not head
    assert isinstance(head, BorrowedHead)
    del drafter, target
    gc.collect()
    assert not _borrowed


@pytest.mark.parametrize("kept", [slice(8), torch.arange(8)])
def test_a_head_that_was_made_in_inference_mode_is_lent(kept):
    with torch.inference_mode():
        head = torch.nn.Linear(4, 16)
    rows = BorrowedHead(head, kept)
    rows.take(head, kept)
    with torch.inference_mode():
        assert torch.equal(rows(torch.ones(1, 4)), head(torch.ones(1, 4))[:, :8])


def test_all_but_the_padding_of_a_head_is_lent_without_a_copy():
    target = make_target()
    drafter = make_drafter(target, vocab_size=60, mask_token_id=59)
    lent = Drafting(drafter, target, torch.ones(1, 3, dtype=torch.bool), 0).lm_head
    assert lent.weight.shape == (60, 32)
    assert lent.weight.data_ptr() == target.lm_head.weight.data_ptr()


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
