"""Targets with recurrent states: lossless for any drafter, in every family whose layers go on from their state.

A rejected token cannot be masked out of a state, so the states are rewound and the accepted tokens run again. That is
checked three ways: the text is that of plain generation, the states after a ragged round are those of a plain forward over
each row's text, and without the replay the same tests fail.
"""

import functools
import inspect

import pytest
import torch
import transformers
from conftest import PAD, SHAPE, VOCAB, left_padded, make_drafter, make_scripted, make_target, oracle_script
from reference.chi_square import ChiSquare, chi_square, count
from reference.enumeration import exact_law, marginal, prefix_logits
from test_verification import TOLERANCE, Rows
from transformers import DynamicCache, StaticCache

from dspark_hf.caches import SlotCache, check_host_cache
from dspark_hf.cost_curve import CostCurve
from dspark_hf.drafting import Drafting
from dspark_hf.host import cache_argument
from dspark_hf.recurrent import (
    LAYERS_WERE_REWRITTEN,
    RecurrentStates,
    check_ranks,
    check_recurrent,
    has_recurrent_states,
)
from dspark_hf.taps import TapRecorder
from dspark_hf.verification import Verifier, check_verifiable


ATTENTION, LINEAR = "full_attention", "linear_attention"
DELTA = {
    "layer_types": [LINEAR, ATTENTION, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
CONVOLUTION = {"layer_types": ["conv", ATTENTION, "conv"]}
HYBRIDS = {
    "qwen3_next": ("Qwen3Next", DELTA | EXPERTS | SHARED_EXPERT),
    "qwen3_5": ("Qwen3_5", DELTA),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "falcon_h1": ("FalconH1", MAMBA | {"mamba_d_ssm": 64, "ssm_out_multiplier": 2.0, "num_hidden_layers": 2}),
    "lfm2": ("Lfm2", CONVOLUTION | {"block_auto_adjust_ff_dim": False}),
}
RELATIVES = {
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | EXPERTS | SHARED_EXPERT),
    "lfm2_moe": ("Lfm2Moe", CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "shared_intermediate_size": 24},
    ),
}
REFUSED = {"jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4})}
ALL = HYBRIDS | RELATIVES | REFUSED
BATCHES = {"one row": (6,), "padded rows": (5, 9, 7)}
BLOCK, NEW_TOKENS = 4, 11


@functools.cache
def make_hybrid(family: str, **overrides):
    """Return a random float32 target without an end of text, its logits spread widely enough for clear choices."""
    name, extra = ALL[family]
    fields = SHAPE | {"num_hidden_layers": 3} | extra | overrides
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    target = getattr(transformers, f"{name}ForCausalLM")(config(**fields)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        target.get_output_embeddings().weight.normal_(std=0.6)
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = PAD, None
    return target


def hybrid(family: str, **overrides):
    """A target of a family, or a skip that gives the reason where this release of transformers cannot verify it."""
    target = make_hybrid(family, **overrides)
    try:
        check_verifiable(target)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return target


def drafter_for(kind: str, target, plain: torch.Tensor, lengths: tuple[int, ...]):
    if kind == "random":
        return make_drafter(target, num_hidden_layers=1)
    right = oracle_script(plain, list(lengths), max(lengths))
    wrong = {
        "perfect": lambda row, position: 0,
        "always wrong": lambda row, position: 1,
        "right now and then": lambda row, position: (position * position + row) % 5 // 4,
    }[kind]
    script = lambda row, position: (right(row, position) + wrong(row, position)) % VOCAB  # noqa: E731
    return make_scripted(target, script, num_hidden_layers=1, block_size=BLOCK)


def run_both(target, lengths: tuple[int, ...], kind: str, **options):
    """Plain output and a drafter's, both with everything that is returned."""
    common = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True} | options
    plain = target.generate(**left_padded(list(lengths)), **common)
    drafter = drafter_for(kind, target, plain.sequences, lengths)
    return plain, target.generate(**left_padded(list(lengths)), **common, assistant_model=drafter)


main_families = pytest.mark.parametrize("family", HYBRIDS)
batches = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())


# Texts


