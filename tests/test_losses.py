"""The training losses against numbers of the reference implementation (`golden/README.md`) and float64 loops.

Tolerance of golden and of logits: 1e-4. That of losses against loops: the library adds up to 96 float32 probabilities
in another order, 1e-6 relative; gradients are of order 0.01 to 1.
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import GOLDEN, VOCAB, make_drafter, make_target
from reference.drafter import ReferenceDrafter
from reference.losses import accepted_length, reference_losses
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf.taps import TapRecorder
from dspark_hf.training import losses as losses_module
from dspark_hf.training.anchors import Anchors, block_hidden_states, pack_blocks, sample_anchors
from dspark_hf.training.draft_metrics import draft_metrics
from dspark_hf.training.features import TargetFeatures
from dspark_hf.training.losses import (
    LossConfig,
    SoftLabels,
    aligned_soft_labels,
    draft_losses,
    position_losses,
    position_weights,
    teacher_forced_draft,
    total_position_weight,
)
from dspark_hf.training.objective import DraftObjective
from dspark_hf.training.target_head import TargetHead


TOLERANCE = 1e-4
LOSS_TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}
TERMS = ("total", "cross_entropy", "total_variation", "confidence")
GOLDEN_TERMS = dict(zip(TERMS, ("loss_total", "loss_ce", "loss_tv_l1", "loss_confidence"), strict=True))
HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence without the Markov feature": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "rnn, reduced vocabulary, slot 1": {
        "markov_head_type": "rnn",
        "draft_vocab_size": 40,
        "first_prediction_slot": 1,
    },
}


@pytest.fixture(scope="module")
def target():
    return make_target().requires_grad_(False)


class Batch:
    """Two rows of text, the second padded, what the target says about them, and a drafter."""

    def __init__(self, target, num_anchors=6, **overrides):
        self.target, self.drafter = target, make_drafter(target, **overrides)
        generator = torch.Generator().manual_seed(7)
        kept = torch.randperm(VOCAB, generator=generator)[: self.drafter.config.draft_vocab_size].sort().values
        if self.drafter.kept_token_ids is not None:
            self.drafter.d2t.copy_(kept - torch.arange(len(kept)))
        self.head = TargetHead(target, self.drafter.kept_token_ids)
        self.input_ids = torch.randint(3, VOCAB, (2, 24), generator=generator)
        self.sequence_ids = torch.tensor([[1] * 24, [1] * 15 + [0] * 9])
        self.loss_mask = torch.tensor([[0] * 6 + [1] * 8 + [0] * 2 + [1] * 8, [0] * 4 + [1] * 20])
        layers = self.drafter.config.target_layer_ids
        with torch.no_grad(), TapRecorder(target, layers, target.device, torch.float32) as recorder:
            last_hidden = target.model(self.input_ids, attention_mask=self.sequence_ids).last_hidden_state
            self.logits = TargetHead(target)(last_hidden)
            self.features = features_of(self.logits, last_hidden, recorder.take())
        self.anchors = sample_anchors(self.loss_mask, num_anchors, 4, self.sequence_ids, generator)

    def losses(self, anchors=None, **kwargs):
        blocks, hidden = self.forward(anchors)
        return draft_losses(self.drafter, blocks, hidden, self.features, self.head, **kwargs)

    def forward(self, anchors=None):
        anchors = self.anchors if anchors is None else anchors
        blocks = pack_blocks(self.drafter.config, self.input_ids, self.loss_mask, anchors, self.sequence_ids)
        return blocks, block_hidden_states(
            self.drafter, blocks, self.features.taps, self.target.get_input_embeddings()
        )

    def label_logits(self, blocks) -> torch.Tensor:
        """The target's logits at the supervised positions, `(S, V)`."""
        row, block, k = blocks.supervised.nonzero(as_tuple=True)
        return self.logits[row, self.anchors.columns[row, block] + k]

    def gradients(self, loss) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(self.drafter.parameters()), allow_unused=True))


def features_of(logits, last_hidden, taps) -> TargetFeatures:
    return TargetFeatures(taps, last_hidden, logits.logsumexp(dim=-1), logits.argmax(dim=-1))


