"""Sampling through `generate(assistant_model=drafter)` follows the target's own law, which is enumerated exactly.

A tiny target of 6 tokens writes 6 more; its law over all 6 ** 6 continuations comes from its plain forward and the
settings' processors. Samples are compared at each place and over each 3 consecutive tokens, for each of three prompts
of one left-padded batch and pooled over them.

False failures: a test fails below p = 1e-9. The suite looks at about 550 p-values, so under fresh seeds it fails for no
reason less than once in 10 ** 6 runs by the chi-square approximation, and less than once in 10 ** 3 even if every
p-value were as far off as the worst can be (see `reference/chi_square.py`). Seeds are fixed, so a pass is repeatable.

Power: over 20 000 samples of 8 equally likely tokens, moving 0.02 of probability from one token to another gives
non-centrality 128 and is caught in more than 99.9 % of runs (simulated below). Slips that are easy to make fail the same
tests with fewer samples than the right implementation gets (p below 1e-15).
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from conftest import make_drafter, make_target
from reference.chi_square import ChiSquare, chi_square, conditional_chi_square, count
from reference.enumeration import conditional_laws, exact_law, marginal, prefix_logits
from transformers import LogitsProcessor

from dspark_hf import DSparkDraftModel
from dspark_hf.acceptance import Acceptance
from dspark_hf.metrics import DecodingStatistics
from dspark_hf.modeling.modeling_dspark import DSparkDraft


FAIL_BELOW = 1e-9
VOCAB = 6
NEW_TOKENS = 6
BLOCK = 4
OFF = {"top_k": 0}  # the host's default is 50
PROMPTS = torch.tensor([[0, 0, 0, 1, 4], [0, 2, 5, 3, 3], [3, 1, 2, 4, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
PLACES = [(place,) for place in range(NEW_TOKENS)] + [(first, first + 1, first + 2) for first in range(NEW_TOKENS - 2)]
ENOUGH = 300  # how often each thing must have happened before a test says anything about it


@dataclass
class Samples:
    """`tokens` is `(prompts, repeats, NEW_TOKENS)`."""

    tokens: torch.Tensor
    statistics: DecodingStatistics

    def accepted(self, k: int) -> int:
        return sum(record.accepted >= k for record in self.statistics.records)

    def rejected(self, k: int) -> int:
        return sum(record.accepted == k - 1 and record.verified >= k for record in self.statistics.records)

    def accepted_all(self) -> int:
        return sum(record.accepted == record.verified == BLOCK for record in self.statistics.records)


# Targets and drafters


@functools.cache
def tiny_target(order_one: bool = False):
    """A target over 6 tokens without an end; `order_one` makes it look at its last token alone."""
    target = make_target(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        max_position_embeddings=4096,
    )
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(0.5)  # many sequences are likely enough to be counted
        if order_one:
            for layer in target.model.layers:
                layer.self_attn.o_proj.weight.zero_()
    return target


def random_drafter(target, **overrides) -> DSparkDraftModel:
    """A drafter that knows nothing; its confidence depends on the token before through random Markov features."""
    return make_drafter(target, num_hidden_layers=1, block_size=BLOCK, markov_rank=VOCAB, **overrides)


def good_drafter(target, **overrides) -> DSparkDraftModel:
    """A drafter near the target: its Markov head holds the target's mean logits after each token.

    A little of the random backbone remains, and the confidence depends on the token before.
    """
    drafter = random_drafter(target, **overrides)
    torch.manual_seed(0)
    text = torch.randint(0, VOCAB, (300, 10))
    with torch.no_grad():
        logits = target(text).logits[:, 3:].flatten(0, 1)
        last = text[:, 3:].flatten()
        table = torch.stack([logits[last == token].mean(dim=0) for token in range(VOCAB)])  # (previous, next)
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.copy_(table.T)
        drafter.norm.weight.fill_(0.3)
        drafter.confidence_head.proj.weight[0, -VOCAB:] = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 1.0])
        drafter.confidence_head.proj.bias.zero_()
    return drafter


DRAFTERS = {"random": random_drafter, "good": good_drafter}


def with_options(drafter: DSparkDraftModel, cap: int | None = None, threshold: float | None = None):
    """Set the options of a drafter."""
    drafter.generation_config.num_assistant_tokens = cap
    if threshold is not None:
        drafter.generation_config.num_assistant_tokens_schedule = "threshold"
        drafter.generation_config.assistant_confidence_threshold = threshold
    return drafter


# Samples, laws and tests


def sample(target, drafter: DSparkDraftModel, repeats: int, seed: int = 0, **settings) -> Samples:
    torch.manual_seed(seed)
    output = target.generate(
        PROMPTS,
        attention_mask=MASK,
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=repeats,
        return_dict_in_generate=True,
        **(OFF | settings),
    )
    new = output.sequences[:, PROMPTS.shape[1] :]
    return Samples(new.view(len(PROMPTS), repeats, NEW_TOKENS), output.statistics)


@functools.cache
def _prefix_logits(row: int) -> list[torch.Tensor]:
    return prefix_logits(tiny_target(), PROMPTS[row], MASK[row], NEW_TOKENS)


def p_values(tokens: torch.Tensor, settings: dict) -> dict[str, float]:
    """p-values of samples `(prompts, N, NEW_TOKENS)`: each place and each 3 tokens, each prompt and pooled."""
    laws = [exact_law(PROMPTS[row], MASK[row], _prefix_logits(row), settings) for row in range(len(tokens))]
    found = {}
    for places in PLACES:
        tests = [
            chi_square(count(of_row[:, places], VOCAB), marginal(law, places))
            for of_row, law in zip(tokens, laws, strict=True)
        ]
        found |= {f"tokens {places} after prompt {row}": test.p_value for row, test in enumerate(tests)}
        found[f"tokens {places}, pooled"] = sum(tests, ChiSquare(0.0, 0)).p_value
    return found


def assert_follows(found: dict[str, float]) -> None:
    worst = min(found, key=found.__getitem__)
    assert found[worst] >= FAIL_BELOW, f"{worst}: p = {found[worst]:.1e}"


def assert_deviates(found: dict[str, float]) -> None:
    assert min(found.values()) < FAIL_BELOW


# The oracle and the test themselves


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.3, "temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_enumerated_laws_are_those_of_plain_generate(settings):
    target = tiny_target()
    output = target.generate(
        PROMPTS,
        attention_mask=MASK,
        do_sample=True,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
        **(OFF | settings),
    )
    new = output.sequences[:, PROMPTS.shape[1] :]
    for row in range(len(PROMPTS)):
        law = exact_law(PROMPTS[row], MASK[row], _prefix_logits(row), settings)
        torch.testing.assert_close(law.sum(), torch.ones((), dtype=torch.float64))
        for place, scores in enumerate(output.scores):
            after_prefix = marginal(law[tuple(new[row, :place])], (0,))
            torch.testing.assert_close(
                after_prefix / after_prefix.sum(), scores[row].double().softmax(dim=-1), atol=1e-5, rtol=0
            )
        conditional = conditional_laws(target, output.sequences[row : row + 1], MASK[row], settings)
        expected = torch.stack(output.scores, dim=1)[row : row + 1].double().softmax(dim=-1)
        torch.testing.assert_close(conditional, expected, atol=1e-5, rtol=0)


def test_a_bias_of_two_hundredths_is_caught_and_none_is_not():
    torch.manual_seed(0)
    law = torch.full((8,), 1 / 8, dtype=torch.float64)
    biased = law + torch.tensor([0.02, -0.02, 0, 0, 0, 0, 0, 0], dtype=torch.float64)

    def simulate(true_law: torch.Tensor) -> torch.Tensor:
        draws = torch.multinomial(true_law.expand(300, -1), 20_000, replacement=True)
        return torch.tensor([chi_square(row.bincount(minlength=8), law).p_value for row in draws])

    assert simulate(biased).max() < FAIL_BELOW
    right = simulate(law)
    assert right.min() > 1e-5
    assert 0.4 < right.mean() < 0.6  # p-values are uniform


def test_conditional_test_has_uniform_p_values_and_catches_a_bias():
    torch.manual_seed(0)
    laws = (2 * torch.randn(3000, VOCAB, dtype=torch.float64)).softmax(dim=-1)
    bins = torch.randint(0, 3, (3000,))
    right = [conditional_chi_square(torch.multinomial(laws, 1)[:, 0], laws, bins).p_value for _ in range(200)]
    assert min(right) > 1e-4
    assert 0.4 < sum(right) / 200 < 0.6
    biased = laws * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.8])
    assert conditional_chi_square(torch.multinomial(biased, 1)[:, 0], laws, bins).p_value < FAIL_BELOW


# Lossless sampling, ragged batch


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("random", {}, {}),
        ("good", {}, {}),
        ("good", {"cap": 2}, {"temperature": 0.7}),
        ("random", {"threshold": 0.5}, {"top_k": 3}),
        ("good", {}, {"top_p": 0.8}),
        ("random", {"cap": 2}, {"min_p": 0.15}),
        ("good", {}, {"repetition_penalty": 1.5}),
        ("good", {"threshold": 0.5}, {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3}),
        ("random", {"threshold": 0.5}, {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.5}),
    ],
)
def test_sampled_text_follows_the_targets_law(kind, options, settings):
    drafter = with_options(DRAFTERS[kind](tiny_target()), **options)
    samples = sample(tiny_target(), drafter, 2500, **settings)
    assert_follows(p_values(samples.tokens, settings))
    if kind == "good":
        for k in range(1, options.get("cap", 3) + 1):
            assert samples.accepted(k) >= ENOUGH
            assert samples.rejected(k) >= ENOUGH
    if "threshold" in options:
        assert sum(rounds >= ENOUGH for rounds in samples.statistics.verification_lengths) >= 3
    if not options:
        assert samples.accepted_all() >= ENOUGH or kind == "random"


def test_many_samples_follow_the_targets_law_position_by_position():
    drafter = with_options(good_drafter(tiny_target()), threshold=0.5)
    samples = sample(tiny_target(), drafter, 7000)
    assert_follows(p_values(samples.tokens, {}))
    assert all(samples.accepted(k) >= ENOUGH and samples.rejected(k) >= ENOUGH for k in (1, 2, 3))


# Lossless sampling, few rows and long texts


class Untouched(LogitsProcessor):
    """Changes nothing, but is the user's own: tokens are then committed one at a time."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