@pytest.mark.parametrize("kind", ["random", "perfect", "always wrong", "right now and then"])
@batches
@main_families
def test_no_drafter_changes_the_output(family, lengths, kind):
    plain, ours = run_both(hybrid(family), lengths, kind)
    assert torch.equal(plain.sequences, ours.sequences)
    statistics, rounds = ours.statistics, (NEW_TOKENS - 1) // (BLOCK + 1)
    if kind == "perfect":  # every row keeps all that was verified, so nothing is replayed
        assert (statistics.rounds, statistics.target_forwards, statistics.replays) == (
            rounds * len(lengths),
            rounds,
            0,
        )
    if kind == "always wrong":  # every round but the last, which verifies no draft, keeps the anchor alone
        assert statistics.replays == NEW_TOKENS - 2
        assert statistics.target_forwards == NEW_TOKENS - 1 + statistics.replays


@pytest.mark.parametrize("family", RELATIVES)
def test_relatives_of_these_families_work_too(family):
    plain, ours = run_both(hybrid(family), BATCHES["padded rows"], "right now and then")
    assert torch.equal(plain.sequences, ours.sequences)
    assert ours.statistics.replays > 0


@main_families
def test_without_the_replay_the_output_depends_on_the_drafter(family, monkeypatch):
    target = hybrid(family)
    monkeypatch.setattr(RecurrentStates, "rewind", lambda *args: 0)
    plain, ours = run_both(target, BATCHES["padded rows"], "always wrong")
    assert not torch.equal(plain.sequences, ours.sequences)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_rows_that_advance_token_by_token(family):
    """Scores and hidden states take the other commit path, where rows that ended go on as padding beside the others."""
    target = hybrid(family)
    plain = target.generate(**left_padded([4, 9]), max_new_tokens=NEW_TOKENS)
    options = {"eos_token_id": int(plain[0, 10]), "output_scores": True, "output_hidden_states": True}
    plain, ours = run_both(target, (4, 9), "always wrong", **options)
    assert torch.equal(plain.sequences, ours.sequences)
    assert ours.statistics.replays > 0
    for expected, got in zip(plain.scores, ours.scores, strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    for expected, got in zip(plain.hidden_states[1:], ours.hidden_states[1:], strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


# States and taps


# States and taps are compared after several forwards of different widths, and Nemotron-H squares its activations.
STATE_TOLERANCE = 1e-3


class HybridRows(Rows):
    """Rows whose recurrent states follow what their texts keep."""

    def verify(self, *widths: int, keep: tuple[int, ...] | None = None, columns: int | None = None):
        result = super().verify(*widths, keep=keep, columns=columns)
        self.forwards = self.verifier.keep(list(widths if keep is None else keep))
        return result

    def check_states(self):
        for row, text in enumerate(self.texts):
            host = DynamicCache(config=self.target.config)
            self.target(torch.tensor([text]), **{cache_argument(): host})
            alone = SlotCache(len(host.layers))
            alone.read_host(host, len(text))
            for state, expected in zip(self.cache.recurrent_states, alone.recurrent_states, strict=True):
                torch.testing.assert_close(state[row : row + 1], expected, atol=STATE_TOLERANCE, rtol=0)


@torch.no_grad()
@main_families
def test_states_after_a_ragged_round_are_those_of_each_rows_text(family):
    rows = HybridRows(hybrid(family), (7, 1, 4, 2))
    for widths, keep, forwards in [
        ((5, 5, 5, 5), (5, 2, 0, 2), 1),  # all, some, none
        ((5, 3, 1, 4), (4, 3, 1, 2), 4),  # columns beyond a row's width count as rejected
        ((3, 3, 3, 3), (3, 3, 3, 3), 0),
        ((1, 1, 1, 1), (1, 0, 1, 0), 0),  # two rows have ended
    ]:
        rows.verify(*widths, keep=keep)
        assert rows.forwards == forwards
        rows.check_states()


@main_families
def test_the_drafter_reads_the_taps_of_the_text_and_none_of_a_replay(family, monkeypatch):
    target, seen = hybrid(family), []
    monkeypatch.setattr(Drafting, "observe", lambda self, context: (seen.append(context), self.unread.append(context)))
    _, ours = run_both(target, (6,), "right now and then")
    assert ours.statistics.replays > 0
    got = torch.cat([context.taps[:, : int(context.counts)] for context in seen], dim=1)
    layer_ids = make_drafter(target, num_hidden_layers=1).config.target_layer_ids
    with torch.no_grad(), TapRecorder(target, layer_ids, torch.device("cpu"), torch.float32) as recorder:
        target(ours.sequences[:, :-1])
        expected = recorder.take()
    torch.testing.assert_close(got[:, : expected.shape[1]], expected, atol=STATE_TOLERANCE, rtol=0)


# Caches


def assert_same_cache(plain, ours) -> None:
    """Equal in kind, length, keys, values and states."""
    assert plain.get_seq_length() == ours.get_seq_length()
    read = [SlotCache(len(cache.layers)) for cache in (plain, ours)]
    for expected, got in zip(plain.layers, ours.layers, strict=True):
        assert type(expected) is type(got)
        assert getattr(expected, "has_previous_state", None) == getattr(got, "has_previous_state", None)
    for mine, host in zip(read, (plain, ours), strict=True):
        mine.read_host(host, int(host.get_seq_length()))
    for expected, got in zip(*(cache.recurrent_states for cache in read), strict=True):
        torch.testing.assert_close(got, expected, atol=STATE_TOLERANCE, rtol=0)
    for expected, got in zip(*(cache.layers for cache in read), strict=True):
        torch.testing.assert_close(got.keys, expected.keys, atol=STATE_TOLERANCE, rtol=0)
        torch.testing.assert_close(got.values, expected.values, atol=STATE_TOLERANCE, rtol=0)


@batches
@main_families
def test_two_turns_on_one_cache_with_rows_that_end_early(family, lengths):
    """The first row ends at its third token; in the next turn its padding lies in the middle of its text."""
    target = hybrid(family)
    inputs = left_padded(list(lengths))
    end = int(target.generate(**inputs, max_new_tokens=3)[0, -1])
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for turn in range(2):
        options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": end if len(lengths) > 1 and turn == 0 else None}
        plain = target.generate(**inputs, **options, **{cache_argument(): caches[0]})
        mask = inputs["attention_mask"]
        right = oracle_script(plain, mask.sum(dim=1).tolist(), mask.shape[1])
        drafter = make_scripted(target, lambda row, place, right=right: (right(row, place) + (place % 4 == 1)) % VOCAB)
        ours = target.generate(**inputs, **options, **{cache_argument(): caches[1]}, assistant_model=drafter)
        assert torch.equal(plain, ours)
        assert_same_cache(*caches)
        more = torch.cat([plain, plain[:, -3:]], dim=1)
        ones = torch.ones(len(lengths), more.shape[1] - mask.shape[1], dtype=torch.long)
        inputs = {"input_ids": more, "attention_mask": torch.cat([mask, ones], dim=1)}


@main_families
def test_the_returned_cache_is_that_of_plain_generation(family):
    plain, ours = run_both(hybrid(family), BATCHES["padded rows"], "always wrong")
    assert_same_cache(plain[cache_argument()], ours[cache_argument()])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_static_cache(family):
    target = hybrid(family)
    if not LAYERS_WERE_REWRITTEN:
        pytest.skip("Plain generation makes no masks for linear attention here when the cache is static.")
    inputs, options = left_padded([4, 9]), {"max_new_tokens": NEW_TOKENS}
    caches = [StaticCache(config=target.config, max_cache_len=32) for _ in range(2)]
    plain = target.generate(**inputs, **options, **{cache_argument(): caches[0]})
    drafter = drafter_for("right now and then", target, plain, (4, 9))
    ours = target.generate(**inputs, **options, **{cache_argument(): caches[1]}, assistant_model=drafter)
    assert torch.equal(plain, ours)
    assert_same_cache(*caches)


# Sampling

PLACES, SAMPLES = 4, 1500
PROMPTS = torch.tensor([[0, 0, 1, 4], [3, 1, 2, 5]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def sampled_p_value(target) -> float:
    """p-value of all `PLACES` tokens together after two prompts of one batch, against the enumerated law."""
    torch.manual_seed(0)
    drafter = make_drafter(target, num_hidden_layers=1, markov_rank=4)
    common = {"do_sample": True, "top_k": 0, "max_new_tokens": PLACES, "num_return_sequences": SAMPLES}
    output = target.generate(PROMPTS, attention_mask=MASK, assistant_model=drafter, **common)
    tokens = output[:, PROMPTS.shape[1] :].view(len(PROMPTS), SAMPLES, PLACES)
    tests = []
    for row, prompt in enumerate(PROMPTS):
        law = exact_law(prompt, MASK[row], prefix_logits(target, prompt, MASK[row], PLACES), {})
        for places in [(0,), (1,), (2,), (3,), (1, 2), (2, 3)]:
            tests.append(chi_square(count(tokens[row][:, places], 6), marginal(law, places)))
    return sum(tests, ChiSquare(0.0, 0)).p_value


def test_samples_follow_the_targets_law_and_do_not_without_the_replay(monkeypatch):
    """False failure below 1e-9: the summed statistics are of overlapping places, so the threshold is not exact."""
    target = hybrid("falcon_h1", vocab_size=6)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.5)
    try:
        assert sampled_p_value(target) > 1e-9
        monkeypatch.setattr(RecurrentStates, "rewind", lambda *args: 0)
        assert sampled_p_value(target) < 1e-12
    finally:
        make_hybrid.cache_clear()


# What is refused


@torch.no_grad()
@pytest.mark.parametrize("family", ALL)
def test_a_family_is_refused_exactly_where_its_layers_forget_their_state(family):
    target, text = make_hybrid(family), torch.arange(3, 15)[None]
    known = inspect.signature(target.forward).parameters
    positions = torch.arange(12)[None] if "position_ids" in known else None
    host, logits = DynamicCache(config=target.config), []
    for part in (slice(0, 5), slice(5, 9), slice(9, 12)):
        place = {} if positions is None else {"position_ids": positions[:, part]}
        logits.append(target(text[:, part], **place, **{cache_argument(): host}).logits)
    error = (torch.cat(logits, dim=1) - target(text, use_cache=False).logits).abs().max()
    try:
        check_recurrent(target)
    except NotImplementedError as refusal:
        assert error > 0.1
        message = str(refusal)
        assert type(target).__name__ in message
        assert "generate() without `assistant_model`" in message
    else:
        assert error < 2 * TOLERANCE


def test_a_family_that_nobody_has_looked_at_is_refused_by_name():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    with pytest.raises(NotImplementedError, match="MambaForCausalLM keeps a recurrent state .* Known are bamba, "):
        check_recurrent(transformers.MambaForCausalLM(config))
    check_recurrent(make_target())


def test_a_hybrid_without_attention_is_refused(monkeypatch):
    target = make_hybrid("qwen3_5")
    monkeypatch.setattr(target.config, "layer_types", [LINEAR] * 3)
    with pytest.raises(NotImplementedError, match="no attention layer"):
        check_verifiable(target)


def test_ranks_that_wait_for_each_other_are_refused():
    target = make_hybrid("qwen3_5")
    with pytest.raises(NotImplementedError, match="ranks under FSDP or ZeRO-3"):
        check_ranks(target, synced_gpus=True)
    check_ranks(target, synced_gpus=False)
    check_ranks(make_target(), synced_gpus=True)


def test_throughput_policies_are_refused_before_any_forward(tmp_path, monkeypatch):
    target = make_hybrid("qwen3_5")
    drafter = make_drafter(target, num_hidden_layers=1)
    with pytest.raises(NotImplementedError, match="'constant' or 'threshold'"):
        CostCurve.open(target, drafter, tmp_path)
    drafter.generation_config.num_assistant_tokens_schedule = "throughput"
    monkeypatch.setattr(type(target), "_prefill", None)
    with pytest.raises(NotImplementedError, match="'constant' or 'threshold'"):
        target.generate(**left_padded([4]), max_new_tokens=2, assistant_model=drafter)


def test_recurrent_layers_that_record_their_past_are_refused():
    cache = DynamicCache(config=make_hybrid("qwen3_5").config)
    check_host_cache(cache)
    if not hasattr(cache, "activate_past_recording"):
        pytest.skip("This release of transformers records no past.")
    cache.activate_past_recording()
    with pytest.raises(NotImplementedError, match="recurrent layers that record their past"):
        check_host_cache(cache)


def test_other_targets_pay_nothing():
    assert not has_recurrent_states(make_target().config)
    cache = SlotCache(2)
    verifier = Verifier(make_target(), cache, torch.ones(1, 1, dtype=torch.bool), {"position_ids": torch.zeros(1, 1)})
    assert verifier.recurrent is None
    assert verifier.keep([1]) == 0