def soft_labels(logits, kept=None) -> SoftLabels:
    probs = logits.softmax(dim=-1)
    return SoftLabels(probs if kept is None else probs[..., kept], logits.argmax(dim=-1))


def draft_ids_of(kept, vocab) -> torch.Tensor | None:
    if kept is None:
        return None
    return torch.tensor([kept.index(token) if token in kept else -1 for token in range(vocab)])


def label_tokens(blocks) -> torch.Tensor:
    """Where the labels of the supervised positions come from, in the flattened batch."""
    row, block, k = blocks.supervised.nonzero(as_tuple=True)
    return row * blocks.context_position_ids.shape[1] + blocks.label_columns[row, block, k]


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **(tolerance or {"atol": TOLERANCE, "rtol": 0}))


@pytest.fixture(scope="module", params=["deepspec-qwen3-vanilla", "deepspec-qwen3-rnn"])
def golden(request):
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target").requires_grad_(False)
    drafter = DSparkDraftModel.from_pretrained(folder / "drafter").requires_grad_(False)
    tensors = load_file(folder / "training_golden.safetensors")
    anchors = Anchors(tensors["anchor_positions"], tensors["block_keep_mask"].bool())
    return target, drafter, tensors, anchors


def test_every_term_equals_the_reference_implementation(golden):
    target, drafter, tensors, anchors = golden
    supervised = tensors["eval_mask"].bool()
    blocks = pack_blocks(drafter.config, tensors["input_ids"], tensors["loss_mask"], anchors)
    assert torch.equal(blocks.supervised, supervised)
    assert torch.equal(blocks.target_ids[supervised], tensors["target_ids"][supervised])
    hidden = block_hidden_states(drafter, blocks, tensors["context_hidden_states"])
    draft = teacher_forced_draft(drafter, hidden, blocks.previous_ids.flatten(0, 1))
    close(draft.logits.view_as(tensors["draft_logits"])[supervised], tensors["draft_logits"][supervised])
    expected = tensors["confidence_logits"]
    close(draft.confidence_logits.view_as(expected)[supervised], expected[supervised])
    head, last_hidden = TargetHead(target), tensors["target_last_hidden_states"]
    features = features_of(head(last_hidden), last_hidden, tensors["context_hidden_states"])
    labels, expected = (
        aligned_soft_labels(features, head, label_tokens(blocks)),
        tensors["aligned_target_logits"][supervised],
    )
    close(labels.probs, expected.softmax(dim=-1))
    assert torch.equal(labels.best_ids, expected.argmax(dim=-1))
    losses = draft_losses(drafter, blocks, hidden, features, head)
    for term, name in GOLDEN_TERMS.items():
        close(getattr(losses, term), tensors[name])


def test_golden_anchors_are_candidates_and_hooks_give_the_golden_features(golden):
    target, drafter, tensors, anchors = golden
    drawn = sample_anchors(tensors["loss_mask"], 48, drafter.config.block_size)
    for row in range(2):
        candidates = drawn.columns[row][drawn.block_keep_mask[row]].tolist()
        assert set(anchors.columns[row].tolist()) <= set(candidates)
    with TapRecorder(target, drafter.config.target_layer_ids, target.device, torch.float32) as recorder:
        last_hidden = target.model(tensors["input_ids"]).last_hidden_state
    close(recorder.take(), tensors["context_hidden_states"])
    close(last_hidden, tensors["target_last_hidden_states"])


@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 40])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_soft_labels_are_what_the_target_says_at_supervised_positions(family, draft_vocab_size):
    target = make_target(family).requires_grad_(False)
    batch = Batch(target, draft_vocab_size=draft_vocab_size)
    blocks, _ = batch.forward()
    labels = aligned_soft_labels(batch.features, batch.head, label_tokens(blocks))
    batch.logits = target(batch.input_ids, attention_mask=batch.sequence_ids).logits
    expected = soft_labels(batch.label_logits(blocks), batch.drafter.kept_token_ids)
    close(labels.probs, expected.probs, atol=1e-6, rtol=1e-5)
    assert torch.equal(labels.best_ids, expected.best_ids)
    assert (batch.head.softcap is not None) == (family == "gemma2")


