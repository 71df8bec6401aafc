"""adapter_id → device slot: which adapters are resident, and who may be evicted.

Invariant: an adapter with users keeps its slot; a slot is given away only when nobody runs on it. Slot
0 is the base model's and takes no part.
"""

import dataclasses
from collections import OrderedDict


@dataclasses.dataclass(frozen=True, slots=True)
class SlotWrite:
    """The runner must overwrite this slot with this adapter before the step runs."""

    adapter_id: int
    slot: int


class AdapterSlots:
    """Slots 1 … num_slots."""

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

    def is_resident(self, adapter_id: int) -> bool:
        return adapter_id in self._slot_of

    @property
    def num_available(self) -> int:
        """Slots that could be given to an adapter that is not resident."""
        return len(self._free) + sum(adapter not in self._kept for adapter in self._idle)

    def can_pin(self, adapter_id: int) -> bool:
        """Whether `pin` would succeed now."""
        return adapter_id in self._slot_of or self.num_available > 0

    def pin(self, adapter_id: int) -> tuple[int, SlotWrite | None]:
        """One user more. Returns the slot, and the write that must happen if it is newly given."""
        write = None
        if adapter_id not in self._slot_of:
            slot = self._take_slot()
            self._slot_of[adapter_id] = slot
            write = SlotWrite(adapter_id, slot)
        self._idle.pop(adapter_id, None)
        self._users[adapter_id] = self._users.get(adapter_id, 0) + 1
        return self._slot_of[adapter_id], write

    def unpin(self, adapter_id: int) -> None:
        """One user less; the adapter stays resident until its slot is needed."""
        assert self._users.get(adapter_id, 0) > 0, f"adapter {adapter_id} is unpinned more often than pinned"
        self._users[adapter_id] -= 1
        if self._users[adapter_id] == 0:
            del self._users[adapter_id]
            self._idle[adapter_id] = None

    def keep(self, adapter_id: int) -> None:
        """Never evict this adapter once it is resident."""
        self._kept.add(adapter_id)

    def drop(self, adapter_id: int) -> None:
        """Forget an unloaded adapter. It must have no users."""
        assert adapter_id not in self._users, f"adapter {adapter_id} is dropped while requests run on it"
        self._kept.discard(adapter_id)
        if adapter_id in self._slot_of:
            del self._idle[adapter_id]
            self._free.append(self._slot_of.pop(adapter_id))

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        victim = next((a for a in self._idle if a not in self._kept), None)
        assert victim is not None, "pin without can_pin"
        del self._idle[victim]
        return self._slot_of.pop(victim)

    def check_invariants(self) -> None:
        slots = [*self._slot_of.values(), *self._free]
        assert sorted(slots) == list(range(1, self.num_slots + 1)), "every slot is free or has one adapter"
        assert set(self._users) | set(self._idle) == set(self._slot_of)
        assert not set(self._users) & set(self._idle)
        assert all(count > 0 for count in self._users.values())
