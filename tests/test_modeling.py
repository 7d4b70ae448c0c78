"""The drafter against `reference/drafter.py`: every variant uncached, then cached as decoding runs it.

Tolerance: the reference computes in float64, the drafter in float32; with values of order 10 they agree to a few 1e-6,
while any mistake in a mask, position or head moves them by more than 0.01.
"""

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from reference.drafter import ReferenceDrafter
from torch import nn

from dspark_hf import DSparkDraftModel
from dspark_hf.caches import BUCKET
from dspark_hf.drafting import Context, Drafting


TOLERANCE = 1e-4
WINDOW = 8
BLOCK = 4
OWN_WEIGHTS = {"has_embedding": True, "has_lm_head": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
CAUSAL = {"causal_layer_types": ["full_attention", "sliding_attention"]}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
GEMMA4 = {
    "backbone": "gemma4",
    "hidden_act": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    "embedding_scale": 32**0.5,
    "final_logit_softcapping": 30.0,
}
CASES = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank 0": {"markov_rank": 0, "enable_confidence_head": False},
    "rank 0 with confidence": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence without the Markov feature": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "no q/k norm": {"qk_norm": False},
    "attention bias": {"attention_bias": True},
    "attention bias, no q/k norm": {"attention_bias": True, "qk_norm": False},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads as heads": {"num_key_value_heads": 4, "head_dim": 16},
    "causal block": CAUSAL,
    "sliding layers": SLIDING,
    "mixed layers": MIXED,
    "mixed layers, causal block": MIXED | CAUSAL,
    "slot 1 predicts first": {"first_prediction_slot": 1},
    "slot 1 predicts first, rnn": {"first_prediction_slot": 1, "markov_head_type": "rnn"},
    "slot 1 predicts first, causal, sliding": SLIDING | CAUSAL | {"first_prediction_slot": 1},
    "block of 1": {"block_size": 1},
    "tap -1": {"target_layer_ids": [-1, 2]},
    "taps out of order, one twice": {"target_layer_ids": [2, 0, 2]},
    "own embedding and head": OWN_WEIGHTS,
    "own embedding": {"has_embedding": True},
    "own head": {"has_lm_head": True},
    "another width": OWN_WEIGHTS | {"hidden_size": 48, "head_dim": 12},
    "reduced vocabulary, borrowed head": {"draft_vocab_size": 40, "markov_head_type": "rnn"},
    "reduced vocabulary, own head": {"draft_vocab_size": 40, "has_lm_head": True},
    "another rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "interleaved rotary pairs": {"rope_interleaved": True},
    "partial rotary": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    },
    "partial, interleaved": {"rope_interleaved": True, "rope_parameters": PARTIAL},
    "gated attention": {"attention_gate": True},
    "sinks": {"attention_sinks": True},
    "sinks, sliding, causal": SLIDING | CAUSAL | {"attention_sinks": True, "first_prediction_slot": 1},
    "window from the anchor": SLIDING | {"window_from_anchor": True},
    "window from the anchor, causal": MIXED
    | {"window_from_anchor": True, "causal_layer_types": ["sliding_attention"]},
    "norms around zero": {"zero_centered_norms": True},
    "scaled embedding": {"embedding_scale": 5.65, "has_embedding": True},
    "scaled borrowed embedding": {"embedding_scale": 0.5},
    "soft cap": {"final_logit_softcapping": 3.0},
    "gemma 4": GEMMA4,
    "gemma 4, own values, sliding": GEMMA4 | SLIDING | {"attention_k_eq_v": False},
}


@pytest.fixture(scope="module")
def target():
    """A target whose head has a bias, so that a borrowed head must bring it along."""
    target = make_target()
    torch.manual_seed(5)
    target.lm_head = nn.Linear(32, VOCAB)
    return target.requires_grad_(False)


def random_drafter(target, **overrides) -> DSparkDraftModel:
    """A drafter whose norms, biases and draft vocabulary are random too."""
    drafter = make_drafter(target, **overrides)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in drafter.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        if drafter.kept_token_ids is not None:
            count = drafter.config.draft_vocab_size
            kept = torch.randperm(VOCAB)[:count].sort().values
            drafter.d2t.copy_(kept - torch.arange(count))
    return drafter.requires_grad_(False)


