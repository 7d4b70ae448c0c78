"""Key-value caches with a slot for each column: the target's and the drafter's.

The token in column i of the batch lives in slot i. Every forward says which slots it writes; what a round rejected is
overwritten before any mask lets it be seen, so a round copies, crops and compacts nothing. Rows advance at their own pace.
The last slot of the buffer is a bin for keys that no row may see.

Recurrent states have no slots. The cache holds a copy of them; keeping them right is the work of `recurrent.py`.
"""

import copy
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer


BUCKET = 256
# The oldest releases of transformers have no layer without any states, and no static one with both kinds.
HOST_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "StaticLayer",
        "StaticSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndStaticFullAttentionLayer",
        "DummyLayer",
    )
    if hasattr(cache_utils, name)
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
        # Not scatter_: on the CPU it converts the whole buffer there and back unless that is float32.
        rows, slots = self.cache.rows.to(key_states.device), self.cache.slots.to(key_states.device)
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
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


# The two bases initialise different things under one name; states are copied, so theirs is never called.
class RecurrentSlotLayer(SlotLayer, LinearAttentionLayer):  # type: ignore[misc]
    """A layer with a copy of a host layer's recurrent states, and with slots if it has keys and values as well."""

    def __init__(self, cache: "SlotCache", host: LinearAttentionLayer):
        super().__init__(cache)
        own = set(vars(self))
        for name, value in vars(host).items():  # releases of transformers keep the states under different names
            if name not in own:
                setattr(self, name, copy.deepcopy(value))


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
        self.rows = torch.zeros(0, 1, dtype=torch.long)
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def bin(self) -> int:
        """The slot for keys that must not be seen."""
        return self.capacity - 1

    @property
    def recurrent_states(self) -> list[torch.Tensor]:
        """The recurrent states, `(B, ...)` each; forwards update them in place."""
        return [state for layer in self.layers for state in _states(layer)]

    def prepare(self, slots: torch.Tensor, used: int) -> None:
        """Set where the next forward writes, `slots` `(B, N)`, and that attention reads slots 0 to `used` - 1."""
        self.reserve(used)
        self.slots, self.used = slots, used
        self.rows = torch.arange(len(slots), device=slots.device)[:, None]  # once for all layers

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
        for index, theirs in enumerate(host.layers):
            if isinstance(theirs, LinearAttentionLayer):
                self.layers[index] = RecurrentSlotLayer(self, theirs)
            if getattr(theirs, "keys", None) is None:
                continue
            mine = self.layers[index]
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
            for own, state in zip(_states(mine), _states(theirs), strict=True):
                state.copy_(own)
            if mine.keys is None:
                continue
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
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in HOST_LAYERS}
    if getattr(cache, "offloading", False):
        unknown.add("offloaded layers")
    # Sliding layers that keep more than their window are read all the same.
    if any(getattr(layer, "record_past", False) and isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        unknown.add("recurrent layers that record their past")
    if unknown:
        raise NotImplementedError(
            f"DSpark cannot roll back or copy a cache with {', '.join(sorted(unknown))}. Use the default cache, or call "
            "generate() without `assistant_model` for this target."
        )


def _states(layer: Any) -> list[torch.Tensor]:
    """A layer's recurrent states: one tensor of a kind, or a dictionary of them since transformers 5.24."""
    found = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    tensors = [state for states in found for state in (states.values() if isinstance(states, dict) else [states])]
    return [state for state in tensors if state is not None]


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
