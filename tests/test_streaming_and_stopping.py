"""The user's own code sees what plain generation shows it: streamers, stopping criteria and logits processors.

Recorders note every call with copies of its arguments; with a drafter the list must be the one that plain generation
gives, call by call.
"""

import functools
import time

import pytest
import torch
from conftest import EOS, VOCAB, left_padded, make_drafter, make_scripted, make_target, oracle_script
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer


LENGTHS = (5, 9, 7)
NEW_TOKENS = 14


@functools.cache
def target():
    return make_target("llama", num_hidden_layers=2)


def drafter_for(plain: torch.Tensor, lengths: tuple[int, ...], new_tokens_right=lambda position: position % 4 != 1):
    """Return a drafter that is right at some positions of the target's own output, so that rounds differ in length."""
    right = oracle_script(plain, list(lengths), max(lengths))
    return make_scripted(
        target(),
        lambda row, position: (right(row, position) + (not new_tokens_right(position + row))) % VOCAB,
        num_hidden_layers=1,
    )


class StreamRecorder(BaseStreamer):
    """Notes what it is given."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


class CriteriaRecorder(StoppingCriteria):
    """Notes its calls; ends the rows that end in a token, if one is given."""

    def __init__(self, token: int | None = None):
        self.calls = []
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        scores = None if scores is None else [entry.clone() for entry in scores]
        self.calls.append((input_ids.clone(), scores))
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return done if self.token is None else input_ids[:, -1] == self.token


class ProcessorRecorder(LogitsProcessor):
    """Notes its calls, and favours a token that depends on how often it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        scores = scores.clone()
        scores[:, (7 * len(self.calls)) % VOCAB] += 3.0
        return scores


class RecordingPenalty(RepetitionPenaltyLogitsProcessor):
    """A subclass of a built-in processor, with a memory."""

    def __init__(self):
        super().__init__(penalty=1.5)
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        return super().__call__(input_ids, scores)


def same_calls(plain: list, ours: list) -> None:
    """Compare two lists of calls `(input_ids, scores)`: tokens exactly, scores to 1e-4."""
    assert len(plain) == len(ours)
    for (plain_ids, plain_scores), (our_ids, our_scores) in zip(plain, ours, strict=True):
        assert torch.equal(plain_ids, our_ids)
        torch.testing.assert_close(our_scores, plain_scores, rtol=0, atol=1e-4)


def compare(lengths: tuple[int, ...], options, **common) -> tuple[dict, dict]:
    """Run plain generation and a drafter's, each with fresh `options()`; return the two sets of options."""
    inputs = left_padded(list(lengths))
    common = {"max_new_tokens": NEW_TOKENS} | common
    plain_options, our_options = options(), options()
    plain = target().generate(**inputs, **common, **plain_options)
    drafter = drafter_for(plain, lengths * (plain.shape[0] // len(lengths)))
    output = target().generate(**inputs, **common, **our_options, assistant_model=drafter)
    assert torch.equal(plain, output)
    return plain_options, our_options


batches = pytest.mark.parametrize("lengths", [(6,), LENGTHS], ids=["one row", "padded rows"])


# Streamers


@pytest.mark.parametrize("ends", [EOS, None, [41, 48, 23]], ids=["eos", "no eos", "several eos"])
@pytest.mark.parametrize("processor", [False, True], ids=["block by block", "token by token"])
@batches
def test_streamer_gets_the_prompt_then_one_token_a_put_then_the_end(lengths, ends, processor):
    def options():
        own = {"logits_processor": [ProcessorRecorder()]} if processor else {}
        return {"streamer": StreamRecorder(), **own}

    plain, ours = compare(lengths, options, eos_token_id=ends)
    assert ours["streamer"].events == plain["streamer"].events
    assert ours["streamer"].events[-1] == "end"
    assert all(len(event) == len(lengths) for event in ours["streamer"].events[1:-1])


def test_streamer_with_several_returned_sequences():
    def options():
        return {"streamer": StreamRecorder()}

    plain, ours = compare((6,), options, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=41)
    assert ours["streamer"].events == plain["streamer"].events


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0", eos_token="w2")


def test_text_iterator_streamer_gives_the_same_text():
    def options():
        return {"streamer": TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=5)}

    plain, ours = compare((6,), options)
    assert list(ours["streamer"]) == list(plain["streamer"])


def test_text_streamer_refuses_batches_as_in_plain_generation():
    for extra in ({}, {"assistant_model": make_drafter(target(), num_hidden_layers=1)}):
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            target().generate(
                **left_padded(list(LENGTHS)), max_new_tokens=3, streamer=TextStreamer(tokenizer()), **extra
            )


# Stopping criteria


@pytest.mark.parametrize("ends", [EOS, None], ids=["eos", "no eos"])
@pytest.mark.parametrize("token", [None, 41], ids=["never stops", "stops"])
@batches
def test_criteria_see_what_plain_generation_shows_them(lengths, ends, token):
    def options():
        return {"stopping_criteria": [CriteriaRecorder(token)]}

    plain, ours = compare(lengths, options, eos_token_id=ends)
    same_calls(plain["stopping_criteria"][0].calls, ours["stopping_criteria"][0].calls)


@batches
def test_criteria_see_the_scores_so_far_when_they_are_asked_for(lengths):
    inputs = left_padded(list(lengths))
    options = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = CriteriaRecorder(), CriteriaRecorder()
    output = target().generate(**inputs, **options, stopping_criteria=[plain])
    drafter = drafter_for(output.sequences, lengths)
    target().generate(**inputs, **options, stopping_criteria=[ours], assistant_model=drafter)
    same_calls(plain.calls, ours.calls)
    assert len(ours.calls[-1][1]) == len(ours.calls)


class StopAtLength(MaxLengthCriteria):
    """A subclass of a built-in criterion, which may do anything."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.max_length - 2)


@batches
def test_subclasses_of_built_in_criteria_are_called(lengths):
    plain, _ = compare(lengths, lambda: {"stopping_criteria": [StopAtLength(max_length=max(lengths) + 9)]})
    assert isinstance(plain["stopping_criteria"][0], StopAtLength)


@batches
def test_built_in_criteria_may_be_passed_as_objects(lengths):
    def options():
        return {"stopping_criteria": [MaxLengthCriteria(max(lengths) + 8), EosTokenCriteria(41)]}

    compare(lengths, options, eos_token_id=None)


@batches
def test_time_limit_ends_generation(lengths):
    """Time is up after the first token: both stop there, however long the drafts."""
    inputs = left_padded(list(lengths))
    drafter = make_drafter(target(), num_hidden_layers=1)
    plain = target().generate(**inputs, max_new_tokens=NEW_TOKENS, max_time=0.0)
    output = target().generate(**inputs, max_new_tokens=NEW_TOKENS, max_time=0.0, assistant_model=drafter)
    assert torch.equal(plain, output)
    assert plain.shape[1] == max(lengths) + 1
    compare(lengths, lambda: {"stopping_criteria": [MaxTimeCriteria(1e6, time.time())]})


class Interrupt(StoppingCriteria):
    """Raises at its third call, as a user's cancel button does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_cancelled_call_leaves_nothing_behind():
    inputs = left_padded(list(LENGTHS))
    drafter = make_drafter(target(), num_hidden_layers=1)
    plain = target().generate(**inputs, max_new_tokens=NEW_TOKENS)
    with pytest.raises(KeyboardInterrupt):
        target().generate(
            **inputs, max_new_tokens=NEW_TOKENS, stopping_criteria=[Interrupt()], assistant_model=drafter
        )
    hooks = [h for m in target().modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert hooks == []
    assert torch.equal(target().generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter), plain)
    assert torch.equal(target().generate(**inputs, max_new_tokens=NEW_TOKENS), plain)


# Logits processors


@pytest.mark.parametrize("kind", [ProcessorRecorder, RecordingPenalty])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "top_k=1"])
@batches
def test_processors_with_state_are_called_once_for_each_committed_token(lengths, kind, sampling):
    plain, ours = compare(lengths, lambda: {"logits_processor": [kind()]}, **sampling)
    same_calls(plain["logits_processor"][0].calls, ours["logits_processor"][0].calls)


