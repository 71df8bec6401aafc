"""Events of the prefix cache, in the order in which they happened. Names are the field's wire words.

Replaying `BlockStored` and `BlockRemoved` from the start gives exactly the blocks that are cached now.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockStored:
    """A full page became reusable. Hashes are those of `serving.block_hash`."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter_id: int
    adapter_name: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRemoved:
    """Pages were evicted, or dropped with their adapter."""

    block_hashes: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllBlocksCleared:
    """The whole cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventStream:
    """Hands every event to every subscriber, at once and in order."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Callable[[KvEvent], None]] = {}
        self._next = 0

    def subscribe(self, callback: Callable[[KvEvent], None]) -> Callable[[], None]:
        """Returns the function that ends the subscription; calling it twice does nothing."""
        number, self._next = self._next, self._next + 1
        self._subscribers[number] = callback
        return lambda: self._subscribers.pop(number, None) and None

    @property
    def wanted(self) -> bool:
        """Whether anyone listens: without subscribers no event is made."""
        return bool(self._subscribers)

    def publish(self, event: KvEvent) -> None:
        for callback in list(self._subscribers.values()):
            callback(event)