def reference_of(drafter, target) -> ReferenceDrafter:
    borrowed = {}
    if not drafter.config.has_embedding:
        borrowed["embedding"] = target.get_input_embeddings().weight
    if not drafter.config.has_lm_head:
        borrowed |= {"head": target.lm_head.weight, "head_bias": target.lm_head.bias}
    return ReferenceDrafter(drafter.state_dict(), drafter.config, **borrowed)


def random_taps(drafter, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, drafter.fc.in_features)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE, rtol=0)


class RecordingChoose:
    """Draws greedily and keeps the logits that it was shown."""

    def __init__(self):
        self.logits = []

    def __call__(self, index, logits, drafted):
        assert drafted.shape == (len(logits), index)
        self.logits.append(logits)
        tokens = logits.argmax(dim=-1)
        return tokens, nn.functional.one_hot(tokens, logits.shape[-1]).float()


def draft_uncached(drafter, target, taps, anchor, start):
    """One block from all taps at once: hidden states, logits shown to `choose`, draft."""
    drafting = Drafting(drafter, target, torch.ones(len(taps), 1, dtype=torch.bool), 0)
    positions = start + torch.arange(drafter.config.num_block_inputs).expand(len(taps), -1)
    hidden = drafter(
        drafter.embed(drafter.block_input_ids(anchor), drafting.embed_tokens),
        drafter.project_context(taps),
        positions,
        start - taps.shape[1] + torch.arange(taps.shape[1]).expand(len(taps), -1),
    ).last_hidden_state
    choose = RecordingChoose()
    draft = drafter.draft(hidden, anchor, choose, lm_head=drafting.lm_head)
    return hidden, torch.stack(choose.logits, dim=1), draft


# One pass without a cache


@pytest.mark.parametrize("context", [1, 11])
@pytest.mark.parametrize("case", CASES)
def test_a_block_equals_the_reference(target, case, context):
    drafter = random_drafter(target, **CASES[case])
    reference = reference_of(drafter, target)
    taps, anchor = random_taps(drafter, 2, context), torch.tensor([7, 33])
    hidden, logits, draft = draft_uncached(drafter, target, taps, anchor, context)
    for row in range(2):
        expected_hidden = reference.block_hidden_states(taps[row], int(anchor[row]))
        expected = reference.draft(expected_hidden, int(anchor[row]))
        close(hidden[row], expected_hidden)
        close(logits[row], expected.draft_logits)
        assert draft.tokens[row].tolist() == expected.tokens
        if expected.confidence_logits is None:
            assert draft.confidence_logits is None
        else:
            close(draft.confidence_logits[row], expected.confidence_logits)


@pytest.mark.parametrize("case", ["sliding layers", "mixed layers", "mixed layers, causal block"])
@pytest.mark.parametrize("context", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, 3 * WINDOW])
def test_sliding_layers_see_their_window_and_no_more(target, case, context):
    drafter = random_drafter(target, **CASES[case])
    taps, anchor = random_taps(drafter, 1, context), torch.tensor([7])
    hidden, _, _ = draft_uncached(drafter, target, taps, anchor, context)
    close(hidden[0], reference_of(drafter, target).block_hidden_states(taps[0], 7))


