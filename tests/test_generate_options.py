"""`generate()` stays `generate()`: its arguments mean what they mean without a drafter, and what cannot work says so.

Refusals come before the first target forward and name the way out. The switch itself is covered too: `enable`,
`disable`, `attach`, `detach`, and other assistants, which still run the host's own loop.
"""

import functools
import inspect
import logging

import pytest
import torch
import transformers
from conftest import (
    EOS,
    PAD,
    VOCAB,
    left_padded,
    make_drafter,
    make_scripted,
    make_target,
    oracle_script,
    shared_target,
)
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import QuantizedLayer

import dspark_hf
from dspark_hf.decoding import Decoding
from dspark_hf.host import cache_argument
from dspark_hf.outputs import DSparkGenerateOutput


NEW_TOKENS = 10
BATCHES = {"one row": (6,), "padded rows": (5, 9, 7)}
batches = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())


@pytest.fixture
def target():
    """A target of the test's own."""
    target = make_target("llama", num_hidden_layers=2)
    target.generation_config.eos_token_id = None
    return target


def drafter_of(target, **overrides):
    return make_drafter(target, num_hidden_layers=1, **overrides)


def check_same(target, inputs: dict, **options) -> torch.Tensor:
    """Compare plain generation with a random drafter's run; return the text."""
    plain = target.generate(**inputs, **options)
    output = target.generate(**inputs, **options, assistant_model=drafter_of(target))
    assert torch.equal(plain, output)
    return plain


def scripted_by(target, plain: torch.Tensor, wrong_at=lambda position: False):
    """Return a drafter that knows the output of one unpadded row."""
    right = oracle_script(plain, [plain.shape[1]] * len(plain), plain.shape[1])
    script = lambda row, position: (right(row, position) + wrong_at(position)) % VOCAB  # noqa: E731
    return make_scripted(target, script, num_hidden_layers=1)


