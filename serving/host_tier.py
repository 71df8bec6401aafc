"""Host copies of adapters: at most `max_copies`, the least recently used ones read again when needed.

Any number of adapters may be registered; a copy of each is checked when it is loaded, and dropped when
others need the room. An adapter whose arrays came from memory cannot be read again, so its copy stays.
Invariants: an adapter in use has its copy; a copy that was read again holds the bits that were loaded
first, or the request that needs it is refused. Thread-safe; only `hold` reads, never the engine's thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import jax
import xxhash
from flax import nnx

from lorajax.errors import AdapterCapacityError, AdapterFormatError
from lorajax.lora.weights import AdapterWeights


class HostAdapter:
    """What the registry keeps of an adapter: its facts, and, while it has one, its host copy.

    source: where it came from. reread: reads the arrays again; None if they came from memory.
    """

    def __init__(
        self,
        name: str,
        weights: AdapterWeights,
        packed: nnx.State,
        *,
        source: object,
        pinned: bool,
        reread: Callable[[], tuple[AdapterWeights, nnx.State]] | None,
    ):
        self.name, self.source, self.pinned, self.reread = name, source, pinned, reread
        self.rank = weights.rank
        self.target_modules = weights.target_modules
        self.num_parameters = weights.num_parameters
        self.weights: AdapterWeights | None = weights
        self.packed: nnx.State | None = packed
        self.digest = None if reread is None else _digest(packed)
        self.lock = threading.Lock()  # held while the arrays are read again


class HostTier:
    """Which adapters have a host copy."""

    def __init__(self, max_copies: int | None):
        self._max = max_copies
        self._lock = threading.Lock()
        self._copies: OrderedDict[int, tuple[HostAdapter, Callable[[], bool]]] = OrderedDict()  # LRU first

    def __len__(self) -> int:
        with self._lock:
            return len(self._copies)

    def check_room(self, *, can_be_reread: bool) -> None:
        """Raise AdapterCapacityError if an adapter from memory would fill the tier for good."""
        with self._lock:
            fixed = sum(adapter.reread is None for adapter, _ in self._copies.values())
        if self._max is not None and not can_be_reread and fixed >= self._max:
            raise AdapterCapacityError(
                f"{fixed} adapters from memory are loaded, which cannot be read again; allowed: "
                f"max_cpu_loras = {self._max}"
            )

    def add(self, adapter_id: int, adapter: HostAdapter, in_use: Callable[[], bool]) -> None:
        """Take in a newly loaded adapter, as the most recently used. in_use: whether it has requests."""
        with self._lock:
            self._copies[adapter_id] = adapter, in_use
        self.trim()

    def hold(self, adapter_id: int, adapter: HostAdapter, in_use: Callable[[], bool]) -> None:
        """Make sure that an adapter which is in use has its copy; reads it on this thread if need be.

        Raises AdapterFormatError if the source is gone, damaged, or another than was loaded.
        """
        with adapter.lock:
            if adapter.packed is None:
                assert adapter.reread is not None
                weights, packed = adapter.reread()
                if _digest(packed) != adapter.digest:
                    raise AdapterFormatError(
                        f"adapter {adapter.name!r}: its source has changed since it was loaded; load it with "
                        "replace=True"
                    )
                with self._lock:
                    adapter.weights, adapter.packed = weights, packed
                    self._copies[adapter_id] = adapter, in_use
        with self._lock:
            if adapter_id in self._copies:
                self._copies.move_to_end(adapter_id)
        self.trim()

    def drop(self, adapter_id: int) -> None:
        """Forget an unloaded adapter."""
        with self._lock:
            self._copies.pop(adapter_id, None)

    def trim(self) -> None:
        """Drop copies that are not in use, least recently used first, until the tier is within its limit."""
        if self._max is None:
            return
        with self._lock:
            excess = len(self._copies) - self._max
            for adapter_id, (adapter, in_use) in list(self._copies.items()) if excess > 0 else ():
                if excess > 0 and adapter.reread is not None and not in_use():
                    adapter.weights = adapter.packed = None
                    del self._copies[adapter_id]
                    excess -= 1


def _digest(packed: nnx.State) -> bytes:
    """xxh3-128 over all arrays: tells whether a source gives the same adapter again."""
    digest = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(packed):
        digest.update(leaf.tobytes())
    return digest.digest()