def test_the_window_of_a_sliding_layer_is_counted_from_each_query(target):
    drafter = random_drafter(target, **SLIDING | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    taps, anchor = random_taps(drafter, 1, 12), torch.tensor([7])
    hidden, _, _ = draft_uncached(drafter, target, taps, anchor, 12)
    # The anchor at 12 sees 5 and later, the last slot at 15 sees 8 and later.
    for column, changed in ((4, 0), (5, 1), (6, 2), (7, 3), (8, 4)):
        disturbed = taps.clone()
        disturbed[:, column] += 1.0
        other, _, _ = draft_uncached(drafter, target, disturbed, anchor, 12)
        moved = ((other - hidden).abs().amax(dim=-1) > 1e-3)[0].tolist()
        assert moved == [slot < changed for slot in range(BLOCK)]


def test_positions_of_the_context_are_its_places_in_the_text(target):
    """A context that starts late, after a reused cache, keeps its positions; RoPE sees only differences."""
    drafter = random_drafter(target)
    taps, anchor = random_taps(drafter, 1, 5), torch.tensor([7])
    hidden, _, _ = draft_uncached(drafter, target, taps, anchor, 105)
    reference = reference_of(drafter, target)
    close(hidden[0], reference.block_hidden_states(taps[0], 7, list(range(100, 105))))
    close(hidden[0], reference.block_hidden_states(taps[0], 7))


def test_the_two_slot_conventions_predict_from_different_slots(target):
    """With the same weights slot 1's output is the first prediction in one and the second in the other."""
    anchor_predicts = random_drafter(target, block_size=5, markov_rank=0, enable_confidence_head=False)
    anchor_conditions = random_drafter(
        target, block_size=4, first_prediction_slot=1, markov_rank=0, enable_confidence_head=False
    )
    anchor_conditions.load_state_dict(anchor_predicts.state_dict())
    assert anchor_predicts.config.num_block_inputs == anchor_conditions.config.num_block_inputs == 5
    taps, anchor = random_taps(anchor_predicts, 1, 6), torch.tensor([7])
    hidden, first, _ = draft_uncached(anchor_predicts, target, taps, anchor, 6)
    same, second, _ = draft_uncached(anchor_conditions, target, taps, anchor, 6)
    torch.testing.assert_close(hidden, same)
    torch.testing.assert_close(first[:, 1:], second)
    assert (first[:, 0] - second[:, 0]).abs().max() > 0.1


def test_a_block_is_bidirectional_unless_the_config_says_causal(target):
    taps, embeds, moved = torch.randn(1, 6, 32), torch.randn(1, BLOCK, 32), {}
    for causal in (False, True):
        drafter = random_drafter(target, causal_layer_types=["full_attention"] if causal else [])
        arguments = (drafter.project_context(taps), 6 + torch.arange(BLOCK)[None], torch.arange(6)[None])
        disturbed = embeds.clone()
        disturbed[:, -1] += 1.0
        change = drafter(disturbed, *arguments).last_hidden_state - drafter(embeds, *arguments).last_hidden_state
        moved[causal] = (change.abs().amax(dim=-1) > 1e-3)[0].tolist()
    assert moved == {False: [True] * BLOCK, True: [False] * (BLOCK - 1) + [True]}


def test_both_attention_implementations_agree(target):
    drafter = random_drafter(target, **MIXED)
    taps, anchor = random_taps(drafter, 2, 11), torch.tensor([7, 33])
    hidden = {}
    for implementation in ("eager", "sdpa"):
        drafter.set_attn_implementation(implementation)
        hidden[implementation], _, _ = draft_uncached(drafter, target, taps, anchor, 11)
    torch.testing.assert_close(hidden["eager"], hidden["sdpa"], atol=1e-5, rtol=0)


# Reduced vocabulary


@pytest.mark.parametrize("own_head", [False, True])
def test_a_reduced_vocabulary_proposes_kept_tokens_only(target, own_head):
    drafter = random_drafter(target, draft_vocab_size=10, has_lm_head=own_head)
    kept = drafter.kept_token_ids
    assert len(set(kept.tolist())) == 10
    taps = random_taps(drafter, 1, 6)
    # Neither the anchor nor the first token need to be kept tokens: W_1 covers the whole vocabulary.
    anchor = torch.tensor([next(token for token in range(VOCAB) if token not in kept.tolist())])
    _, logits, draft = draft_uncached(drafter, target, taps, anchor, 6)
    dropped = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, kept, False)
    assert logits.shape == draft.probs.shape == (1, BLOCK, VOCAB)
    assert (logits[..., dropped] == -torch.inf).all()
    assert logits[..., ~dropped].isfinite().all()
    assert torch.isin(draft.tokens, kept).all()


def test_a_reduced_vocabulary_borrows_only_the_rows_of_the_head_that_it_keeps(target):
    drafter = random_drafter(target, draft_vocab_size=10)
    head = Drafting(drafter, target, torch.ones(1, 1, dtype=torch.bool), 0).lm_head
    kept = drafter.kept_token_ids
    torch.testing.assert_close(head.weight, target.lm_head.weight[kept])
    torch.testing.assert_close(head.bias, target.lm_head.bias[kept])


# The interface of the two stages


