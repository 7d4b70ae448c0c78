"""Key-value caches with a slot for each column: the target's and the drafter's.

The token in column i of the batch lives in slot i. Every forward says which slots it writes; what a round rejected is
overwritten before any mask lets it be seen, so a round copies, crops and compacts nothing. Rows advance at their own pace.
The last slot of the buffer is a bin for keys that no row may see.
"""

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin


BUCKET = 256
HOST_LAYERS = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `(B, heads, capacity, head_dim)`."""

    is_sliding = False

    def __init__(self, cache: "SlotCache"):
        self.cache = cache
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = _zeros_like(key_states, self.cache.capacity)
        self.values = _zeros_like(value_states, self.cache.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states into the cache's current slots and return the used part of the buffers."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots.to(key_states.device)[:, None, :, None]
        self.keys.scatter_(2, slots.expand_as(key_states), key_states)
        self.values.scatter_(2, slots.expand_as(value_states), value_states)
        return self.keys[:, :, : self.cache.used], self.values[:, :, : self.cache.used]

    def grow(self, capacity: int) -> None:
        if self.keys is not None:
            old = self.keys.shape[2] - 1  # the bin moves to the new end
            for name in ("keys", "values"):
                grown = _zeros_like(getattr(self, name), capacity)
                grown[:, :, :old] = getattr(self, name)[:, :, :old]
                setattr(self, name, grown)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.used, 0

    def get_seq_length(self) -> int:
        return self.cache.used

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class SlotCache(Cache):
    r"""
    A cache whose forwards write to given slots.

    Args:
        num_layers (`int`): Layers of the model that uses it.
    """

    layers: list[Any]

    def __init__(self, num_layers: int):
        self.capacity = 0
        self.used = 0
        self.slots = torch.zeros(0, dtype=torch.long)
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def bin(self) -> int:
        """The slot for keys that must not be seen."""
        return self.capacity - 1

    def prepare(self, slots: torch.Tensor, used: int) -> None:
        """Set where the next forward writes, `slots` `(B, N)`, and that attention reads slots 0 to `used` - 1."""
        self.reserve(used)
        self.slots, self.used = slots, used

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots and the bin, in whole buckets and at least half as much again."""
        if slots + 1 <= self.capacity:
            return
        wanted = max(slots + 1, self.capacity * 3 // 2)
        self.capacity = -(-wanted // BUCKET) * BUCKET
        for layer in self.layers:
            layer.grow(self.capacity)

    def read_host(self, host: Any, columns: int) -> None:
        """Copy the first `columns` columns of a cache of transformers; its sliding layers have only the last ones."""
        self.reserve(columns)
        self.used = columns
        for mine, theirs in zip(self.layers, host.layers, strict=True):
            stored = min(columns, theirs.keys.shape[2])
            # A static buffer is filled from its start, a dynamic one holds nothing but what it has seen.
            start = 0 if isinstance(theirs, cache_utils.StaticLayer) else theirs.keys.shape[2] - stored
            keys, values = theirs.keys[:, :, start : start + stored], theirs.values[:, :, start : start + stored]
            mine.lazy_initialization(keys, values)
            mine.keys[:, :, columns - stored : columns] = keys
            mine.values[:, :, columns - stored : columns] = values

    def write_host(self, host: Any, columns: int) -> None:
        """Bring a cache that [`read_host`] read up to `columns` columns, in its own layout."""
        for mine, theirs in zip(self.layers, host.layers, strict=True):
            keys, values = mine.keys[:, :, :columns], mine.values[:, :, :columns]
            is_static = isinstance(theirs, cache_utils.StaticLayer)
            if is_static:
                size = min(columns, theirs.keys.shape[2])
                theirs.keys[:, :, :size] = keys[:, :, -size:]
                theirs.values[:, :, :size] = values[:, :, -size:]
            else:
                first = max(columns - theirs.sliding_window + 1, 0) if theirs.is_sliding else 0
                theirs.keys, theirs.values = keys[:, :, first:], values[:, :, first:]
            _set_length(theirs, columns)


def check_host_cache(cache: Cache | None) -> None:
    r"""
    Check that a cache of transformers can be taken over.

    Raises:
        NotImplementedError: If it is no `Cache`, or has layers of a kind that cannot be rolled back or copied.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise NotImplementedError(
            f"DSpark needs a `Cache` with layers, got {type(cache).__name__}. Call generate() without `assistant_model` "
            "for this target."
        )
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in HOST_LAYERS})
    if unknown or getattr(cache, "offloading", False):
        what = ", ".join(unknown) or "offloaded layers"
        raise NotImplementedError(
            f"DSpark cannot roll back or copy a cache with {what} (recurrent states, quantised or offloaded caches). Use "
            "the default cache, or call generate() without `assistant_model` for this target."
        )


def _zeros_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, head_dim = states.shape
    return states.new_zeros(batch, heads, capacity, head_dim)


def _set_length(layer: CacheLayerMixin, columns: int) -> None:
    """Tell a host layer how many columns it has seen, under the names that releases of transformers gave the counter."""
    for name in ("cumulative_length", "cumulative_length_int"):
        counter = getattr(layer, name, None)
        if isinstance(counter, torch.Tensor):
            counter.fill_(columns)
        elif counter is not None:
            setattr(layer, name, columns)
