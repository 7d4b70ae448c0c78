"""Whatever a drafter proposes, greedy output is what the target's own `generate` gives, in float32.

Every drafter meets every policy, logits processor and stop condition on a small Llama, and every family on a core set.
What the drafter does change is counted: a perfect drafter must need no more rounds than its block allows, one that is
always wrong must commit one token a round.
"""

import functools
import math

import pytest
import torch
from conftest import (
    EOS,
    FAMILIES,
    PAD,
    VOCAB,
    left_padded,
    make_drafter,
    make_scripted,
    make_target,
    oracle_script,
    shared_target,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from dspark_hf.modeling.modeling_dspark import DSparkDraftModel


BLOCK = 4
LENGTHS = {"one row": (6,), "padded rows": (5, 9, 7)}
NEW_TOKENS = 11
CONSTANT = 17


@functools.cache
def family_target(family: str):
    return make_target(family)


def scripted(script):
    return lambda target: make_scripted(target, script, num_hidden_layers=1)


def extreme_drafter(target) -> DSparkDraftModel:
    """Return a drafter whose own head is scaled so far that its distributions are one-hot or nearly flat at 1e5."""
    drafter = make_drafter(target, num_hidden_layers=1, has_lm_head=True)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(1e4)
    return drafter


def reduced_drafter(target) -> DSparkDraftModel:
    """Return a drafter that can propose 24 of the 64 tokens only."""
    drafter = make_drafter(target, num_hidden_layers=1, draft_vocab_size=24)
    drafter.d2t.copy_(torch.arange(24))  # draft id i is target id 2 * i
    return drafter


DRAFTERS = {
    "random": lambda target: make_drafter(target, num_hidden_layers=1),
    "constant": scripted(lambda row, position: CONSTANT),
    "eos": scripted(lambda row, position: EOS),
    "pad": scripted(lambda row, position: PAD),
    "extreme weights": extreme_drafter,
    "reduced vocabulary": reduced_drafter,
}
ORACLES = ("perfect", "always wrong", "right now and then")


def build_drafter(name: str, target, plain: torch.Tensor, lengths: tuple[int, ...]) -> DSparkDraftModel:
    """Build a drafter by name; those in `ORACLES` know the output of the target."""
    if name in DRAFTERS:
        return DRAFTERS[name](target)
    right = oracle_script(plain, list(lengths), max(lengths))

    def now_and_then(row: int, position: int) -> int:
        return (right(row, position) + (position * position + row) % 5 // 4) % VOCAB

    scripts = {
        "perfect": right,
        "always wrong": lambda row, position: (right(row, position) + 1) % VOCAB,
        "right now and then": now_and_then,
    }
    return scripted(scripts[name])(target)


def committed_lengths(plain: torch.Tensor, prompt_columns: int, ends: tuple[int, ...]) -> list[int]:
    """New tokens of each row up to its end, padding excluded."""
    lengths = []
    for row in plain[:, prompt_columns:].tolist():
        stops = [index + 1 for index, token in enumerate(row) if token in ends]
        lengths.append(min(stops, default=len(row)))
    return lengths


def perfect_rounds(new_tokens: list[int], block: int = BLOCK) -> int:
    """Rounds that a perfect drafter needs: the first token comes from prefill, then a block and the bonus token each."""
    return sum(math.ceil((count - 1) / (block + 1)) for count in new_tokens)


_plain_outputs: dict[str, torch.Tensor] = {}


def plain_output(target, inputs: dict, options: dict) -> torch.Tensor:
    """Return what plain generation gives; run once for all drafters."""
    key = f"{id(target)} {inputs['input_ids'].tolist()} {options}"
    if key not in _plain_outputs:
        _plain_outputs[key] = target.generate(**inputs, **options)
    return _plain_outputs[key]


def check_equal(
    target, name: str, lengths: tuple[int, ...], options: dict, ends: tuple[int, ...] = (), seed: int = 3, **policy
):
    """Compare a drafter's run with plain generation, tokens and number of rounds; return both outputs."""
    inputs = left_padded(list(lengths), seed)
    plain = plain_output(target, inputs, options)
    drafter = build_drafter(name, target, plain, lengths)
    drafter.generation_config.update(**policy)
    if name in ORACLES:
        run = target.generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)
        output, statistics = run.sequences, run.statistics
    else:
        output, statistics = target.generate(**inputs, **options, assistant_model=drafter), None
    assert torch.equal(plain, output), f"plain {plain.tolist()}\n with drafter {output.tolist()}"
    counts = committed_lengths(plain, inputs["input_ids"].shape[1], ends)
    if name == "perfect" and policy.get("num_assistant_tokens_schedule", "constant") == "constant":
        assert statistics.rounds == perfect_rounds(counts, policy.get("num_assistant_tokens", BLOCK))
    if name == "always wrong":
        assert statistics.rounds == sum(counts) - len(counts)
        assert statistics.rounds == 0 or statistics.tau == 1.0
    return plain, statistics


all_drafters = pytest.mark.parametrize("name", [*DRAFTERS, *ORACLES])
all_batches = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())