def write_text(target, drafter, rows: int, new_tokens: int, token_by_token: bool, seed: int = 0, **settings):
    """Continue the last `rows` prompts; `token_by_token` through a processor of the user's own."""
    torch.manual_seed(seed)
    own = Untouched()
    output = target.generate(
        PROMPTS[-rows:],
        attention_mask=MASK[-rows:],
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        logits_processor=[own] if token_by_token else None,
        **(OFF | settings),
    )
    assert own.calls == (new_tokens if token_by_token else 0)
    return output


@functools.cache
def _transition_laws(settings: tuple) -> torch.Tensor:
    """Law of the next three tokens after each token, `(V, V ** 3)`, for the target that looks at no more."""
    target, one = tiny_target(order_one=True), torch.ones(1, dtype=torch.long)
    prompts = torch.arange(VOCAB)[:, None]
    laws = [exact_law(prompt, one, prefix_logits(target, prompt, one, 3), dict(settings)) for prompt in prompts]
    return torch.stack(laws).flatten(1)


def transition_p_values(text: torch.Tensor, settings: dict) -> dict[str, float]:
    """p-values of one text `(T,)` of the order-one target: its transitions, and its sequences of three tokens."""
    laws = _transition_laws(tuple(settings.items()))
    next_token = laws.view(VOCAB, VOCAB, -1).sum(dim=-1)
    threes = text[1 : 1 + (len(text) - 1) // 3 * 3].view(-1, 3)
    before_threes = text[:-1:3][: len(threes)]
    codes = (threes * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    return {
        "transitions": conditional_chi_square(text[1:], next_token[text[:-1]], bins=text[:-1]).p_value,
        "three tokens": conditional_chi_square(codes, laws[before_threes], bins=codes.new_zeros(len(codes))).p_value,
    }


@pytest.mark.parametrize(
    ("rows", "token_by_token", "kind", "options", "settings"),
    [
        (1, False, "good", {}, {}),
        (1, False, "random", {"threshold": 0.5}, {"temperature": 0.7, "top_k": 4}),
        (1, True, "good", {"threshold": 0.5}, {"temperature": 1.3, "top_p": 0.9}),
        (3, False, "good", {"threshold": 0.5}, {"top_p": 0.9}),
        (3, True, "good", {"threshold": 0.3}, {"min_p": 0.05}),
    ],
)
def test_long_texts_of_few_rows_follow_the_law_of_an_order_one_target(rows, token_by_token, kind, options, settings):
    target = tiny_target(order_one=True)
    drafter = with_options(DRAFTERS[kind](target), **options)
    output = write_text(target, drafter, rows, 1200 if kind == "good" else 600, token_by_token, **settings)
    for text in output.sequences[:, PROMPTS.shape[1] - 1 :]:
        assert_follows(transition_p_values(text, settings))
    if kind == "good":
        assert_deep(output.statistics, ENOUGH // 10)


def assert_deep(statistics: DecodingStatistics, least: int) -> None:
    """Positions 1 to 3 were accepted, and drafts rejected, at least so often."""
    records = statistics.records
    assert all(record.accepted <= record.verified for record in records)
    for k in (1, 2, 3):
        assert sum(record.accepted >= k for record in records) >= least
    assert sum(record.accepted < record.verified for record in records) >= least


@pytest.mark.parametrize(
    ("rows", "token_by_token", "options", "settings"),
    [
        (1, False, {"threshold": 0.5}, {"repetition_penalty": 1.3}),
        (1, True, {}, {"temperature": 1.2, "repetition_penalty": 1.3}),
        (3, True, {}, {"top_k": 5, "repetition_penalty": 1.3}),
    ],
)
def test_every_token_of_few_rows_follows_the_law_given_its_history(rows, token_by_token, options, settings):
    target, calls, new_tokens = tiny_target(), 30, 24
    drafter = with_options(good_drafter(target), **options)
    outputs = [
        write_text(target, drafter, rows, new_tokens, token_by_token, seed, **settings) for seed in range(calls)
    ]
    assert_deep(sum_of(outputs), ENOUGH // 10)
    for row in range(rows):
        texts = torch.stack([output.sequences[row] for output in outputs])
        assert_follows({f"row {row}": history_p_value(texts, MASK[-rows:][row], settings)})


def history_p_value(texts: torch.Tensor, prompt_mask: torch.Tensor, settings: dict) -> float:
    """p-value of texts `(N, L)` with the same prompt, each token given its history, grouped by the token before."""
    columns = len(prompt_mask)
    laws = conditional_laws(tiny_target(), texts, prompt_mask, settings)
    before = texts[:, columns - 1 : -1].flatten()
    return conditional_chi_square(texts[:, columns:].flatten(), laws.flatten(0, 1), before).p_value


def sum_of(outputs: list) -> DecodingStatistics:
    records = [record for output in outputs for record in output.statistics.records]
    return DecodingStatistics(BLOCK, records)


# Negative controls: the same tests fail on slips that are easy to make


class Redrawing(DSparkDraftModel):
    """Draws each token through `redraw(choose, index, logits, drafted)`."""

    redraw = None

    def draft(self, hidden_states, anchor, choose, *rest):
        def redraw(index, logits, drafted):
            return self.redraw(choose, index, logits, drafted)

        return super().draft(hidden_states, anchor, redraw, *rest)


def faithful(choose, index, logits, drafted):
    """Draw twice and keep the second token: no slip."""
    choose(index, logits, drafted)
    return choose(index, logits, drafted)


def drawn_colder_than_declared(choose, index, logits, drafted):
    return choose(index, 1.5 * logits, drafted)[0], choose(index, logits, drafted)[1]


def drawn_from_top_k_of_declared(choose, index, logits, drafted):
    lowest = logits.topk(3).values[:, -1:]
    return choose(index, logits.masked_fill(logits < lowest, -torch.inf), drafted)[0], choose(index, logits, drafted)[
        1
    ]


def drawn_greedily(choose, index, logits, drafted):
    return logits.argmax(dim=-1), choose(index, logits, drafted)[1]


def raw_declared_for_processed(choose, index, logits, drafted):
    """Transformers issue 47932."""
    return choose(index, logits, drafted)[0], logits.softmax(dim=-1)


@pytest.mark.parametrize(
    ("redraw", "settings", "lossless"),
    [
        (faithful, {}, True),
        (drawn_colder_than_declared, {}, False),
        (drawn_from_top_k_of_declared, {}, False),
        (drawn_greedily, {}, False),
        (raw_declared_for_processed, {"top_k": 3}, False),
    ],
)
def test_q_that_is_not_the_law_drawn_from_is_caught(redraw, settings, lossless):
    drafter = good_drafter(tiny_target())
    drafter.__class__, drafter.redraw = Redrawing, redraw
    found = p_values(sample(tiny_target(), drafter, 1500, **settings).tokens, settings)
    (assert_follows if lossless else assert_deviates)(found)


class Anticipating(DSparkDraftModel):
    """Gives confidences that depend on the token they decide about."""

    anticipate = None

    def draft(self, hidden_states, anchor, choose, *rest):
        drawn = super().draft(hidden_states, anchor, choose, *rest)
        return DSparkDraft(tokens=drawn.tokens, probs=drawn.probs, confidence_logits=self.anticipate(drawn))


def own_probability(drawn: DSparkDraft) -> torch.Tensor:
    """The host's rule for `assistant_confidence_threshold`."""
    return drawn.probs.gather(-1, drawn.tokens[..., None]).squeeze(-1).logit()


def confidence_of_the_next_position(drawn: DSparkDraft) -> torch.Tensor:
    return torch.cat([drawn.confidence_logits[:, 1:], drawn.confidence_logits[:, -1:]], dim=1)


def confidence_of_the_position_before(drawn: DSparkDraft) -> torch.Tensor:
    """Off by one as well, but lossless."""
    return torch.cat([drawn.confidence_logits[:, :1], drawn.confidence_logits[:, :-1]], dim=1)


@pytest.mark.parametrize(
    ("anticipate", "lossless"),
    [(own_probability, False), (confidence_of_the_next_position, False), (confidence_of_the_position_before, True)],
)
def test_a_threshold_on_what_depends_on_the_token_itself_is_caught(anticipate, lossless):
    drafter = with_options(good_drafter(tiny_target()), threshold=0.3)
    drafter.__class__, drafter.anticipate = Anticipating, anticipate
    samples = sample(tiny_target(), drafter, 1500)
    assert len({record.verified for record in samples.statistics.records}) >= 3
    (assert_follows if lossless else assert_deviates)(p_values(samples.tokens, {}))


def accept_with_residual(of_target: int, of_draft: int):
    """An acceptance rule written once more, whose residual comes from positions shifted by so many."""

    def accept(draft_tokens, draft_probs, target_probs, lengths, sampler):
        rows, positions = draft_tokens.shape
        accepted = torch.zeros(rows, dtype=torch.long)
        going = torch.ones(rows, dtype=torch.bool)
        for k in range(positions):
            q, p = (x[:, k].gather(1, draft_tokens[:, k : k + 1])[:, 0] for x in (draft_probs, target_probs))
            going = going & (lengths > k) & (torch.rand(rows) * q < p)
            accepted += going
        row = torch.arange(rows)
        weights = target_probs[row, (accepted + of_target).clamp(0, positions)]
        if positions > 0:
            q = draft_probs[row, (accepted + of_draft).clamp(0, positions - 1)]
            residual = (weights - q).clamp_min(0)
            weights = torch.where((accepted < lengths)[:, None], residual, target_probs[row, accepted])
        return Acceptance(accepted, sampler.draw(weights))

    return accept


@pytest.mark.parametrize(
    ("of_target", "of_draft", "lossless"),
    [(0, 0, True), (0, -1, False), (0, 1, False), (-1, -1, False), (1, 0, False)],
)
def test_a_residual_from_the_wrong_position_is_caught(monkeypatch, of_target, of_draft, lossless):
    monkeypatch.setattr("dspark_hf.committing.accept", accept_with_residual(of_target, of_draft))
    drafter = good_drafter(tiny_target())
    drafter.markov_head.markov_w2.weight.data.mul_(2)  # sharper than the target: residuals of positions differ
    found = p_values(sample(tiny_target(), drafter, 2500).tokens, {})
    (assert_follows if lossless else assert_deviates)(found)


@pytest.mark.parametrize("token_by_token", [False, True])
def test_a_threshold_on_the_tokens_own_probability_is_caught_at_batch_one(token_by_token):
    target = tiny_target(order_one=True)
    drafter = with_options(good_drafter(target), threshold=0.4)
    drafter.__class__, drafter.anticipate = Anticipating, own_probability
    text = write_text(target, drafter, 1, 700, token_by_token).sequences[0, PROMPTS.shape[1] - 1 :]
    assert_deviates(transition_p_values(text, {}))


@pytest.mark.parametrize("token_by_token", [False, True])
def test_q_that_is_not_the_law_drawn_from_is_caught_at_batch_one(token_by_token):
    target = tiny_target(order_one=True)
    drafter = good_drafter(target)
    drafter.__class__, drafter.redraw = Redrawing, drawn_greedily
    text = write_text(target, drafter, 1, 700, token_by_token).sequences[0, PROMPTS.shape[1] - 1 :]
    assert_deviates(transition_p_values(text, {}))