@pytest.mark.parametrize("case", HEADS)
def test_teacher_forced_logits_equal_the_reference_drafter(target, case):
    batch = Batch(target, **HEADS[case])
    drafter, blocks = batch.drafter, batch.forward()[0]
    reference = ReferenceDrafter(
        drafter.state_dict(), drafter.config, target.get_input_embeddings().weight, target.lm_head.weight
    )
    torch.manual_seed(8)
    hidden = torch.randn(12, drafter.config.num_block_inputs, 32)
    previous = blocks.previous_ids.flatten(0, 1)
    draft = teacher_forced_draft(drafter, hidden, previous, batch.head.module)
    assert draft.logits.dtype == torch.float32
    for block in range(0, 12, 3):
        text = previous[block].tolist()
        expected = reference.draft(hidden[block].double(), text[0], [*text[1:], 0])
        close(draft.logits[block].double(), expected.draft_logits[:, reference.kept])
        if drafter.config.enable_confidence_head:
            close(draft.confidence_logits[block].double(), expected.confidence_logits)
        else:
            assert draft.confidence_logits is None


def random_logits(kept, seed=0):
    """Draft, confidence and target logits and gold tokens of 5 blocks of 4 positions, and their supervised lengths."""
    torch.manual_seed(seed)
    vocab, drafted = 24, 24 if kept is None else len(kept)
    draft, confidence = torch.randn(5, 4, drafted) * 2, torch.randn(5, 4) * 2
    return draft, confidence, torch.randn(5, 4, vocab) * 2, torch.randint(vocab, (5, 4)), [4, 1, 3, 2, 4]


@pytest.mark.parametrize("cached_logits", [1, 72, 2**18], ids="{} at once".format)
@pytest.mark.parametrize("with_confidence", [True, False])
@pytest.mark.parametrize("kept", [None, [1, 2, 5, 8, 9, 13, 17, 21]], ids=["whole", "reduced"])
def test_values_and_gradients_equal_float64_loops(kept, with_confidence, cached_logits, monkeypatch):
    monkeypatch.setattr(losses_module, "CACHED_LOGITS", cached_logits)
    draft, confidence, target_logits, gold, lengths = random_logits(kept)
    leaves = [draft, confidence] if with_confidence else [draft]
    doubles = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    supervised = torch.arange(4) < torch.tensor(lengths)[:, None]
    terms = position_losses(
        draft[supervised],
        confidence[supervised] if with_confidence else None,
        soft_labels(target_logits[supervised], kept),
        gold[supervised],
        draft_ids_of(kept, 24),
    )
    weights = position_weights(4, 3.0).expand_as(supervised)[supervised]
    assert not terms.acceptance_rate.requires_grad
    expected = reference_losses(
        doubles[0], doubles[1] if with_confidence else None, target_logits, gold, lengths, (0.3, 0.5, 0.7), 3.0, kept
    )
    close(
        terms.acceptance_rate.double(), torch.tensor(expected.acceptance_rates, dtype=torch.float64), **LOSS_TOLERANCE
    )
    for name in TERMS[1:]:
        loss = (weights * getattr(terms, name)).sum() / weights.sum()
        close(loss.double(), getattr(expected, name), **LOSS_TOLERANCE)
        if name == "confidence" and not with_confidence:
            assert loss == 0
            continue
        actual = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(getattr(expected, name), doubles, retain_graph=True, allow_unused=True)
        for one, other in zip(actual, wanted, strict=True):
            assert (one is None) == (other is None)  # the label has no gradient, so neither term sees the other's leaf
            if one is not None:
                close(one.double(), other, **LOSS_TOLERANCE)


