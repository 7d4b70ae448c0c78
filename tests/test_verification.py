"""Verifying tokens in slots equals a plain forward over each row's text, and what cannot be verified is refused by name."""

import pytest
import torch
import transformers
from conftest import FAMILIES, MIXED_LAYERS, VOCAB, left_padded, make_drafter, make_target
from transformers import DynamicCache, PreTrainedConfig

from dspark_hf.caches import BUCKET, SlotCache
from dspark_hf.drafting import Context, Drafting
from dspark_hf.taps import TapRecorder
from dspark_hf.verification import Verifier, cache_argument, check_verifiable, mask_windows


TOLERANCE = 1e-4  # float32: kernels of different width round differently; logits are of order 10
WINDOW = 8  # of the sliding families in conftest


class Rows:
    """Rows of random text behind left padding, verified part by part against plain forwards over the whole rows."""

    def __init__(self, target, lengths, garbage_seed=0, **model_kwargs):
        self.target, self.lengths = target, list(lengths)
        self.columns = max(lengths)
        inputs = left_padded(lengths)
        self.texts = [inputs["input_ids"][row, -length:].tolist() for row, length in enumerate(lengths)]
        self.garbage = torch.Generator().manual_seed(garbage_seed)
        self.new = torch.Generator().manual_seed(1)
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        host = DynamicCache(config=target.config)
        target(**inputs, position_ids=positions, **{cache_argument(): host}, **model_kwargs)
        self.cache = SlotCache(len(host.layers))
        self.cache.read_host(host, self.columns)
        kwargs = {"position_ids": positions, "attention_mask": mask, **model_kwargs}
        self.verifier = Verifier(target, self.cache, mask.bool(), kwargs)

    @property
    def slots(self) -> torch.Tensor:
        """Slot of each row's next token."""
        padding = [self.columns - length for length in self.lengths]
        return torch.tensor([len(text) + pad for text, pad in zip(self.texts, padding, strict=True)])

    def verify(self, *widths: int, keep: tuple[int, ...] | None = None, columns: int | None = None):
        """Verify `widths[r]` new tokens of each row in one forward of `columns`; the texts keep the first `keep[r]`.

        Returns the new tokens of each row and the verification.
        """
        columns = columns or max(widths)
        tokens = torch.randint(3, VOCAB, (len(widths), columns), generator=self.garbage)
        new = [torch.randint(3, VOCAB, (width,), generator=self.new) for width in widths]
        for row, own in enumerate(new):
            tokens[row, : len(own)] = own
        slots = self.slots[:, None] + torch.arange(columns)
        used = int(slots.max()) + 1
        verification = self.verifier(tokens, slots, used, torch.tensor(widths))
        kept = widths if keep is None else keep
        for text, own, count in zip(self.texts, new, kept, strict=True):
            text += own[:count].tolist()
        return new, verification

    def check(self, *widths: int, **kwargs):
        """Verify, and compare every row with a plain forward over its text."""
        before = [list(text) for text in self.texts]
        new, verification = self.verify(*widths, **kwargs)
        for row, (text, own) in enumerate(zip(before, new, strict=True)):
            expected = self.target(torch.tensor([text + own.tolist()])).logits[0, len(text) :]
            torch.testing.assert_close(verification.logits[row, : len(own)], expected, atol=TOLERANCE, rtol=0)
        return verification


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("prompt", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_slots_give_the_logits_of_a_plain_forward(family, prompt):
    rows = Rows(make_target(family), [prompt])
    rows.check(1)
    rows.check(5)
    rows.check(WINDOW + 3)
    rows.check(1)


@pytest.mark.parametrize("lengths", [(7, 4, 1), (12, 3, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_behind_padding_equal_each_row_alone(family, lengths):
    rows = Rows(make_target(family), lengths)
    rows.check(5, 3, 1, keep=(2, 3, 1))
    rows.check(1, 5, 4, keep=(1, 0, 4))
    rows.check(3, 1, 5, keep=(1, 1, 5))
    rows.check(1, 1, 1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_both_attention_implementations_take_the_masks(family, implementation):
    target = make_target(family)
    target.set_attn_implementation(implementation)
    rows = Rows(target, [7, 4])
    rows.check(5, 3, keep=(2, 3))
    rows.check(4, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_beyond_a_rows_width_leave_no_trace(family):
    target, results = make_target(family), []
    for seed in (0, 1):
        rows = Rows(target, [7, 2], garbage_seed=seed)
        first = rows.verify(5, 1, columns=6, keep=(1, 1))[1].logits
        second = rows.verify(1, 3, columns=4)[1].logits
        third = rows.verify(2, 2)[1].logits
        results.append([first[0, :5], first[1, :1], second[0, :1], second[1, :3], third])
    # Bit for bit, except where all rows share the experts' matrix products: their height, and so their rounding, changes.
    tolerance = 1e-5 if family == "qwen3_moe" else 0.0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rejected_tokens_leave_no_trace(family):
    """A rejected token's key stays in its slot until it is overwritten; nobody sees it."""
    rows = Rows(make_target(family), [5, 9])
    rows.check(6, 6, keep=(0, 3))
    rows.check(1, 1)
    rows.check(6, 6, keep=(6, 0))
    rows.check(2, 2)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_buffer_grows_while_verifying(family):
    target = make_target(family, max_position_embeddings=2 * BUCKET)
    rows = Rows(target, [BUCKET - 4, BUCKET - 9])
    assert rows.cache.capacity == BUCKET
    rows.check(5, 2)
    rows.check(4, 5)
    assert rows.cache.capacity > BUCKET


def test_columns_beyond_a_rows_width_need_no_position_beyond_the_table():
    """A learned position table ends; the columns that pad a row's verification must not run over its end."""
    rows = Rows(make_target("gpt2", n_positions=32, max_position_embeddings=32), [29, 4])
    rows.check(3, 6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_taps_of_verified_tokens_are_those_of_a_plain_forward(family):
    target = make_target(family)
    rows = Rows(target, [7, 3])
    with TapRecorder(target, [-1, 2], torch.device("cpu"), torch.float32) as recorder:
        new, _ = rows.verify(4, 2)
        taps = recorder.take()
        for row, own in enumerate(new):
            target(torch.tensor([rows.texts[row]]))
            expected = recorder.take()[0, -len(own) :]
            torch.testing.assert_close(taps[row, : len(own)], expected, atol=TOLERANCE, rtol=0)


def test_token_types_go_on_as_the_host_continues_them():
    target = make_target("gpt2")
    types = torch.tensor([[4, 4, 5, 5, 6]])
    rows = Rows(target, [5], token_type_ids=types)
    before = list(rows.texts[0])
    new, verification = rows.verify(3)
    text = torch.tensor([before + new[0].tolist()])
    expected = target(text, token_type_ids=torch.cat([types, types[:, -1:].expand(1, 3)], dim=1)).logits[:, 5:]
    torch.testing.assert_close(verification.logits, expected, atol=TOLERANCE, rtol=0)


def test_logits_are_float32_whatever_the_target_computes_in():
    rows = Rows(make_target().to(torch.bfloat16), [5, 3])
    _, verification = rows.verify(3, 2)
    assert verification.logits.dtype == torch.float32
    assert verification.logits.isfinite().all()


# Host syncs


META = torch.device("meta")


def test_meta_tensors_refuse_to_be_waited_for():
    """The tests below run without data, so whatever reads a value or makes a shape of values fails."""
    for wait in (lambda t: t.item(), lambda t: t.tolist(), lambda t: bool(t.any()), torch.nonzero, lambda t: t[t > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait(torch.ones(1, device=META))


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name != "qwen3_moe"]
)  # experts are routed by the host
def test_verifying_waits_for_nothing(family):
    target = make_target(family).to(META)
    positions = torch.arange(7, device=META).expand(2, -1)
    prompt_mask = torch.ones(2, 7, dtype=torch.bool, device=META)
    verifier = Verifier(target, SlotCache(4), prompt_mask, {"position_ids": positions})
    slots = torch.arange(7, 10, device=META).expand(2, -1)
    tokens, widths = torch.ones_like(slots), torch.tensor([3, 2], device=META)
    assert verifier(tokens, slots, 10, widths).logits.shape == (2, 3, VOCAB)


@pytest.mark.parametrize("overrides", [{}, {"draft_vocab_size": 20}, {"markov_head_type": "rnn"}])
def test_drafting_waits_for_nothing(overrides):
    target = make_target().to(META)
    drafter = make_drafter(make_target(), **overrides).to(META)
    drafting = Drafting(drafter, target, torch.ones(2, 5, dtype=torch.bool, device=META), 0)
    taps = torch.ones(2, 5, drafter.fc.in_features, device=META)
    anchors, counts = torch.tensor([7, 8], device=META), torch.tensor([5, 5], device=META)

    def choose(index, logits, drafted):
        assert drafted.shape[1] == index
        return logits.argmax(dim=-1), logits.softmax(dim=-1)

    drafting.observe(Context(taps, torch.arange(5, device=META).expand(2, -1), counts))
    assert drafting.draft(anchors, counts, 9, 4, choose).tokens.shape == (2, 4)


# Masks by configuration


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {}, None),
        ("gpt2", {}, None),
        ("mistral", {}, WINDOW),
        ("mistral", {"sliding_window": None}, None),
        ("qwen3", {}, {"full_attention": None}),
        ("gemma2", {}, {"full_attention": None, "sliding_attention": WINDOW}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 4}, {"sliding_attention": WINDOW}),
        (
            "qwen3",
            {"layer_types": MIXED_LAYERS, "use_sliding_window": True, "sliding_window": 5},
            {"full_attention": None, "sliding_attention": 5},
        ),
    ],
)
def test_masks_follow_the_layer_types_or_the_window(family, overrides, expected):
    assert mask_windows(make_target(family, **overrides).config) == expected


def test_layer_types_without_a_mask_are_refused_by_name():
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    assert mask_windows(config) is None
    config.layer_types = ["linear_attention", "sliding_attention", "full_attention", "linear_attention"]
    with pytest.raises(
        NotImplementedError, match=r"layer types \['sliding_attention'\] of 'qwen3_next'.* generate\(\)"
    ):
        mask_windows(config)


def test_chunked_attention_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="chunked"):
        mask_windows(transformers.Llama4TextConfig(num_hidden_layers=4))
    config = PreTrainedConfig(attention_chunk_size=16)
    with pytest.raises(NotImplementedError, match="chunked attention .* without `assistant_model`"):
        mask_windows(config)


# Targets that cannot be verified


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_targets_are_accepted(family):
    check_verifiable(make_target(family))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_attention_without_additive_masks_is_refused_with_the_remedy(implementation):
    target = make_target()
    target.config._attn_implementation_internal = implementation
    with pytest.raises(NotImplementedError, match=r"additive mask.*set_attn_implementation\('sdpa'\)") as error:
        check_verifiable(target)
    assert repr(implementation) in str(error.value)
    target.set_attn_implementation("sdpa")
    check_verifiable(target)


def _tiny(name: str, **fields):
    config = getattr(transformers, f"{name}Config")(**fields)
    model = {"T5": "T5ForConditionalGeneration"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, model)(config)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "T5",
            {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32},
            "is an encoder",
        ),
        ("Mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}, "keeps a recurrent state"),
        ("Bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32}, "takes no `position_ids`"),
    ],
)
def test_targets_that_slots_cannot_hold_are_refused_by_name(name, fields, message):
    with pytest.raises(NotImplementedError, match=rf"{name}For\w+ {message}.* Call generate\(\) without"):
        check_verifiable(_tiny(name, **fields))
