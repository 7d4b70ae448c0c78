"""Slots: what is written where, growth, and taking over and giving back every kind of cache that transformers has."""

import pytest
import torch
from conftest import make_target
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, MistralConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from dspark_hf.caches import BUCKET, SlotCache, check_host_cache


ROWS, HEADS, WIDTH, WINDOW, MAX_LENGTH = 2, 2, 4, 8, 40
SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": HEADS}


def states(columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, HEADS, columns, WIDTH, generator=generator)


def slots(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


# Slots


def test_every_row_writes_to_its_own_slots_and_reads_the_used_part():
    cache, keys, values = SlotCache(1), states(2), states(2, seed=1)
    cache.prepare(slots([0, 1], [4, 2]), used=6)
    read_keys, read_values = cache.update(keys, values, 0)
    assert read_keys.shape == read_values.shape == (ROWS, HEADS, 6, WIDTH)
    for read, written in ((read_keys, keys), (read_values, values)):
        assert torch.equal(read[0, :, [0, 1]], written[0])
        assert torch.equal(read[1, :, [4, 2]], written[1])
        assert read[0, :, 2:].abs().sum() == read[1, :, [0, 1, 3, 5]].abs().sum() == 0


def test_a_slot_written_twice_holds_the_last_state():
    cache = SlotCache(1)
    cache.prepare(slots([0, 1], [0, 1]), used=2)
    cache.update(states(2), states(2), 0)
    cache.prepare(slots([1], [0]), used=2)
    later = states(1, seed=1)
    keys, _ = cache.update(later, later, 0)
    assert torch.equal(keys[0, :, 0], states(2)[0, :, 0])
    assert torch.equal(keys[0, :, 1], later[0, :, 0])
    assert torch.equal(keys[1, :, 0], later[1, :, 0])


def test_the_bin_is_never_read():
    cache = SlotCache(1)
    for used in (1, BUCKET - 1, BUCKET, 2 * BUCKET):
        cache.prepare(slots([0], [0]), used)
        assert cache.bin >= used
    cache.slots = torch.tensor([[cache.bin], [cache.bin]])
    keys, _ = cache.update(states(1), states(1), 0)
    assert keys.abs().sum() == 0


def test_growth_keeps_the_content_and_empties_the_bin():
    cache, columns = SlotCache(2), BUCKET - 1
    everywhere = torch.arange(columns).expand(ROWS, -1)
    cache.prepare(everywhere, columns)
    cache.update(states(columns), states(columns, seed=1), 0)  # layer 1 has nothing yet
    cache.prepare(torch.tensor([[cache.bin], [cache.bin]]), columns)
    cache.update(states(1, seed=2), states(1, seed=2), 0)
    before = cache.capacity
    cache.prepare(slots([columns], [columns]), columns + 1)
    assert cache.capacity > before
    assert cache.layers[0].keys[:, :, columns:].abs().sum() == 0
    keys, values = cache.update(states(1, seed=3), states(1, seed=3), 0)
    assert torch.equal(keys[:, :, :columns], states(columns))
    assert torch.equal(values[:, :, :columns], states(columns, seed=1))
    assert torch.equal(keys[:, :, columns:], states(1, seed=3))
    new_keys, _ = cache.update(states(1, seed=3), states(1, seed=3), 1)
    assert new_keys.shape[2] == columns + 1


def test_capacity_grows_by_buckets_and_seldom():
    cache, sizes = SlotCache(1), []
    for used in range(1, 3000):
        cache.reserve(used)
        sizes.append(cache.capacity)
        assert cache.capacity > used
    assert all(size % BUCKET == 0 for size in sizes)
    assert len(set(sizes)) <= 8


def test_slot_caches_answer_what_the_host_asks():
    cache = SlotCache(2)
    cache.prepare(slots([3], [5]), used=6)
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(1, 0) == (6, 0)
    assert not any(cache.is_sliding)


# Caches of transformers

CONFIGS = {
    "full": lambda: LlamaConfig(**SHAPE),
    "sliding": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "mixed": lambda: make_target("gemma2", head_dim=WIDTH).config,
}
KINDS = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=MAX_LENGTH),
}


def host_cache(kind: str, layers: str, *parts: int) -> Cache:
    """A cache of transformers that saw one forward for each of `parts`, of so many columns."""
    cache, seen = KINDS[kind](CONFIGS[layers]()), 0
    for columns in parts:
        for layer in range(len(cache.layers)):
            keys, values = states(MAX_LENGTH, seed=2 * layer), states(MAX_LENGTH, seed=2 * layer + 1)
            cache.update(keys[:, :, seen : seen + columns], values[:, :, seen : seen + columns], layer)
        seen += columns
    return cache


