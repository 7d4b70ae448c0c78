"""Caches over several turns: what a drafter's run leaves in a cache is what plain generation leaves there.

Caches are compared layer by layer, in the host's own layout, sliding layers and the padding of rows that ended early
included. A second turn on such a cache must give the text of plain generation again.
"""

import functools
import inspect

import pytest
import torch
from conftest import FAMILIES, PAD, VOCAB, left_padded, make_drafter, make_scripted, make_target, oracle_script
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dspark_hf.host import cache_argument


NEW_TOKENS = 11
PREPARE_CACHE = inspect.getsource(GenerationMixin._prepare_cache_for_generation)
# Hosts before 5.24 make a growing cache without windows when there is an assistant, and warn if another kind was asked for.
HOST_MAKES_THE_SAME_CACHE = "using a dynamic cache instead of a cache of type" not in PREPARE_CACHE
BATCHES = {"one row": (6,), "padded rows": (4, 9)}
batches = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
families = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])


@functools.cache
def make(family: str):
    target = make_target(family)
    target.generation_config.eos_token_id = None
    return target


def drafter_for(target, plain: torch.Tensor, mask: torch.Tensor, kind: str):
    """Return a random drafter, or one that is right at all or at some positions of the target's own output."""
    if kind == "random":
        return make_drafter(target)
    right = oracle_script(plain, mask.sum(dim=1).tolist(), mask.shape[1])
    wrong = 0 if kind == "perfect" else 1
    return make_scripted(target, lambda row, position: (right(row, position) + wrong * (position % 4 == 1)) % VOCAB)


def assert_same_cache(plain, ours, made_by_host: bool = False) -> None:
    """Compare two caches layer by layer. Some hosts make a cache without windows when there is an assistant."""
    assert type(plain) is type(ours)
    assert plain.get_seq_length() == ours.get_seq_length()
    for expected, got in zip(plain.layers, ours.layers, strict=True):
        kept = slice(None)
        if made_by_host and not HOST_MAKES_THE_SAME_CACHE and type(expected) is DynamicSlidingWindowLayer:
            assert type(got) is DynamicLayer
            kept = slice(-expected.keys.shape[2], None)
        else:
            assert type(expected) is type(got)
        assert expected.get_seq_length() == got.get_seq_length()
        torch.testing.assert_close(got.keys[:, :, kept], expected.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.values[:, :, kept], expected.values, rtol=1e-5, atol=1e-5)


def next_turn(output: torch.Tensor, mask: torch.Tensor, seen_padding: bool) -> dict[str, torch.Tensor]:
    """The whole conversation and three new tokens, the padding of rows that ended early masked or not."""
    torch.manual_seed(output.shape[1])
    new = torch.randint(3, VOCAB, (output.shape[0], 3))
    answer = output[:, mask.shape[1] :]
    answer_mask = torch.ones_like(answer) if seen_padding else (answer != PAD).long()
    return {
        "input_ids": torch.cat([output, new], dim=1),
        "attention_mask": torch.cat([mask, answer_mask, torch.ones_like(new)], dim=1),
    }


def check_turns(target, lengths, make_cache, *, turns=2, kind="right now and then", seen_padding=True, **options):
    """Hold a conversation with and without a drafter and compare texts and caches after every turn."""
    inputs = left_padded(list(lengths))
    plain_cache, our_cache = make_cache(), make_cache()
    for _ in range(turns):
        common = {**inputs, "max_new_tokens": NEW_TOKENS, **options}
        plain = target.generate(**common, **{cache_argument(): plain_cache})
        drafter = drafter_for(target, plain, inputs["attention_mask"], kind)
        ours = target.generate(
            **common, **{cache_argument(): our_cache}, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(plain, ours.sequences)
        assert ours[cache_argument()] is our_cache
        assert_same_cache(plain_cache, our_cache)
        if kind == "perfect" and len(lengths) == 1 and "eos_token_id" not in options:
            assert ours.statistics.rounds == 2  # the first token, then two blocks of 4 with a bonus token each
        inputs = next_turn(plain, inputs["attention_mask"], seen_padding)
    return plain


def ending_of(target, lengths, index: int) -> int:
    """A token with which plain generation goes on at `index` in the first row, to end that row there."""
    inputs = left_padded(list(lengths))
    return int(target.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, max(lengths) + index])


@families
@batches
def test_two_turns_on_one_growing_cache(family, lengths):
    target = make(family)
    check_turns(target, lengths, lambda: DynamicCache(config=target.config))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["random", "perfect"])
@batches
def test_three_turns_with_any_drafter(family, kind, lengths):
    target = make(family)
    check_turns(target, lengths, lambda: DynamicCache(config=target.config), turns=3, kind=kind)