def drafters_and_batches(batches: dict[str, tuple[int, ...]]):
    """Parametrise over all drafters with the padded batch, and over those that tell most with a single row."""
    pairs = [
        pytest.param(name, lengths, id=f"{name}, {batch}")
        for batch, lengths in batches.items()
        for name in (*DRAFTERS, *ORACLES)
        if len(lengths) > 1 or name in ("random", *ORACLES)
    ]
    return pytest.mark.parametrize(("name", "lengths"), pairs)


# Policies

POLICIES = {
    "one token": {"num_assistant_tokens": 1},
    "three tokens": {"num_assistant_tokens": 3},
    "threshold 0.5": {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 0.5},
    "threshold 0": {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 0.0},
    "threshold 1": {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 1.0},
    "throughput": {"num_assistant_tokens_schedule": "throughput"},
    "throughput_async": {"num_assistant_tokens_schedule": "throughput_async", "num_assistant_tokens": 3},
}


@drafters_and_batches(LENGTHS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_no_policy_changes_the_output(name, policy, lengths):
    check_equal(shared_target(), name, lengths, {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS}, (EOS,), **policy)


def test_thresholds_decide_how_much_is_verified():
    options = {"max_new_tokens": 31}

    def rounds(threshold: float) -> int:
        policy = {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": threshold}
        return check_equal(shared_target(), "perfect", (6,), options, **policy)[1].rounds

    assert rounds(0.0) == perfect_rounds([31])
    assert rounds(1.0) == 31 - 1
    assert rounds(0.0) < rounds(0.5) < rounds(1.0)


@all_drafters
def test_block_size_does_not_change_the_output(name):
    inputs = left_padded([5, 9, 7])
    plain = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS)
    for block_size in (1, 7):
        drafter = build_drafter(name, shared_target(), plain, (5, 9, 7))
        sized = make_drafter(shared_target(), num_hidden_layers=1, block_size=block_size)
        sized.__class__ = type(drafter)
        sized.script = getattr(drafter, "script", None)
        assert torch.equal(shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=sized), plain)


# Logits processors

PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "bad_words_ids": {"bad_words_ids": [[41], [47], [23, 50], [11]]},
    "min_length": {"min_length": 14, "eos_token_id": [EOS, 41, 23, 48]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [EOS, 41, 23, 48]},
    "sequence_bias": {"sequence_bias": [[[41], -9.0], [[47, 21], 12.0], [[5], 3.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 2.0), "eos_token_id": EOS},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [41, 47, 21, 11]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [41, 45, 55]},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "top_k=1": {"do_sample": True, "top_k": 1, "temperature": 0.7},
    "all at once": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "suppress_tokens": [41],
        "sequence_bias": [[[47, 21], 2.0]],
        "bad_words_ids": [[23, 50]],
        "do_sample": True,
        "top_k": 1,
        "eos_token_id": [EOS, 45, 48],
    },
}


def as_tuple(ends) -> tuple[int, ...]:
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


@drafters_and_batches(LENGTHS)
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_no_drafter_changes_the_output_of_processors(name, options, lengths):
    ends = as_tuple(options.get("eos_token_id"))
    check_equal(shared_target(), name, lengths, {"max_new_tokens": NEW_TOKENS} | options, ends)


@pytest.mark.parametrize("setting", [name for name in PROCESSORS if name not in ("remove_invalid_values", "top_k=1")])
def test_the_processors_of_these_tests_change_the_text(setting):
    inputs = left_padded([5, 9, 7])
    options = {"max_new_tokens": NEW_TOKENS} | PROCESSORS[setting]
    without = {"max_new_tokens": NEW_TOKENS, "eos_token_id": options.get("eos_token_id")}
    assert not torch.equal(
        shared_target().generate(**inputs, **options), shared_target().generate(**inputs, **without)
    )


