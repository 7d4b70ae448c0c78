"""`return_dict_in_generate=True` returns what plain generation returns, entry by entry, and the statistics of the run."""

import functools
import math

import pytest
import torch
from conftest import EOS, VOCAB, left_padded, make_drafter, make_scripted, make_target, oracle_script
from transformers import StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspark_hf.host import cache_argument
from dspark_hf.metrics import PHASES


NEW_TOKENS = 12
BLOCK = 4
FAMILIES = ["llama", "gpt2", "gemma3", "qwen3_moe"]
BATCHES = {"one row": (6,), "a row ends early": (4, 9, 7)}
batches = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())


@functools.cache
def make(family: str, attention: str = "eager"):
    target = make_target(family)
    target.set_attn_implementation(attention)
    target.generation_config.eos_token_id = None
    return target


def scripted(target, plain: torch.Tensor, lengths, kind: str):
    """Return a drafter that is always right, always wrong, or right at some positions of the target's output."""
    right = oracle_script(plain, list(lengths), max(lengths))
    wrong = {"perfect": lambda n: 0, "always wrong": lambda n: 1, "right now and then": lambda n: int(n % 4 == 1)}[
        kind
    ]
    return make_scripted(target, lambda row, position: (right(row, position) + wrong(position)) % VOCAB)


def ending_of(target, lengths) -> int:
    """The second token of plain generation's first row, to end that row there."""
    first, second = target.generate(**left_padded(list(lengths)), max_new_tokens=2)[0, -2:].tolist()
    assert first != second
    return second


def both(target, lengths, kind="right now and then", **options):
    """Return the outputs of plain generation and of a drafter's run; in a batch the first row ends early."""
    inputs = left_padded(list(lengths))
    if len(lengths) > 1:
        options["eos_token_id"] = ending_of(target, lengths)
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True} | options
    plain = target.generate(**inputs, **options)
    drafter = scripted(target, plain.sequences, lengths, kind)
    ours = target.generate(**inputs, **options, assistant_model=drafter)
    assert torch.equal(plain.sequences, ours.sequences)
    return plain, ours


def assert_same_entries(plain, ours) -> None:
    """Compare nested tuples of tensors: structure and shapes exactly, values to 1e-4."""
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4)
        return
    assert isinstance(ours, tuple)
    assert len(plain) == len(ours)
    for expected, got in zip(plain, ours, strict=True):
        assert_same_entries(expected, got)


FIELDS = ("scores", "logits", "hidden_states", "attentions")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("family", FAMILIES)
@batches
def test_each_field_is_what_plain_generation_returns(family, field, lengths):
    if field == "attentions" and family == "gemma3":
        assert_attentions_refused(make(family))
        return
    plain, ours = both(make(family), lengths, repetition_penalty=1.3, **{f"output_{field}": True})
    assert len(plain[field]) == plain.sequences.shape[1] - max(lengths)
    assert_same_entries(plain[field], ours[field])
    assert all(getattr(ours, other) is None for other in FIELDS if other != field)


@pytest.mark.parametrize("kind", ["perfect", "always wrong", "right now and then"])
@batches
def test_all_fields_at_once_with_any_drafter(kind, lengths):
    options = {f"output_{field}": True for field in FIELDS}
    plain, ours = both(make("llama"), lengths, kind, **options)
    for field in FIELDS:
        assert_same_entries(plain[field], ours[field])
    if kind == "perfect" and len(lengths) == 1:
        assert ours.statistics.rounds == math.ceil((NEW_TOKENS - 1) / (BLOCK + 1))


@batches
def test_hidden_states_of_a_prompt_that_is_read_in_chunks(lengths):
    plain, ours = both(make("llama"), lengths, prefill_chunk_size=3, output_hidden_states=True, output_scores=True)
    assert_same_entries(plain.hidden_states, ours.hidden_states)
    assert_same_entries(plain.scores, ours.scores)


def assert_attentions_refused(target, **options) -> None:
    forwards = []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    try:
        with pytest.raises(NotImplementedError, match="output_attentions.*without `assistant_model`"):
            target.generate(
                **left_padded([5]),
                max_new_tokens=3,
                return_dict_in_generate=True,
                output_attentions=True,
                assistant_model=make_drafter(target),
                **options,
            )
    finally:
        handle.remove()
    assert forwards == []


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_attentions_of_sliding_targets_are_refused(family):
    assert_attentions_refused(make(family))


def test_attentions_of_a_static_cache_are_refused():
    target = make("llama")
    cache = StaticCache(config=target.config, max_cache_len=16)
    assert_attentions_refused(target, **{cache_argument(): cache})


@batches
def test_the_object_is_the_hosts_output_class(lengths):
    plain, ours = both(make("llama"), lengths)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert set(plain.keys()) | {"statistics"} == set(ours.keys())
    assert ours[0] is ours.sequences


def test_output_flags_without_a_dict_return_the_tokens():
    target = make("llama")
    options = {"max_new_tokens": 5, "output_scores": True, "output_hidden_states": True}
    plain = target.generate(**left_padded([5]), **options)
    ours = target.generate(**left_padded([5]), **options, assistant_model=make_drafter(target))
    assert torch.equal(plain, ours)


# Statistics


@pytest.mark.parametrize("kind", ["perfect", "always wrong", "right now and then"])
@pytest.mark.parametrize("field", ["scores", None], ids=["token by token", "block by block"])
@batches
def test_statistics_account_for_every_token(lengths, field, kind):
    plain, ours = both(make("llama"), lengths, kind, **({f"output_{field}": True} if field else {}))
    statistics = ours.statistics
    new = plain.sequences[:, max(lengths) :]
    end = ending_of(make("llama"), lengths) if len(lengths) > 1 else None
    counts = [row.index(end) + 1 if end in row else len(row) for row in new.tolist()]
    for row, count in enumerate(counts):
        committed = [record.committed for record in statistics.records if record.row == row]
        assert sum(committed) == count - 1  # prefill gave the first one
        assert not committed or statistics.tau_by_row[row] == sum(committed) / len(committed)
    assert statistics.tau == (sum(counts) - len(counts)) / statistics.rounds
    assert sum(statistics.verification_lengths) == statistics.rounds
    assert len(statistics.acceptance_by_position) == BLOCK
    if kind == "always wrong":
        assert statistics.tau == 1.0
        assert statistics.acceptance_by_position == [0.0] * BLOCK
    if kind == "perfect":
        assert all(share in (1.0,) or math.isnan(share) for share in statistics.conditional_acceptance_by_position)


def test_statistics_give_the_time_of_every_phase():
    _, ours = both(make("llama"), (6,))
    assert set(ours.statistics.seconds) == set(PHASES)
    assert all(seconds > 0 for seconds in ours.statistics.seconds.values())
    assert "accepted length" in ours.statistics.summary()


def test_a_text_that_ends_in_prefill_has_no_rounds():
    target = make("llama")
    first = int(target.generate(**left_padded([6]), max_new_tokens=1)[0, -1])
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 9, "eos_token_id": [EOS, first]}):
        run = target.generate(
            **left_padded([6]), **options, assistant_model=make_drafter(target), return_dict_in_generate=True
        )
        assert run.sequences.shape[1] == 7
        assert run.statistics.rounds == run.statistics.target_forwards == 0
        assert math.isnan(run.statistics.tau)