@pytest.mark.parametrize("case", HEADS)
def test_the_loss_of_a_batch_equals_float64_loops(target, case):
    batch = Batch(target, num_anchors=24, **HEADS[case])
    blocks, hidden = batch.forward()
    assert not blocks.block_keep_mask.all()
    config = LossConfig(cross_entropy=0.4, total_variation=0.5, confidence=0.6, loss_decay=2.5)
    actual = draft_losses(batch.drafter, blocks, hidden, batch.features, batch.head, config)
    draft = teacher_forced_draft(batch.drafter, hidden, blocks.previous_ids.flatten(0, 1), batch.head.module)
    supervised = blocks.supervised.flatten(0, 1)
    lengths = supervised.sum(dim=1).tolist()
    spread = torch.zeros(*supervised.shape, VOCAB)
    spread[supervised] = batch.label_logits(blocks)
    expected = reference_losses(
        draft.logits,
        draft.confidence_logits,
        spread,
        blocks.target_ids.flatten(0, 1),
        lengths,
        (0.4, 0.5, 0.6),
        2.5,
        batch.drafter.kept_token_ids,
    )
    for term in TERMS:
        close(getattr(actual, term).double(), getattr(expected, term), **LOSS_TOLERANCE)
    metrics, rates = actual.metrics, iter(expected.acceptance_rates)
    by_block = [[next(rates) for _ in range(length)] for length in lengths]
    assert metrics.supervised.tolist() == [sum(length >= k for length in lengths) for k in range(1, 5)]
    assert float(metrics.tau) == pytest.approx(accepted_length(by_block, 4), rel=1e-5)
    means = [sum(r[k] for r in by_block if len(r) > k) / sum(len(r) > k for r in by_block) for k in range(4)]
    assert metrics.acceptance_by_position.tolist() == pytest.approx(means, rel=1e-5)
    best = draft.logits.argmax(dim=-1)
    best = best if batch.drafter.kept_token_ids is None else batch.drafter.kept_token_ids[best]
    hits = [(best[i] == spread[i].argmax(dim=-1))[:length].tolist() for i, length in enumerate(lengths)]
    assert float(metrics.greedy_tau) == pytest.approx(accepted_length(hits, 4), rel=1e-5)
    assert metrics.greedy_match.tolist() == [sum(row[k] for row in hits if len(row) > k) for k in range(4)]


@pytest.mark.parametrize("case", ["vanilla", "rnn, reduced vocabulary, slot 1"])
def test_dummies_contribute_nothing(target, case):
    batch = Batch(target, **HEADS[case])
    count = 5
    padded = Anchors(
        torch.cat([batch.anchors.columns, torch.zeros(2, count, dtype=torch.long)], dim=1),
        torch.cat([batch.anchors.block_keep_mask, torch.zeros(2, count, dtype=torch.bool)], dim=1),
    )
    without, with_dummies = batch.losses(), batch.losses(padded)
    for term in TERMS:
        close(getattr(with_dummies, term), getattr(without, term), **LOSS_TOLERANCE)
    assert torch.equal(with_dummies.metrics.supervised, without.metrics.supervised)
    for one, other in zip(batch.gradients(with_dummies.total), batch.gradients(without.total), strict=True):
        close(one, other, atol=1e-5, rtol=1e-4)


def test_a_batch_in_parts_adds_up_to_the_whole(target):
    """What ranks and gradient accumulation need: each part is divided by the weight of all."""
    batch = Batch(target)
    columns, keep = batch.anchors.columns, batch.anchors.block_keep_mask
    parts = [Anchors(columns[:, part], keep[:, part]) for part in (slice(0, 1), slice(1, 6))]
    weight = sum(total_position_weight(batch.forward(part)[0].supervised, 4.0) for part in parts)
    whole, pieces = batch.losses(), [batch.losses(part, total_weight=weight) for part in parts]
    for term in TERMS:
        close(sum(getattr(piece, term) for piece in pieces), getattr(whole, term), **LOSS_TOLERANCE)
    summed = batch.gradients(pieces[0].total + pieces[1].total)
    for one, other in zip(summed, batch.gradients(whole.total), strict=True):
        close(one, other, atol=1e-5, rtol=1e-4)
    close(pieces[0].metrics.stacked() + pieces[1].metrics.stacked(), whole.metrics.stacked(), **LOSS_TOLERANCE)


def test_devices_without_that_cache_take_all_positions_at_once():
    assert losses_module._few_positions(torch.empty(5, 2**20, device="meta")) == [slice(0, 5)]
    assert losses_module._few_positions(torch.empty(0, 5, device="meta")) == []


def test_a_perfect_drafter_loses_nothing_but_the_entropy():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    terms = position_losses(logits, None, soft_labels(logits), logits.argmax(dim=-1))
    assert terms.matches.all()
    close(terms.total_variation, torch.zeros(6), atol=1e-6, rtol=0)
    close(terms.acceptance_rate, torch.ones(6), atol=1e-6, rtol=0)
    metrics = draft_metrics(torch.ones(2, 3, dtype=torch.bool), torch.ones(6), torch.ones(6, dtype=torch.bool))
    assert metrics.tau == metrics.greedy_tau == 4