@all_drafters
@pytest.mark.parametrize("rows", [1, 3])
def test_no_drafter_changes_a_forced_first_token(name, rows):
    """`forced_bos_token_id` acts on the second token of a text, so these prompts have one."""
    options = {"max_new_tokens": NEW_TOKENS, "forced_bos_token_id": 33}
    plain, _ = check_equal(shared_target(), name, (1,) * rows, options)
    assert plain[:, 1].tolist() == [33] * rows


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_repetition_penalty_may_leave_the_prompt_out():
    """The penalty then keeps a number for each row, which must follow the row through a ragged batch."""
    embeds = shared_target().get_input_embeddings()(left_padded([5, 9, 7])["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": left_padded([5, 9, 7])["attention_mask"]}
    options = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.7, "eos_token_id": [41, 48]}
    plain = shared_target().generate(**inputs, **options)
    drafter = scripted(
        lambda row, position: int(plain[row, min(max(position - (5, 9, 7)[row], 0), plain.shape[1] - 1)])
    )
    run = shared_target().generate(
        **inputs, **options, assistant_model=drafter(shared_target()), return_dict_in_generate=True
    )
    assert torch.equal(run.sequences, plain)
    assert run.statistics.rounds == perfect_rounds(committed_lengths(plain, 0, (41, 48)))


def test_a_drafter_whose_whole_vocabulary_is_suppressed_keeps_the_output():
    for sampling in ({}, {"do_sample": True, "top_k": 1}):
        options = {"max_new_tokens": NEW_TOKENS, "suppress_tokens": list(range(0, 48, 2)), **sampling}
        for lengths in LENGTHS.values():
            check_equal(shared_target(), "reduced vocabulary", lengths, options)


# Stop conditions


@drafters_and_batches(LENGTHS)
def test_every_remainder_of_max_new_tokens(name, lengths):
    for new_tokens in (*range(1, BLOCK + 4), 2 * BLOCK + 3):
        plain, _ = check_equal(shared_target(), name, lengths, {"max_new_tokens": new_tokens})
        assert plain.shape[1] == max(lengths) + new_tokens


SLOTS = range(BLOCK + 3)
SHORT = BLOCK + 4


SEED = 6  # of prompts whose text goes on with different tokens, so that each of them can end it
ROWS = {"one row": (11,), "padded rows": (11, 5, 8)}


@functools.cache
def text_of_first_row() -> list[int]:
    """Return the first tokens that plain generation gives the first row of the prompts of `SEED`."""
    text = shared_target().generate(**left_padded([11], SEED), max_new_tokens=len(SLOTS))[0, 11:].tolist()
    assert len(set(text)) == len(SLOTS)
    return text


@drafters_and_batches(ROWS)
@pytest.mark.parametrize("slot", SLOTS)
def test_end_of_text_at_each_slot_of_a_block(name, slot, lengths):
    end = text_of_first_row()[slot]
    options = {"max_new_tokens": SHORT, "eos_token_id": end}
    plain, _ = check_equal(shared_target(), name, lengths, options, (end,), SEED)
    assert committed_lengths(plain, 11, (end,))[0] == slot + 1