@batches
def test_prefix_allowed_tokens_fn_knows_the_row(lengths):
    calls = {}

    def allowed_for(run: str):
        def allowed(batch_id, ids):
            calls.setdefault(run, []).append((batch_id, ids.tolist()))
            return [token for token in range(VOCAB) if (token + batch_id + len(ids)) % 3]

        return allowed

    inputs = left_padded(list(lengths))
    plain = target().generate(**inputs, max_new_tokens=NEW_TOKENS, prefix_allowed_tokens_fn=allowed_for("plain"))
    output = target().generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        prefix_allowed_tokens_fn=allowed_for("ours"),
        assistant_model=drafter_for(plain, lengths),
    )
    assert torch.equal(plain, output)
    assert calls["ours"] == calls["plain"]


@batches
def test_drafts_count_where_the_users_code_is_called(lengths):
    """The token by token path still commits what a perfect drafter proposes: fewer target forwards than tokens."""

    def options():
        return {"logits_processor": [ProcessorRecorder()], "max_new_tokens": 11, "eos_token_id": 5}

    inputs = left_padded(list(lengths))
    plain = target().generate(**inputs, **options())
    assert 5 not in plain[:, max(lengths) :]
    perfect = drafter_for(plain, lengths, lambda position: True)
    run = target().generate(**inputs, **options(), assistant_model=perfect, return_dict_in_generate=True)
    assert torch.equal(run.sequences, plain)
    assert run.statistics.target_forwards == 2  # 1 token from prefill, 2 blocks of 4 with a bonus token each


def test_rows_that_end_without_an_end_of_text_token_are_still_drafted_for():
    """Plain generation lets them go on until the batch is done, so a perfect drafter must not wait for them."""
    own = make_target("llama", num_hidden_layers=2)
    own.generation_config.eos_token_id = None
    inputs = left_padded(list(LENGTHS))
    plain = own.generate(**inputs, max_new_tokens=11)
    ended = int(plain[1, max(LENGTHS) + 1])  # the second row ends early
    assert not all(ended in row[max(LENGTHS) :] for row in plain)
    options = {"stopping_criteria": [CriteriaRecorder(ended)], "max_new_tokens": 11}
    perfect = drafter_for(plain, LENGTHS, lambda position: True)
    run = own.generate(**inputs, **options, assistant_model=perfect, return_dict_in_generate=True)
    assert torch.equal(run.sequences, plain)
    assert run.statistics.target_forwards == 2


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@batches
def test_built_in_processors_that_are_not_known_to_be_stateless_keep_the_output(lengths, scheme):
    config = WatermarkingConfig(bias=2.5, seeding_scheme=scheme, context_width=2)
    compare(lengths, lambda: {"watermarking_config": config}, eos_token_id=None)