def test_tokens_that_cannot_be_drafted_count_in_the_distance_and_not_in_the_cross_entropy():
    target_logits = torch.tensor([[-90.0, 0.1, 0.0, -90.0], [0.0, -90.0, -90.0, 0.0]])
    labels, draft_ids = soft_labels(target_logits, [0, 3]), draft_ids_of([0, 3], 4)
    terms = position_losses(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), None, labels, torch.tensor([1, 3]), draft_ids)
    assert terms.matches.tolist() == [False, True]
    close(terms.total_variation, torch.tensor([2.0, 0.0]), atol=1e-6, rtol=0)
    close(terms.acceptance_rate, torch.tensor([0.0, 1.0]), atol=1e-6, rtol=0)
    close(terms.cross_entropy, torch.tensor([0.0, math.log(2)]), atol=1e-6, rtol=0)
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    terms = position_losses(torch.zeros(1, 2), None, soft_labels(p.log(), [0, 3]), torch.tensor([3]), draft_ids)
    close(terms.total_variation, torch.tensor([0.4 + 0.2 + 0.3 + 0.1]))


def test_only_the_drafter_gets_gradients_and_every_part_of_it(target):
    batch = Batch(target, markov_head_type="rnn")
    gradients = batch.gradients(batch.losses().total)
    names = [name for name, _ in batch.drafter.named_parameters()]
    assert [n for n, g in zip(names, gradients, strict=True) if g is None or not g.abs().sum() > 0] == []
    labels = aligned_soft_labels(batch.features, batch.head, label_tokens(batch.forward()[0]))
    assert not labels.probs.requires_grad


def test_a_position_that_is_not_supervised_changes_nothing(target):
    batch = Batch(target)
    before = batch.losses().total
    batch.input_ids = torch.where(batch.sequence_ids == 0, 5, batch.input_ids)
    padding = batch.sequence_ids[..., None] == 0
    taps, last_hidden = batch.features.taps, batch.features.last_hidden_states
    batch.features = replace(
        batch.features,
        taps=taps.masked_fill(padding, torch.nan),
        last_hidden_states=last_hidden.masked_fill(padding, torch.nan),
    )
    after = batch.losses().total
    assert torch.equal(before, after)
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients(after))


@pytest.mark.parametrize("case", HEADS)
def test_losses_are_float32_under_autocast_and_close_to_the_exact_ones(target, case):
    batch = Batch(target, **HEADS[case])
    exact = batch.losses()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = batch.losses()
    for term in TERMS:
        assert getattr(rounded, term).dtype == torch.float32
        # Logits of order 10 in bfloat16 are off by up to 0.03.
        close(getattr(rounded, term), getattr(exact, term), atol=0, rtol=0.03)


def test_position_weights_decay_from_one():
    close(position_weights(4, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5), math.exp(-0.75)]))
    assert position_weights(3, math.inf).tolist() == [1.0, 1.0, 1.0]
    supervised = torch.tensor([[[True, True, False], [True, False, False]]])
    assert float(total_position_weight(supervised, 4.0)) == pytest.approx(2 + math.exp(-0.25))


def test_metrics_of_positions_that_nothing_reaches_are_nan_and_leave_tau_alone():
    supervised = torch.tensor([[True, False], [True, False]])
    metrics = draft_metrics(supervised, torch.tensor([0.5, 1.0]), torch.tensor([True, False]))
    assert metrics.tau == 1.75
    assert metrics.greedy_tau == 1.5
    assert metrics.greedy_acceptance_by_position.isnan().tolist() == [False, True]


def test_defaults_are_the_papers():
    assert LossConfig() == LossConfig(cross_entropy=0.1, total_variation=0.9, confidence=1.0, loss_decay=4.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cross_entropy": -0.1}, "must not be negative"),
        ({"cross_entropy": 0.0, "total_variation": 0.0, "confidence": 0.0}, "one must be positive"),
        ({"confidence": math.nan}, "must not be negative"),
        ({"loss_decay": 0.0}, "`loss_decay` must be positive"),
    ],
)
def test_impossible_weights_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