@drafters_and_batches(ROWS)
def test_lists_of_end_of_text_tokens(name, lengths):
    text = text_of_first_row()
    ends = (text[5], 63, text[3])
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": list(ends)}
    plain, _ = check_equal(shared_target(), name, lengths, options, ends, SEED)
    assert committed_lengths(plain, 11, ends)[0] == 4


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are the six letters that transformers probes with, and pairs such as `Q7`."""
    words = ["<pad>", "<bos>", "<eos>", *"abcdef"]
    words += [f"{chr(65 + index % 26)}{index % 10}" for index in range(len(words), VOCAB)]
    model = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


@drafters_and_batches(ROWS)
@pytest.mark.parametrize("slot", SLOTS)
def test_stop_strings_completed_at_each_slot_of_a_block(name, slot, lengths):
    """The string spans two tokens and begins and ends inside them; with an end-of-text token rows are on their own."""
    words = tokenizer().convert_ids_to_tokens(text_of_first_row())
    stop = words[slot] if slot == 0 else words[slot - 1][1:] + words[slot][:1]
    options = {"stop_strings": [stop, "nowhere"], "eos_token_id": EOS, "max_new_tokens": SHORT}
    options["tokenizer"] = tokenizer()
    inputs = left_padded(list(lengths), SEED)
    plain = plain_output(shared_target(), inputs, options)
    drafter = build_drafter(name, shared_target(), plain, lengths)
    run = shared_target().generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(run.sequences, plain)
    first_row = [record.committed for record in run.statistics.records if record.row == 0]
    assert sum(first_row) == slot
    if name == "perfect":
        assert len(first_row) == perfect_rounds([slot + 1])


@all_drafters
def test_stop_strings_without_an_end_of_text_token_end_the_batch_together(name):
    """Plain generation then lets rows that are done go on until the last one is."""
    stop = tokenizer().convert_ids_to_tokens(text_of_first_row()[3])
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": [stop], "tokenizer": tokenizer()}
    inputs = left_padded(list(ROWS["padded rows"]), SEED)
    plain = plain_output(shared_target(), inputs, options)
    assert plain.shape[1] > 11 + 4
    assert int((plain[0, 11:] == PAD).sum()) == 0
    drafter = build_drafter(name, shared_target(), plain, ROWS["padded rows"])
    assert torch.equal(shared_target().generate(**inputs, **options, assistant_model=drafter), plain)


class StopAfterToken(StoppingCriteria):
    """Ends each row that ends in a token."""

    def __init__(self, token: int):
        self.token = token

    def __repr__(self):
        return f"StopAfterToken({self.token})"

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@drafters_and_batches(ROWS)
@pytest.mark.parametrize("ends", [None, EOS], ids=["without eos", "with eos"])
def test_custom_criteria_at_each_slot_of_a_block(name, ends, lengths):
    for slot in (0, 1, BLOCK, BLOCK + 1, BLOCK + 2):  # prefill, first and last draft token, bonus token, next round
        token = text_of_first_row()[slot]
        options = {"stopping_criteria": [StopAfterToken(token)], "eos_token_id": ends, "max_new_tokens": SHORT}
        inputs = left_padded(list(lengths), SEED)
        plain = plain_output(shared_target(), inputs, options)
        drafter = build_drafter(name, shared_target(), plain, lengths)
        output = shared_target().generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(output, plain)
        assert len(lengths) > 1 or plain.shape[1] == 11 + slot + 1


@all_drafters
def test_several_returned_sequences(name):
    inputs = left_padded([5, 9])
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": NEW_TOKENS}
    plain = shared_target().generate(**inputs, **options, eos_token_id=48)
    drafter = build_drafter(name, shared_target(), plain, (5, 5, 9, 9))
    assert torch.equal(shared_target().generate(**inputs, **options, eos_token_id=48, assistant_model=drafter), plain)
    assert plain.shape[0] == 4


# Families


@drafters_and_batches(LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_output(name, family, lengths):
    """The texts grow past the sliding windows of 8."""
    check_equal(family_target(family), name, lengths, {"max_new_tokens": 13, "eos_token_id": EOS}, (EOS,))


@pytest.mark.parametrize("name", ["random", "right now and then"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("length", [7, 8, 9, 20])
def test_prompts_around_the_sliding_window(name, family, length):
    target = family_target(family)
    check_equal(target, name, (length, 3), {"max_new_tokens": 12, "eos_token_id": 63}, (63,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["random", "right now and then"])
def test_every_family_keeps_its_output_token_by_token(name, family):
    """Custom criteria make the batch advance together, on the other commit path."""
    options = {"max_new_tokens": 16, "stopping_criteria": [StopAfterToken(63)], "eos_token_id": EOS}
    inputs = left_padded([5, 9, 7])
    plain = family_target(family).generate(**inputs, **options)
    drafter = build_drafter(name, family_target(family), plain, (5, 9, 7))
    assert torch.equal(family_target(family).generate(**inputs, **options, assistant_model=drafter), plain)


def test_text_may_fill_a_learned_position_table():
    target = make_target("gpt2", n_positions=24)
    target.generation_config.eos_token_id = None
    for lengths in ((11,), (5, 11, 7)):
        ends = int(target.generate(**left_padded(list(lengths)), max_new_tokens=4)[0, -1])
        for name in ("random", "perfect", "always wrong"):
            check_equal(target, name, lengths, {"max_new_tokens": 13, "eos_token_id": ends}, (ends,))


DRAFTER_SHAPES = {
    "gated head": {"markov_head_type": "gated"},
    "rnn head": {"markov_head_type": "rnn"},
    "no sequential head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no confidence head": {"enable_confidence_head": False},
    "anchor slot predicts nothing": {"first_prediction_slot": 1},
    "embedding tap": {"target_layer_ids": [-1, 0]},
    "sliding layers": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "causal block": {"causal_layer_types": ["full_attention"]},
    "another width": {"hidden_size": 16, "head_dim": 4, "has_embedding": True, "has_lm_head": True},
    "block of one": {"block_size": 1},
}


@pytest.mark.parametrize("shape", DRAFTER_SHAPES.values(), ids=DRAFTER_SHAPES.keys())
@all_batches
def test_every_shape_of_drafter_keeps_the_output(shape, lengths):
    inputs = left_padded(list(lengths))
    drafter = make_drafter(shared_target(), **shape)
    plain = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, eos_token_id=EOS)
    output = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, assistant_model=drafter)
    assert torch.equal(output, plain)