@families
@pytest.mark.parametrize("seen_padding", [True, False], ids=["padding seen", "padding masked"])
def test_rows_that_end_early_go_on_as_padding_in_the_cache(family, seen_padding):
    """The first row ends at its second token; in the second turn its padding lies in the middle of its text."""
    target = make(family)
    end = ending_of(target, (4, 9), 1)
    check_turns(
        target,
        (4, 9),
        lambda: DynamicCache(config=target.config),
        seen_padding=seen_padding,
        eos_token_id=end,
    )


@families
def test_rows_that_end_early_go_on_as_padding_token_by_token(family):
    """Scores make the batch advance together, on the other commit path."""
    target = make(family)
    end = ending_of(target, (4, 9), 1)
    inputs = left_padded([4, 9])
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": end, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options, output_scores=True)
    for kind in ("random", "perfect", "right now and then"):
        drafter = drafter_for(target, plain.sequences, inputs["attention_mask"], kind)
        ours = target.generate(**inputs, **options, output_scores=True, assistant_model=drafter)
        assert torch.equal(plain.sequences, ours.sequences)
        assert_same_cache(plain[cache_argument()], ours[cache_argument()], made_by_host=True)


@families
@batches
def test_the_returned_cache_goes_on_where_plain_generation_would(family, lengths):
    """One turn each without a cache passed in, then a plain second turn on either cache."""
    target = make(family)
    inputs = left_padded(list(lengths))
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=make_drafter(target))
    assert_same_cache(plain[cache_argument()], ours[cache_argument()], made_by_host=True)
    more = next_turn(plain.sequences, inputs["attention_mask"], seen_padding=True)
    texts = [
        target.generate(**more, max_new_tokens=5, **{cache_argument(): run[cache_argument()]}) for run in (plain, ours)
    ]
    assert torch.equal(*texts)


@batches
def test_a_growing_cache_that_knows_no_config(lengths):
    check_turns(make("llama"), lengths, DynamicCache)
    check_turns(make("mistral"), lengths, DynamicCache)


@batches
def test_new_tokens_alone_with_the_mask_of_the_whole_text(lengths):
    """Processors then see the new tokens only, as in plain generation."""
    target = make("llama")
    inputs = left_padded(list(lengths))
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    first = target.generate(**inputs, max_new_tokens=5, **{cache_argument(): caches[0]})
    target.generate(**inputs, max_new_tokens=5, assistant_model=make_drafter(target), **{cache_argument(): caches[1]})
    more = next_turn(first, inputs["attention_mask"], seen_padding=True)
    more["input_ids"] = more["input_ids"][:, caches[0].get_seq_length() :]
    options = {**more, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.5}
    plain = target.generate(**options, **{cache_argument(): caches[0]})
    ours = target.generate(**options, **{cache_argument(): caches[1]}, assistant_model=make_drafter(target))
    assert torch.equal(plain, ours)
    assert_same_cache(*caches)


def test_texts_on_a_passed_cache_may_fill_a_learned_position_table():
    """The row that is still going stands at the table's end while the other one's padding is filled in."""
    target = make_target("gpt2", max_position_embeddings=20)
    target.generation_config.eos_token_id = None
    assert target.transformer.wpe.num_embeddings == 20
    for lengths in ((9,), (4, 9), (9, 4)):
        end = ending_of(target, lengths, 1)
        for kind in ("random", "perfect"):
            check_turns(target, lengths, DynamicCache, turns=1, kind=kind, eos_token_id=end)
            check_turns(target, lengths, DynamicCache, turns=1, kind=kind, max_new_tokens=11)


# Static caches


def static_cache(target, size: int):
    return lambda: StaticCache(config=target.config, max_cache_len=size)


@some_families
@batches
def test_two_turns_on_one_static_cache(family, lengths):
    target = make(family)
    check_turns(target, lengths, static_cache(target, 48))


@batches
def test_a_static_cache_needs_no_room_for_drafts(lengths):
    """The buffer ends with the text; plain generation writes all of it but the last token."""
    target = make("llama")
    check_turns(target, lengths, static_cache(target, max(lengths) + NEW_TOKENS - 1), turns=1)


@some_families
def test_rows_that_end_early_go_on_as_padding_in_a_static_cache(family):
    target = make(family)
    end = ending_of(target, (4, 9), 1)
    check_turns(target, (4, 9), static_cache(target, 48), eos_token_id=end)


@some_families
@batches
def test_static_cache_implementation(family, lengths):
    """The text is the same on every host, also on those that put a growing cache in its place."""
    target = make(family)
    inputs = left_padded(list(lengths))
    options = {"max_new_tokens": NEW_TOKENS, "cache_implementation": "static", "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    drafter = drafter_for(target, plain.sequences, inputs["attention_mask"], "right now and then")
    ours = target.generate(**inputs, **options, assistant_model=drafter)
    assert torch.equal(plain.sequences, ours.sequences)
    if HOST_MAKES_THE_SAME_CACHE:
        assert_same_cache(plain[cache_argument()], ours[cache_argument()], made_by_host=True)