def test_fewer_tokens_are_the_first_of_the_block(target):
    drafter = random_drafter(target, markov_head_type="rnn")
    hidden = torch.randn(2, BLOCK, 32)
    whole = drafter.draft(hidden, torch.tensor([7, 33]), RecordingChoose(), lm_head=target.lm_head)
    part = drafter.draft(hidden, torch.tensor([7, 33]), RecordingChoose(), 2, lm_head=target.lm_head)
    assert torch.equal(part.tokens, whole.tokens[:, :2])
    torch.testing.assert_close(part.confidence_logits, whole.confidence_logits[:, :2])


def test_the_next_token_depends_on_the_drawn_one_and_its_confidence_is_known_before_it_is_drawn(target):
    drafter = random_drafter(target, markov_head_type="rnn")
    hidden, anchor = torch.randn(1, BLOCK, 32), torch.tensor([7])
    results = []
    for forced in (11, 12):

        def choose(index, logits, drafted, forced=forced):
            tokens = torch.tensor([forced]) if index == 1 else logits.argmax(dim=-1)
            assert drafted.tolist()[0][1:2] == ([forced] if index > 1 else [])
            return tokens, logits.softmax(dim=-1)

        results.append(drafter.draft(hidden, anchor, choose, lm_head=target.lm_head))
    one, other = results
    torch.testing.assert_close(one.probs[:, :2], other.probs[:, :2])
    torch.testing.assert_close(one.confidence_logits[:, :2], other.confidence_logits[:, :2])
    assert (one.probs[:, 2] - other.probs[:, 2]).abs().max() > 1e-3
    assert (one.confidence_logits[:, 2] - other.confidence_logits[:, 2]).abs() > 1e-3


def test_a_drafter_without_a_head_asks_for_one(target):
    drafter = random_drafter(target)
    with pytest.raises(ValueError, match="no head of its own: pass `lm_head`"):
        drafter.draft(torch.randn(1, BLOCK, 32), torch.tensor([7]), RecordingChoose())


def test_a_cache_without_a_mask_is_refused(target):
    drafter = random_drafter(target)
    block, context = torch.randn(1, BLOCK, 32), torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match="pass `attention_mask`"):
        drafter(block, context, 3 + torch.arange(BLOCK)[None], torch.arange(3)[None], cache=object())


# Cached, as decoding runs it


class Rows:
    """Rows of random text behind left padding, and the bookkeeping of a decoding run over them."""

    def __init__(self, drafter, target, lengths, total, first_slot=0):
        self.columns = max(lengths)
        self.padding = [self.columns - length for length in lengths]
        mask = torch.tensor([[column >= pad for column in range(self.columns)] for pad in self.padding])
        self.taps = random_taps(drafter, len(lengths), total)  # by column
        self.tokens = torch.randint(0, VOCAB, (len(lengths), total))
        self.anchor_slots = [self.columns] * len(lengths)
        self.first_slot = first_slot
        self.drafter, self.reference = drafter, reference_of(drafter, target)
        self.drafting = Drafting(drafter, target, mask, first_slot)
        garbage = 30.0 * random_taps(drafter, len(lengths), self.columns)
        prompt = torch.where(mask[..., None], self.taps[:, : self.columns], garbage)
        slots = torch.arange(first_slot, self.columns).expand(len(lengths), -1)
        counts = torch.full((len(lengths),), self.columns - first_slot)
        self.drafting.observe(Context(prompt[:, first_slot:], slots, counts))

    def draft(self):
        """Draft a block for every row; return the hidden states, what `choose` saw, and the draft."""
        slots = torch.tensor(self.anchor_slots)
        anchors = self.tokens.gather(1, slots[:, None]).squeeze(1)
        used = max(self.anchor_slots) + self.drafter.config.num_block_inputs
        choose, seen = RecordingChoose(), []
        handle = self.drafter.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        draft = self.drafting.draft(anchors, slots, used, self.drafter.config.block_size, choose)
        handle.remove()
        self.check_slots()
        return seen[0], torch.stack(choose.logits, dim=1), draft

    def check_slots(self):
        """One forward must not write a slot twice: which write wins is undefined on a GPU."""
        cache = self.drafting.cache
        for row in cache.slots.tolist():
            kept = [slot for slot in row if slot != cache.bin]
            assert len(kept) == len(set(kept))

    def check(self, rows=None):
        """Draft, and compare each row with the uncached reference."""
        hidden, logits, draft = self.draft()
        for row in range(len(self.anchor_slots)) if rows is None else rows:
            anchor_slot, pad = self.anchor_slots[row], self.padding[row]
            anchor, first = int(self.tokens[row, anchor_slot]), max(self.first_slot, pad)
            positions = list(range(first - pad, anchor_slot - pad))
            expected_hidden = self.reference.block_hidden_states(self.taps[row, first:anchor_slot], anchor, positions)
            expected = self.reference.draft(expected_hidden, anchor, draft.tokens[row])
            close(hidden[row], expected_hidden)
            close(logits[row], expected.draft_logits)
            close(draft.confidence_logits[row], expected.confidence_logits)

    def commit(self, *counts: int, width: int = BLOCK + 1):
        """Hand over taps of `width` columns from each anchor on; all beyond a row's count are of rejected tokens."""
        slots = torch.tensor(self.anchor_slots)[:, None] + torch.arange(width)
        committed = torch.arange(width) < torch.tensor(counts)[:, None]
        index = slots.clamp(max=self.taps.shape[1] - 1)[..., None].expand(-1, -1, self.taps.shape[-1])
        garbage = 30.0 * random_taps(self.drafter, len(counts), width)
        taps = torch.where(committed[..., None], self.taps.gather(1, index), garbage)
        self.drafting.observe(Context(taps, slots, torch.tensor(counts)))
        self.anchor_slots = [slot + count for slot, count in zip(self.anchor_slots, counts, strict=True)]


