"""adapter_id → device slot: which adapters are resident, and who may be evicted.

Invariant: an adapter with users keeps its slot; a slot is given away only when nobody runs on it. Slot
0 is the base model's and takes no part.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class SlotWrite:
    """The runner must overwrite this slot with this adapter before the step runs."""

    adapter_id: int
    slot: int


class AdapterSlots:
    """Slots 1 … num_slots.

    An adapter marked with `keep` is not evicted, unless such adapters hold every slot: they then compete
    as all others do, for else no other adapter could ever run.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._slot_of: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # resident without users, LRU first
        self._kept: set[int] = set()

    @property
    def resident(self) -> set[int]:
        return set(self._slot_of)

    @property
    def idle(self) -> Iterable[int]:
        """Resident adapters without users, least recently used first."""
        return self._idle.keys()

    def is_resident(self, adapter_id: int) -> bool:
        return adapter_id in self._slot_of

    def slot_of(self, adapter_id: int) -> int | None:
        return self._slot_of.get(adapter_id)

    def is_evictable(self, adapter_id: int) -> bool:
        """Whether a resident adapter must give its slot to another as soon as it has no users."""
        return adapter_id not in self._kept or self._kept.issuperset(self._slot_of)

    @property
    def can_take(self) -> bool:
        """Whether an adapter that is not resident could have a slot now."""
        return bool(self._free) or self._victim() is not None

    def pin(self, adapter_id: int) -> tuple[int, SlotWrite | None]:
        """One user more. Returns the slot, and the write that must happen if it is newly given.

        The adapter must be resident, or `can_take`.
        """
        slot, write = self._slot_of.get(adapter_id), None
        if slot is None:
            slot = self._take_slot()
            self._slot_of[adapter_id] = slot
            write = SlotWrite(adapter_id, slot)
        self._idle.pop(adapter_id, None)
        self._users[adapter_id] = self._users.get(adapter_id, 0) + 1
        return slot, write

    def prefetch(self, adapter_id: int) -> SlotWrite:
        """Make an adapter resident before it has users. It must not be, and `can_take`."""
        _, write = self.pin(adapter_id)
        self.unpin(adapter_id)
        assert write is not None
        return write

    def unpin(self, adapter_id: int) -> None:
        """One user less; the adapter stays resident until its slot is needed."""
        assert self._users.get(adapter_id, 0) > 0, f"adapter {adapter_id} is unpinned more often than pinned"
        self._users[adapter_id] -= 1
        if self._users[adapter_id] == 0:
            del self._users[adapter_id]
            self._idle[adapter_id] = None

    def keep(self, adapter_id: int) -> None:
        """Do not evict this adapter once it is resident. May be called from any thread."""
        self._kept.add(adapter_id)

    def drop(self, adapter_id: int) -> None:
        """Forget an unloaded adapter. It must have no users."""
        assert adapter_id not in self._users, f"adapter {adapter_id} is dropped while requests run on it"
        self._kept.discard(adapter_id)
        if adapter_id in self._slot_of:
            del self._idle[adapter_id]
            self._free.append(self._slot_of.pop(adapter_id))

    @property
    def next_evicted(self) -> int | None:
        """The adapter that would have to go for the next one; None if a slot is free, or none may go."""
        return None if self._free else self._victim()

    def _victim(self) -> int | None:
        return next(filter(self.is_evictable, self._idle), None)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        victim = self._victim()
        assert victim is not None, "every slot is in use, or kept"
        del self._idle[victim]
        return self._slot_of.pop(victim)

    def check_invariants(self) -> None:
        slots = [*self._slot_of.values(), *self._free]
        assert sorted(slots) == list(range(1, self.num_slots + 1)), "every slot is free or has one adapter"
        assert self._users.keys() | self._idle.keys() == self._slot_of.keys()
        assert not self._users.keys() & self._idle.keys()
        assert all(count > 0 for count in self._users.values())
