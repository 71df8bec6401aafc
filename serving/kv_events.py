"""Events of the prefix cache, in the order in which they happened. Names are the field's wire words.

Invariant: replaying the events from the start gives exactly the blocks that are cached now.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockStored:
    """Full pages became reusable, each the parent of the next. Hashes are those of `serving.block_hash`.

    parent_block_hash: of the first block; None at the start of a sequence. token_ids: of all blocks, one
    after another, block_size tokens each.
    """

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
        """Returns the function that ends the subscription; calling it twice does nothing.

        The callback runs in the step that caused the event, and must be quick. One that raises is
        unsubscribed and logged: it would miss events, and no request may end for a listener's fault.
        """
        number, self._next = self._next, self._next + 1
        self._subscribers[number] = callback
        return lambda: self._subscribers.pop(number, None) and None

    @property
    def wanted(self) -> bool:
        """Whether anyone listens: without subscribers no event is made."""
        return bool(self._subscribers)

    def publish(self, event: KvEvent) -> None:
        for number, callback in list(self._subscribers.items()):
            try:
                callback(event)
            except Exception:  # another's code, which may raise anything
                logger.exception("a subscriber of KV events failed and is unsubscribed")
                self._subscribers.pop(number, None)


def replay(events: Iterable[KvEvent]) -> set[bytes]:
    """The hashes that are cached after these events, from the first one on."""
    cached: set[bytes] = set()
    for event in events:
        match event:
            case BlockStored():
                cached.update(event.block_hashes)
            case BlockRemoved():
                cached.difference_update(event.block_hashes)
            case AllBlocksCleared():
                cached.clear()
    return cached