CACHED_CASES = [
    "rnn",
    "attention bias",
    "mixed layers",
    "mixed layers, causal block",
    "slot 1 predicts first, causal, sliding",
    "slot 1 predicts first",
    "reduced vocabulary, borrowed head",
    "another width",
]


@pytest.mark.parametrize("case", CACHED_CASES)
def test_rounds_with_ragged_commits_behind_padding_equal_the_reference(target, case):
    rows = Rows(random_drafter(target, **CASES[case]), target, [7, 4, 1], total=40)
    rows.check()
    rows.commit(5, 1, 3)
    rows.check()
    rows.commit(1, 5, 2)
    rows.check()


def test_a_round_that_did_not_draft_is_caught_up_with(target):
    rows = Rows(random_drafter(target, **MIXED), target, [7, 2], total=40)
    rows.commit(3, 1)
    rows.commit(1, 5, width=3 + BLOCK)
    rows.commit(2, 2, width=2)
    rows.check()
    rows.commit(1, 4)
    rows.commit(4, 1)
    rows.check()


def test_a_row_that_stands_still_keeps_its_draft(target):
    """A finished row commits nothing: neither it nor the others may notice."""
    rows = Rows(random_drafter(target), target, [3, 6], total=40)
    rows.commit(2, 2)
    before, _, _ = rows.draft()
    rows.commit(0, 4)
    after, _, _ = rows.draft()
    torch.testing.assert_close(after[0], before[0])
    rows.commit(0, 3)
    rows.check()


@pytest.mark.parametrize("case", ["vanilla", "mixed layers"])
def test_the_cache_grows_past_its_bucket_without_forgetting(target, case):
    rows = Rows(random_drafter(target, **CASES[case]), target, [BUCKET - 9, BUCKET - 40], total=BUCKET + 40)
    rows.draft()
    capacity = rows.drafting.cache.capacity
    rows.commit(5, 3)
    rows.check(rows=[1])
    rows.commit(5, 5)
    rows.commit(5, 5)
    rows.check(rows=[0, 1])
    assert rows.drafting.cache.capacity > capacity == BUCKET


@pytest.mark.parametrize("case", ["vanilla", "sliding layers"])
def test_a_context_that_starts_late_is_all_the_drafter_sees(target, case):
    """After a reused cache the taps of the earlier columns are gone."""
    rows = Rows(random_drafter(target, **CASES[case]), target, [9, 5, 7], total=40, first_slot=6)
    rows.check()
    rows.commit(2, 5, 1)
    rows.check()


# dtypes