# Inputs


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`", "ignore:Passing `no_repeat_ngram_size`")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@batches
def test_prompts_as_embeddings(family, lengths):
    target = make_target(family)
    inputs = left_padded(list(lengths))
    embeds = {
        "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    text = check_same(target, embeds, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert text.shape[1] <= NEW_TOKENS
    check_same(target, embeds, max_new_tokens=NEW_TOKENS, repetition_penalty=1.2, no_repeat_ngram_size=2)
    check_same(target, {**embeds, "input_ids": inputs["input_ids"]}, max_new_tokens=NEW_TOKENS)


def test_prompts_as_embeddings_without_a_mask():
    embeds = shared_target().get_input_embeddings()(left_padded([6])["input_ids"])
    check_same(shared_target(), {"inputs_embeds": embeds}, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@batches
def test_prompts_read_in_chunks(chunk, lengths):
    inputs = left_padded(list(lengths))
    forwards = []
    handle = shared_target().register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        plain = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, prefill_chunk_size=chunk)
        by_plain, forwards[:] = list(forwards), []
        output = shared_target().generate(
            **inputs, max_new_tokens=NEW_TOKENS, prefill_chunk_size=chunk, assistant_model=drafter_of(shared_target())
        )
    finally:
        handle.remove()
    assert torch.equal(plain, output)
    chunks = -(-max(lengths) // chunk)
    assert forwards[:chunks] == by_plain[:chunks]


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_prompts_read_in_chunks_past_a_sliding_window(family):
    target = make_target(family)
    for lengths in ((21,), (21, 7)):
        check_same(target, left_padded(list(lengths)), max_new_tokens=NEW_TOKENS, prefill_chunk_size=4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_of_the_users_own(family):
    """Positions that begin at 7 and leave a gap: the answer goes on after the last one."""
    target = make_target(family)
    inputs = left_padded([6])
    positions = torch.tensor([[7, 8, 9, 20, 21, 22]])
    text = check_same(target, {**inputs, "position_ids": positions}, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    if family == "gpt2":
        assert not torch.equal(text, target.generate(**inputs, max_new_tokens=NEW_TOKENS, eos_token_id=None))


def test_a_call_without_a_prompt_starts_from_the_bos_token():
    check_same(shared_target(), {}, max_new_tokens=NEW_TOKENS)


def test_prompts_without_a_mask_get_the_hosts():
    check_same(shared_target(), {"inputs": left_padded([6])["input_ids"]}, max_new_tokens=NEW_TOKENS)
    check_same(shared_target(), {"input_ids": left_padded([5, 9])["input_ids"]}, max_new_tokens=NEW_TOKENS)


# Length and special tokens


@batches
def test_max_length_counts_the_prompt(lengths):
    text = check_same(shared_target(), left_padded(list(lengths)), max_length=14)
    assert text.shape[1] == 14


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@batches
def test_the_default_length_is_the_hosts(lengths):
    text = check_same(shared_target(), left_padded(list(lengths)))
    assert text.shape[1] in (20, max(lengths) + 20)


@batches
def test_a_generation_config_object(lengths):
    config = GenerationConfig(
        max_new_tokens=8, repetition_penalty=1.4, pad_token_id=PAD, eos_token_id=[EOS, 41], min_new_tokens=2
    )
    check_same(shared_target(), left_padded(list(lengths)), generation_config=config)


@batches
def test_the_targets_own_defaults(target, lengths):
    target.generation_config.update(max_new_tokens=7, repetition_penalty=1.4, eos_token_id=48, pad_token_id=63)
    text = check_same(target, left_padded(list(lengths)))
    assert text.shape[1] <= max(lengths) + 7


@pytest.mark.parametrize("pad", [None, EOS, 63])
@batches
def test_any_pad_token_fills_rows_that_end_early(target, pad, lengths):
    """Without one the host takes the end-of-text token."""
    target.generation_config.pad_token_id = pad
    inputs = left_padded(list(lengths))
    end = int(target.generate(**inputs, max_new_tokens=2, pad_token_id=PAD)[0, -1])
    text = check_same(target, inputs, max_new_tokens=NEW_TOKENS, eos_token_id=end)
    if len(lengths) > 1:
        assert int(text[0, -1]) == (end if pad is None else pad)


@pytest.mark.parametrize("number", [2, 3])
def test_several_sequences_for_each_prompt(number):
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": number, "max_new_tokens": NEW_TOKENS}
    for lengths in BATCHES.values():
        text = check_same(shared_target(), left_padded(list(lengths)), **options)
        assert text.shape[0] == number * len(lengths)


def test_synced_gpus_may_be_switched_off():
    check_same(shared_target(), left_padded([6]), max_new_tokens=NEW_TOKENS, synced_gpus=False)


# Randomness


@batches
def test_one_seed_gives_one_sampled_text(lengths):
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5, "top_k": 0}
    inputs, drafter = left_padded(list(lengths)), drafter_of(shared_target())

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return shared_target().generate(**inputs, **options, assistant_model=drafter)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


@pytest.mark.parametrize("options", [{}, {"return_dict_in_generate": True, "output_scores": True}])
@batches
def test_greedy_decoding_leaves_the_random_state_alone(options, lengths):
    inputs, drafter = left_padded(list(lengths)), drafter_of(shared_target())
    before = torch.get_rng_state()
    shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_leaves_target_and_drafter_as_they_were(target):
    drafter = drafter_of(target)
    own, theirs = target.generation_config.to_dict(), drafter.generation_config.to_dict()
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    inputs = left_padded([5, 9])
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter, do_sample=True)
    assert target.generation_config.to_dict() == own
    assert drafter.generation_config.to_dict() == theirs
    assert drafter.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert [m for m in target.modules() if m._forward_hooks or m._forward_pre_hooks] == []


# Options of drafting


@pytest.mark.parametrize("where", ["call", "drafter"])
def test_the_draft_length_may_come_with_the_call_or_with_the_drafter(where):
    inputs = left_padded([6])
    plain = shared_target().generate(**inputs, max_new_tokens=11)
    drafter = scripted_by(shared_target(), plain)
    options = {"num_assistant_tokens": 1}
    if where == "drafter":
        drafter.generation_config.update(**options)
        options = {}
    run = shared_target().generate(
        **inputs, max_new_tokens=11, assistant_model=drafter, return_dict_in_generate=True, **options
    )
    assert torch.equal(run.sequences, plain)
    assert run.statistics.rounds == 5  # 10 tokens after prefill's, a draft token and a bonus token each


@pytest.mark.parametrize("where", ["call", "drafter"])
def test_the_threshold_may_come_with_the_call_or_with_the_drafter(where):
    inputs = left_padded([6])
    plain = shared_target().generate(**inputs, max_new_tokens=11)
    drafter = scripted_by(shared_target(), plain)
    options = {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 1.0}
    if where == "drafter":
        drafter.generation_config.update(**options)
        options = {}
    run = shared_target().generate(
        **inputs, max_new_tokens=11, assistant_model=drafter, return_dict_in_generate=True, **options
    )
    assert torch.equal(run.sequences, plain)
    assert run.statistics.rounds == 10


def test_more_draft_tokens_than_the_block_has_are_the_block():
    inputs = left_padded([6])
    plain = shared_target().generate(**inputs, max_new_tokens=11)
    drafter = scripted_by(shared_target(), plain)
    run = shared_target().generate(
        **inputs, max_new_tokens=11, num_assistant_tokens=50, assistant_model=drafter, return_dict_in_generate=True
    )
    assert run.statistics.rounds == 2


# What cannot work


def assert_refused(target, error, match: str, *, drafter=None, inputs=None, **options) -> None:
    """Check that a call raises before the target's first forward."""
    forwards = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))
    drafter = drafter_of(target) if drafter is None else drafter
    inputs = left_padded([5, 9]) if inputs is None else inputs
    try:
        with pytest.raises(error, match=match):
            target.generate(**inputs, max_new_tokens=4, assistant_model=drafter, **options)
    finally:
        handle.remove()
    assert forwards == []


def known_to_host(name: str) -> bool:
    return hasattr(GenerationConfig(), name)


INSTEAD = "without `assistant_model`"
REFUSED_OPTIONS = {
    "num_beams": (2, "use num_beams=1"),
    "guidance_scale": (1.5, INSTEAD),
    "assistant_ensemble_weight": (0.5, INSTEAD),
    "use_mtp": (True, INSTEAD),
    "speculation_type": ("dflash", INSTEAD),
    "prompt_lookup_num_tokens": (3, INSTEAD),
    "assistant_early_exit": (1, INSTEAD),
    "dola_layers": ("low", INSTEAD),
    "use_cache": (False, "leave use_cache out"),
}


@pytest.mark.parametrize("name", [name for name in REFUSED_OPTIONS if known_to_host(name)])
def test_options_that_cannot_work_are_refused_by_name(name):
    value, instead = REFUSED_OPTIONS[name]
    assert_refused(shared_target(), NotImplementedError, f"{name}=.*{instead}", **{name: value})


def test_contrastive_search_is_refused():
    """The host refuses first where the method lives in a repository of its own."""
    assert_refused(shared_target(), (NotImplementedError, ValueError), "(?i)contrastive", penalty_alpha=0.6, top_k=4)


def test_a_tokenizer_for_the_drafter_is_refused():
    assert_refused(
        shared_target(), ValueError, "leave out `assistant_tokenizer`", tokenizer="a", assistant_tokenizer="b"
    )


class NotReallyQuantized(QuantizedLayer):
    """A quantised layer that needs no quantisation library."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantized_cache(target) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    cache.layers = [NotReallyQuantized() for _ in cache.layers]
    return cache


def offloaded_cache(target) -> DynamicCache:
    return DynamicCache(config=target.config, offloading=True)


@pytest.mark.parametrize("make_cache", [quantized_cache, offloaded_cache])
def test_caches_that_cannot_be_rolled_back_are_refused(make_cache):
    cache = make_cache(shared_target())
    assert_refused(
        shared_target(), NotImplementedError, f"Use the default cache.*{INSTEAD}", **{cache_argument(): cache}
    )


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_cache_implementations_are_refused(kind):
    """Hosts before 5.24 put a growing cache in their place and warn."""
    source = inspect.getsource(GenerationMixin._prepare_cache_for_generation)
    if "using a dynamic cache instead of a cache of type" in source:
        check_same(shared_target(), left_padded([5, 9]), max_new_tokens=NEW_TOKENS)
        return
    assert_refused(
        shared_target(), NotImplementedError, f"Use the default cache.*{INSTEAD}", cache_implementation=kind
    )


REFUSED_POLICIES = {
    "unknown schedule": (
        {"num_assistant_tokens_schedule": "heuristic"},
        "knows 'constant', 'threshold', 'throughput'",
    ),
    "threshold above 1": (
        {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 1.5},
        r"must lie in \[0, 1\], got 1.5",
    ),
    "threshold below 0": (
        {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": -0.1},
        r"must lie in \[0, 1\], got -0.1",
    ),
    "threshold that is no number": (
        {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": float("nan")},
        r"must lie in \[0, 1\], got nan",
    ),
    "threshold with constant": (
        {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.5},
        "Set the schedule, or the threshold to None",
    ),
    "threshold alone": ({"assistant_confidence_threshold": 0.5}, "Set the schedule, or the threshold to None"),
    "no draft tokens": ({"num_assistant_tokens": 0}, "positive integer or None"),
    "negative draft tokens": ({"num_assistant_tokens": -3}, "positive integer or None"),
    "true draft tokens": ({"num_assistant_tokens": True}, "positive integer or None"),
    "half draft tokens": ({"num_assistant_tokens": 2.5}, "positive integer or None"),
}


@pytest.mark.parametrize("where", ["call", "drafter"])
@pytest.mark.parametrize(("options", "match"), REFUSED_POLICIES.values(), ids=REFUSED_POLICIES.keys())
def test_impossible_policies_are_refused(options, match, where):
    drafter = drafter_of(shared_target())
    if where == "drafter":
        for name, value in options.items():
            setattr(drafter.generation_config, name, value)
        options = {}
    assert_refused(shared_target(), ValueError, match, drafter=drafter, **options)


def test_a_call_that_chooses_the_threshold_schedule_chooses_the_hosts_default_threshold_too():
    target = shared_target()
    runs = []
    for given in ({"assistant_confidence_threshold": 0.4}, {}, {"assistant_confidence_threshold": 0.400001}):
        drafter = drafter_of(target)
        runs.append(
            target.generate(
                **left_padded([6]),
                max_new_tokens=24,
                eos_token_id=None,
                assistant_model=drafter,
                num_assistant_tokens_schedule="threshold",
                return_dict_in_generate=True,
                **given,
            ).statistics.verification_lengths
        )
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][-1] < sum(runs[0]), "some rounds must verify less than the whole block, or this test shows nothing"


def test_a_threshold_needs_a_confidence_head():
    drafter = drafter_of(shared_target(), enable_confidence_head=False)
    options = {"num_assistant_tokens_schedule": "threshold", "assistant_confidence_threshold": 0.5}
    assert_refused(shared_target(), ValueError, "confidence head.*Use 'constant'", drafter=drafter, **options)


# Bad input


@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "mask of the host"])
def test_right_padding_is_refused(with_mask):
    inputs = {name: tensor.flip(1) for name, tensor in left_padded([5, 9]).items()}
    if not with_mask:
        del inputs["attention_mask"]
    assert_refused(shared_target(), ValueError, "padding_side='left'", inputs=inputs)


def test_an_empty_batch_is_refused():
    inputs = {name: tensor[:0] for name, tensor in left_padded([5, 9]).items()}
    assert_refused(shared_target(), ValueError, "at least one prompt", inputs=inputs)


MISMATCHES = {
    "width": ({"hidden_size": 48, "head_dim": 12}, r"hidden size 48 \(the target has 32\)"),
    "depth": ({"num_hidden_layers": 3}, r"number of layers 3 \(the target has 2\)"),
    "vocabulary": ({"vocab_size": 70}, r"vocabulary size 70 \(the target has 64\)"),
}


@pytest.mark.parametrize(("other", "match"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_drafter_for_another_target_is_refused_with_both_sides_named(other, match):
    drafter = drafter_of(make_target("llama", **{"num_hidden_layers": 2, **other}))
    assert_refused(shared_target(), ValueError, match, drafter=drafter)
    with pytest.raises(ValueError, match=match):
        dspark_hf.attach(shared_target(), drafter)
    assert "generate" not in vars(shared_target())


def test_a_drafter_on_another_device_is_refused():
    drafter = drafter_of(shared_target()).to("meta")
    assert_refused(shared_target(), ValueError, r"is on meta.*on cpu.*drafter.to\('cpu'\)", drafter=drafter)


def test_a_prompt_longer_than_a_learned_position_table_is_refused():
    target = make_target("gpt2", max_position_embeddings=12)
    assert_refused(target, ValueError, "14 tokens.* end at 12", drafter=make_drafter(target), inputs=left_padded([14]))
    check_same(target, left_padded([12, 3]), max_new_tokens=1)


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}


def encoder_decoder():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def recurrent():
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL, state_size=4))


def hybrid():
    config = transformers.JambaConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        num_experts=2,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
    )
    return transformers.JambaForCausalLM(config)


def without_positions():
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    )


def with_chunked_attention():
    target = make_target("llama", num_hidden_layers=2)
    target.config.layer_types = ["chunked_attention", "full_attention"]
    return target


REFUSED_TARGETS = {
    encoder_decoder: "encoder-decoder",
    recurrent: "recurrent state",
    hybrid: "recurrent state",
    without_positions: "takes no `position_ids`",
    with_chunked_attention: "chunked_attention",
}


@pytest.mark.parametrize(("make", "match"), REFUSED_TARGETS.items(), ids=[make.__name__ for make in REFUSED_TARGETS])
def test_targets_that_cannot_be_verified_are_refused(make, match):
    assert_refused(make().eval(), NotImplementedError, f"{match}.*{INSTEAD}", drafter=drafter_of(shared_target()))


def test_attention_that_takes_no_mask_is_refused(target):
    target.config._attn_implementation = "flash_attention_2"
    assert_refused(target, NotImplementedError, r"set_attn_implementation\('sdpa'\)")


ROPE = {"rope_theta": 10000.0}
LENGTH_DEPENDENT = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **ROPE},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        **ROPE,
    },
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_rotary_frequencies_that_depend_on_the_forward_are_refused_where_they_change(kind):
    longest = 24 if kind == "dynamic" else 96  # longrope changes at its original length, not at the longest
    target = make_target("llama", max_position_embeddings=longest, rope_parameters=LENGTH_DEPENDENT[kind])
    inputs = left_padded([9])
    assert_refused(target, NotImplementedError, f"{kind} rotary embedding.*beyond 24", inputs=left_padded([22]))
    check_same(target, inputs, max_new_tokens=15)


def test_local_attention_is_refused():
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]
    )
    assert_refused(transformers.GPTNeoForCausalLM(config).eval(), NotImplementedError, "by columns")


def test_alibi_is_refused():
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=True
    )
    assert_refused(transformers.FalconForCausalLM(config).eval(), NotImplementedError, "by columns")


@pytest.mark.parametrize("how", ["module", "forward"])
def test_a_compiled_target_is_refused(how):
    target = make_target()
    if how == "module":
        target.compile(backend="eager")
    else:
        target.forward = torch.compile(target.forward, backend="eager")
    with pytest.raises(NotImplementedError, match="before torch.compile"):
        target.generate(**left_padded([5]), max_new_tokens=4, assistant_model=drafter_of(make_target()))


def test_int32_prompts_and_float64_models_work_as_in_plain_generation():
    inputs = left_padded([5, 9])
    inputs["input_ids"] = inputs["input_ids"].int()
    check_same(shared_target(), inputs, max_new_tokens=6)
    target = make_target().double()
    plain = target.generate(**left_padded([5, 9]), max_new_tokens=6)
    for dtype in (torch.float64, torch.float32):
        drafter = make_drafter(target).to(dtype)
        assert torch.equal(target.generate(**left_padded([5, 9]), max_new_tokens=6, assistant_model=drafter), plain)


def test_the_prompts_cache_is_let_go_when_nobody_will_see_it(monkeypatch):
    held = []
    original = Decoding._round

    def spy(self):
        held.append(self.host_cache.layers[0].keys is not None)
        original(self)

    monkeypatch.setattr(Decoding, "_round", spy)
    target, drafter = shared_target(), drafter_of(shared_target())
    target.generate(**left_padded([5]), max_new_tokens=4, assistant_model=drafter, return_dict_in_generate=True)
    assert all(held)
    held.clear()
    target.generate(**left_padded([5]), max_new_tokens=4, assistant_model=drafter)
    assert any(held) == (cache_argument() != "cache")  # before 5.24 the host does not say whose cache it is


# The switch


def test_a_drafter_makes_generate_run_dspark():
    run = shared_target().generate(
        **left_padded([5, 9]),
        max_new_tokens=4,
        assistant_model=drafter_of(shared_target()),
        return_dict_in_generate=True,
    )
    assert isinstance(run, DSparkGenerateOutput)


def test_disable_puts_transformers_back_and_enable_returns():
    wrapped = {name: vars(GenerationMixin)[name] for name in ("_assisted_decoding", "_validate_generation_mode")}
    assert transformers.DSparkDraftModel is dspark_hf.DSparkDraftModel
    drafter = drafter_of(shared_target())
    try:
        dspark_hf.disable()
        for name, function in wrapped.items():
            assert vars(GenerationMixin)[name] is function.__wrapped__
            assert vars(GenerationMixin)[name].__module__.startswith("transformers.")
        assert not hasattr(transformers, "DSparkDraftModel")
        with pytest.raises(RuntimeError, match="enable"):
            dspark_hf.attach(shared_target(), drafter)
        with pytest.raises(ValueError, match="batch_size = 1|num_return_sequences"):  # the host's own loop again
            shared_target().generate(
                **left_padded([5]), max_new_tokens=4, num_return_sequences=2, do_sample=True, assistant_model=drafter
            )
        dspark_hf.disable()
    finally:
        dspark_hf.enable()
    once = {name: vars(GenerationMixin)[name] for name in wrapped}
    dspark_hf.enable()
    assert {name: vars(GenerationMixin)[name] for name in wrapped} == once
    check_same(shared_target(), left_padded([5, 9]), max_new_tokens=4)


def test_attach_makes_the_target_draft_on_its_own(target):
    inputs = left_padded([6])
    options = {"max_new_tokens": 11, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    assert not isinstance(plain, DSparkGenerateOutput)
    other = make_target("llama", num_hidden_layers=2)
    dspark_hf.attach(target, scripted_by(target, plain.sequences))
    attached = target.generate(**inputs, **options)
    assert torch.equal(attached.sequences, plain.sequences)
    assert attached.statistics.rounds == 2
    assert torch.equal(target.generate(inputs["input_ids"], max_new_tokens=11), plain.sequences)
    assert not isinstance(other.generate(**inputs, **options), DSparkGenerateOutput)
    one_token = scripted_by(target, plain.sequences)
    one_token.generation_config.num_assistant_tokens = 1
    assert target.generate(**inputs, **options, assistant_model=one_token).statistics.rounds == 5
    assert not isinstance(target.generate(**inputs, **options, assistant_model=None), DSparkGenerateOutput)
    dspark_hf.disable()
    try:
        with pytest.raises(RuntimeError, match="detach"):
            target.generate(**inputs, **options)
    finally:
        dspark_hf.enable()
    dspark_hf.detach(target)
    dspark_hf.detach(target)
    assert not isinstance(target.generate(**inputs, **options), DSparkGenerateOutput)


def test_detach_brings_back_a_generate_of_the_users_own():
    target = make_target()
    own = functools.partial(type(target).generate, target, max_new_tokens=3)
    target.generate = own
    dspark_hf.attach(target, drafter_of(target))
    assert target.generate(**left_padded([5])).shape[1] == 8
    dspark_hf.detach(target)
    assert target.generate is own


@pytest.mark.parametrize("wrong", ["org/drafter", None])
def test_attach_wants_a_loaded_drafter(wrong):
    with pytest.raises(TypeError, match="loaded DSpark drafter"):
        dspark_hf.attach(make_target(), wrong)


def test_other_assistants_run_the_hosts_own_loop(monkeypatch):
    """An ordinary small model as assistant, and prompt lookup, which has no assistant model at all."""

    monkeypatch.setattr("dspark_hf.integration.Decoding", None)  # calling it would fail
    inputs = left_padded([6])
    plain = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS)
    assistant = make_target("llama", seed=7, num_hidden_layers=1)
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}):
        output = shared_target().generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
        assert torch.equal(output, plain)
    with pytest.raises(ValueError, match="num_return_sequences"):
        shared_target().generate(**inputs, do_sample=True, num_return_sequences=2, assistant_model=assistant)


def test_a_drafter_whose_class_came_with_its_checkpoint_is_recognised():
    """Remote code gives a class of another module; the model type tells."""
    drafter = drafter_of(shared_target())
    drafter.__class__ = type("DSparkDraftModel", (type(drafter),), {"__module__": "transformers_modules.repo"})
    run = shared_target().generate(
        **left_padded([5]), max_new_tokens=4, assistant_model=drafter, return_dict_in_generate=True
    )
    assert isinstance(run, DSparkGenerateOutput)


# A drafter for other weights


@pytest.mark.parametrize("lengths", [(6,), (6, 6)], ids=["one row", "two rows"])
def test_a_hopeless_drafter_of_the_right_shape_is_reported_once(lengths, caplog):
    inputs = left_padded(list(lengths))
    plain = shared_target().generate(**inputs, max_new_tokens=60)
    hopeless = scripted_by(shared_target(), plain, wrong_at=lambda position: True)
    caplog.set_level(logging.WARNING, logger="dspark_hf")
    for _ in range(2):
        shared_target().generate(**inputs, max_new_tokens=60, assistant_model=hopeless)
    warnings = [record for record in caplog.records if record.name.startswith("dspark_hf")]
    assert len(warnings) == 1
    assert "another target's weights" in warnings[0].getMessage()


def test_a_useful_drafter_is_not_reported(caplog):
    inputs = left_padded([6])
    plain = shared_target().generate(**inputs, max_new_tokens=80)
    useful = scripted_by(shared_target(), plain, wrong_at=lambda position: position % 3 > 0)
    caplog.set_level(logging.WARNING, logger="dspark_hf")
    run = shared_target().generate(**inputs, max_new_tokens=80, assistant_model=useful, return_dict_in_generate=True)
    assert run.statistics.rounds >= 48
    assert [record for record in caplog.records if record.name.startswith("dspark_hf")] == []