def same_host_cache(actual: Cache, expected: Cache) -> None:
    """Equal in layout and content, and in what they do with the next column."""
    for step in range(2):
        assert int(actual.get_seq_length()) == int(expected.get_seq_length())
        for mine, theirs in zip(actual.layers, expected.layers, strict=True):
            assert type(mine) is type(theirs)
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
            assert int(mine.get_seq_length()) == int(theirs.get_seq_length())
            assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)
            new = states(1, seed=100 + step)
            for read, wanted in zip(mine.update(new, new), theirs.update(new, new), strict=True):
                assert torch.equal(read, wanted)


@pytest.mark.parametrize("prompt", [(1,), (WINDOW - 1,), (WINDOW,), (WINDOW + 1,), (20,), (6, 1, 1, 1), (6, 5)])
@pytest.mark.parametrize("layers", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
class TestTakenOverCaches:
    def test_every_column_that_the_host_still_has_is_in_its_slot(self, kind, layers, prompt):
        host, columns = host_cache(kind, layers, *prompt), sum(prompt)
        cache = SlotCache(len(host.layers))
        cache.read_host(host, columns)
        assert cache.used == columns
        for index, layer in enumerate(cache.layers):
            # The next query sees WINDOW - 1 earlier columns of a sliding layer.
            first = max(columns - WINDOW + 1, 0) if host.is_sliding[index] else 0
            for buffer, seed in ((layer.keys, 2 * index), (layer.values, 2 * index + 1)):
                expected = states(MAX_LENGTH, seed=seed)[:, :, first:columns]
                assert torch.equal(buffer[:, :, first:columns], expected)

    def test_reading_and_writing_changes_nothing(self, kind, layers, prompt):
        host, columns = host_cache(kind, layers, *prompt), sum(prompt)
        cache = SlotCache(len(host.layers))
        cache.read_host(host, columns)
        cache.write_host(host, columns)
        same_host_cache(host, host_cache(kind, layers, *prompt))

    @pytest.mark.parametrize("more", [1, 3, 12])
    def test_more_columns_leave_it_as_if_the_host_had_run_them(self, kind, layers, prompt, more):
        host, columns = host_cache(kind, layers, *prompt), sum(prompt)
        cache = SlotCache(len(host.layers))
        cache.read_host(host, columns)
        new = torch.arange(columns, columns + more).expand(ROWS, -1)
        cache.prepare(new, columns + more)
        for layer in range(len(host.layers)):
            keys, values = states(MAX_LENGTH, seed=2 * layer), states(MAX_LENGTH, seed=2 * layer + 1)
            cache.update(keys[:, :, new[0]], values[:, :, new[0]], layer)
        cache.write_host(host, columns + more)
        same_host_cache(host, host_cache(kind, layers, *prompt, *[1] * more))


def test_static_buffers_are_updated_in_place():
    """Compiled targets hold on to the addresses."""
    host = host_cache("static", "mixed", 5)
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in host.layers]
    cache = SlotCache(len(host.layers))
    cache.read_host(host, 5)
    cache.prepare(torch.arange(5, 20).expand(ROWS, -1), 20)
    for layer in range(len(host.layers)):
        cache.update(states(15), states(15), layer)
    cache.write_host(host, 20)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in host.layers] == addresses


def test_a_cache_that_kept_its_past_for_assisted_decoding_is_read_whole():
    """The host tells sliding layers to keep more than their window when an assistant is present."""
    host = DynamicCache(config=CONFIGS["sliding"]())
    for layer in host.layers:
        getattr(layer, "activate_past_recording", lambda: None)()
    for layer in range(2):
        host.update(states(20, seed=2 * layer), states(20, seed=2 * layer + 1), layer)
    cache = SlotCache(2)
    cache.read_host(host, 20)
    first = 20 - WINDOW + 1
    assert torch.equal(cache.layers[1].keys[:, :, first:20], states(20, seed=2)[:, :, first:])
    cache.write_host(host, 20)
    for index, layer in enumerate(host.layers):
        assert torch.equal(layer.keys, states(20, seed=2 * index)[:, :, first:])


# What cannot be taken over


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", CONFIGS)
def test_ordinary_caches_are_accepted(kind, layers):
    check_host_cache(host_cache(kind, layers, 5))
    check_host_cache(host_cache(kind, layers))  # before the first forward
    check_host_cache(DynamicCache())


class RecurrentLayer(DynamicLayer):
    """Stands for any layer that transformers may add."""


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (None, "needs a `Cache` with layers, got NoneType"),
        (((torch.zeros(1), torch.zeros(1)),), "needs a `Cache` with layers, got tuple"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "got EncoderDecoderCache"),
        (Cache(layers=[DynamicLayer(), RecurrentLayer()]), "cannot roll back or copy a cache with RecurrentLayer"),
        (DynamicCache(config=LlamaConfig(**SHAPE), offloading=True), "a cache with offloaded layers"),
    ],
)
def test_other_caches_are_refused_by_name_with_the_alternative(cache, message):
    with pytest.raises(NotImplementedError, match=f"{message}.* generate\\(\\) without `assistant_model`"):
        check_host_cache(cache)