def test_rotary_frequencies_stay_exact_when_the_model_is_cast(target):
    drafter = random_drafter(target)
    exact = drafter.rotary_emb.inv_freq.clone()
    assert exact.dtype == torch.float32
    for cast in (drafter.to(torch.bfloat16), drafter.half(), drafter.to("cpu", torch.bfloat16), drafter.float()):
        assert cast.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(cast.rotary_emb.inv_freq, exact)
        assert torch.equal(cast.rotary_emb.original_inv_freq, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_frequencies_stay_exact_when_a_checkpoint_is_loaded_in_another_dtype(target, dtype, tmp_path):
    drafter = random_drafter(target)
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("case", ["vanilla", "gated", "rnn", "mixed layers", "reduced vocabulary, borrowed head"])
def test_bfloat16_drafts_what_float32_does_up_to_rounding(case):
    target = make_target()
    drafter = random_drafter(target, **CASES[case])
    taps, anchor = random_taps(drafter, 2, 11), torch.tensor([7, 33])
    hidden, logits, _ = draft_uncached(drafter, target, taps, anchor, 11)
    drafter.to(torch.bfloat16)
    target.to(torch.bfloat16)
    low_hidden, low_logits, low = draft_uncached(drafter, target, taps.bfloat16(), anchor, 11)
    assert low_hidden.dtype == torch.bfloat16
    # Distributions and confidences are float32, whatever the weights are.
    assert low_logits.dtype == low.probs.dtype == low.confidence_logits.dtype == torch.float32
    # bfloat16 has 8 bits: about 1 % of each of some ten sums. Only the first token has the same history for sure.
    assert (low_hidden - hidden).abs().mean() < 0.05 * hidden.abs().mean()
    finite = logits[:, 0].isfinite()
    difference = (low_logits[:, 0] - logits[:, 0])[finite].abs().mean()
    assert difference < 0.05 * logits[:, 0][finite].abs().mean()


def test_a_drafter_and_a_target_of_different_dtypes_meet(target):
    drafter = random_drafter(target).to(torch.bfloat16)
    taps = random_taps(drafter, 2, 11).bfloat16()
    _, logits, draft = draft_uncached(drafter, target, taps, torch.tensor([7, 33]), 11)
    assert logits.isfinite().all()
    assert draft.probs.dtype == torch.float32


# Training mode


def enable_checkpointing(drafter: DSparkDraftModel) -> None:
    # Named `gradient_checkpointing_enable` before transformers 5.24 and deprecated under that name since.
    enable = getattr(drafter, "activation_checkpointing_enable", None) or drafter.gradient_checkpointing_enable
    enable()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", ["gated", "rnn", "attention bias", "own embedding and head"])
def test_gradients_reach_every_weight(target, case, checkpointing):
    drafter = random_drafter(target, **CASES[case]).requires_grad_(True).train()
    if checkpointing:
        enable_checkpointing(drafter)
        assert all(layer.gradient_checkpointing for layer in drafter.layers)
    _, logits, draft = draft_uncached(drafter, target, random_taps(drafter, 2, 6), torch.tensor([7, 33]), 6)
    (logits.logsumexp(dim=-1).sum() + draft.confidence_logits.sum()).backward()
    without = [name for name, weight in drafter.named_parameters() if weight.grad is None]
    assert without == []
    assert all(weight.grad.isfinite().all() for weight in drafter.parameters())
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())


def test_gradient_checkpointing_changes_no_gradient(target):
    taps, gradients = torch.randn(2, 6, 32), []
    for checkpointing in (False, True):
        drafter = random_drafter(target).requires_grad_(True).train()
        if checkpointing:
            enable_checkpointing(drafter)
        hidden, _, _ = draft_uncached(drafter, target, taps, torch.tensor([7, 33]), 6)
        hidden.square().sum().backward()
        gradients.append(drafter.fc.weight.grad)
    torch.testing.assert_close(*gradients)


def test_dropout_acts_in_training_alone(target):
    drafter = random_drafter(target, attention_dropout=0.5)
    taps, anchor = random_taps(drafter, 1, 11), torch.tensor([7])
    still = [draft_uncached(drafter, target, taps, anchor, 11)[0] for _ in range(2)]
    assert torch.equal(*still)
    drafter.train()
    assert not torch.equal(draft_uncached(drafter, target, taps, anchor, 11)[0], still[0])