def test_a_batch_without_supervision_is_refused_unless_its_weight_is_given(target):
    batch = Batch(target)
    nothing = Anchors(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="No position of this batch is supervised"):
        batch.losses(nothing)
    losses = batch.losses(nothing, total_weight=7.0)  # another rank has supervised positions
    assert losses.total == 0


@pytest.mark.parametrize("blocks_per_chunk", [1, 5])
@pytest.mark.parametrize("case", HEADS)
def test_chunks_bound_the_logits_and_change_no_number(target, monkeypatch, case, blocks_per_chunk):
    batch = Batch(target, num_anchors=24, **HEADS[case])
    blocks, hidden = batch.forward()
    supervised = blocks.supervised.clone()
    supervised[0, 2:9] = False  # whole chunks have nothing to learn from
    blocks, kept = replace(blocks, supervised=supervised), int(blocks.block_keep_mask.sum())
    sizes = []

    def counted(drafter, hidden_states, *args):
        sizes.append(len(hidden_states))
        return teacher_forced_draft(drafter, hidden_states, *args)

    def values_and_gradients():
        losses = draft_losses(batch.drafter, blocks, hidden, batch.features, batch.head)
        gradients = torch.autograd.grad(losses.total, [hidden, *heads], retain_graph=True)
        return [*(getattr(losses, term) for term in TERMS), losses.metrics.stacked(), *gradients]

    monkeypatch.setattr(losses_module, "teacher_forced_draft", counted)
    heads = [weight for name, weight in batch.drafter.named_parameters() if name.split(".")[0].endswith("_head")]
    expected = values_and_gradients()
    assert sizes == [kept]  # one chunk is computed once
    sizes.clear()
    config = batch.drafter.config
    limit = blocks_per_chunk * config.block_size * config.draft_vocab_size
    monkeypatch.setattr(losses_module, "LOGITS_PER_CHUNK", limit)
    close(values_and_gradients(), expected, atol=1e-6, rtol=1e-5)
    assert max(sizes) == blocks_per_chunk
    assert sum(sizes) == 2 * kept  # each once more in backward
    sizes.clear()
    with torch.no_grad():
        draft_losses(batch.drafter, blocks, hidden, batch.features, batch.head)
    assert sum(sizes) == kept


@pytest.mark.parametrize("reason", ["dummies", "no supervision"])
@pytest.mark.parametrize("case", [*HEADS, "own embedding and head"])
def test_every_parameter_gets_a_gradient_where_a_rank_has_nothing_to_learn_from(target, monkeypatch, case, reason):
    """What DDP waits for."""
    batch = Batch(target, **HEADS.get(case, {"has_embedding": True, "has_lm_head": True}))
    objective = DraftObjective(batch.drafter, target, LossConfig())
    nothing = Anchors(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    blocks, _ = batch.forward(nothing if reason == "dummies" else None)
    blocks = replace(blocks, supervised=torch.zeros_like(blocks.supervised))
    for limit in (losses_module.LOGITS_PER_CHUNK, 1):
        monkeypatch.setattr(losses_module, "LOGITS_PER_CHUNK", limit)
        objective.zero_grad()
        objective(blocks, batch.features, torch.tensor(7.0)).total.backward()
        missing = [name for name, weight in objective.named_parameters() if weight.grad is None or weight.grad.any()]
        assert missing == []


def test_heads_that_do_not_fit_are_refused(target):
    batch = Batch(target, draft_vocab_size=40)
    blocks, hidden = batch.forward()
    with pytest.raises(ValueError, match="pass `lm_head`"):
        teacher_forced_draft(batch.drafter, hidden, blocks.previous_ids.flatten(0, 1))
    labels, gold = soft_labels(torch.zeros(2, VOCAB)), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="one logit for each token"):
        position_losses(torch.zeros(2, 40), None, labels, gold)
    with pytest.raises(ValueError, match="one logit for each token"):
        position_losses(torch.zeros(3, VOCAB), None, labels, gold)
    with pytest.raises(ValueError, match="gives 40 logits.*got 64"):
        draft_losses(batch.drafter, blocks, hidden, batch.features, TargetHead(target))
