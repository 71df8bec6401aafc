"""Slots: who is resident, who is evicted, and that nobody's weights change under it."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.adapter_slots import AdapterSlots, SlotWrite


def use(slots: AdapterSlots, *adapter_ids: int) -> list[SlotWrite]:
    """Pin and unpin one after another; returns the writes."""
    writes = []
    for adapter_id in adapter_ids:
        _, write = slots.pin(adapter_id)
        slots.unpin(adapter_id)
        writes += [] if write is None else [write]
    return writes


def test_slots_count_from_one_and_are_written_once():
    slots = AdapterSlots(2)
    assert slots.pin(7) == (1, SlotWrite(7, 1))
    assert slots.pin(8) == (2, SlotWrite(8, 2))
    assert slots.pin(7) == (1, None)
    assert slots.resident == {7, 8}
    assert not slots.can_take


def test_a_slot_with_users_is_never_given_away():
    slots = AdapterSlots(2)
    slots.pin(1)
    slots.pin(1)
    assert [write.slot for write in use(slots, 2, 3, 4, 5)] == [2] * 4
    slots.unpin(1)
    assert [write.slot for write in use(slots, 6, 7)] == [2] * 2
    assert slots.slot_of(1) == 1
    slots.check_invariants()


def test_the_least_recently_used_goes_first():
    slots = AdapterSlots(3)
    use(slots, 1, 2, 3, 1)
    assert use(slots, 4) == [SlotWrite(4, 2)]
    assert use(slots, 5) == [SlotWrite(5, 3)]
    assert slots.resident == {1, 4, 5}


def test_more_adapters_than_slots_keep_working_in_turn():
    slots = AdapterSlots(1)
    adapters = [1, 2, 3, 4, 5] * 3
    assert use(slots, *adapters) == [SlotWrite(adapter, 1) for adapter in adapters]


def test_a_kept_adapter_stays():
    slots = AdapterSlots(2)
    slots.keep(1)
    use(slots, 1)
    assert [write.slot for write in use(slots, 2, 3, 4)] == [2] * 3
    assert slots.resident == {1, 4}


def test_kept_adapters_in_every_slot_compete_as_others_do():
    slots = AdapterSlots(2)
    for adapter_id in (1, 2):
        slots.keep(adapter_id)
        use(slots, adapter_id)
    assert use(slots, 3) == [SlotWrite(3, 1)]
    assert use(slots, 1) == [SlotWrite(1, 1)], "the one that is not kept goes"
    assert slots.resident == {1, 2}


def test_a_dropped_adapter_frees_its_slot():
    slots = AdapterSlots(1)
    use(slots, 1)
    slots.drop(1)
    slots.drop(1)
    slots.drop(99)
    assert slots.resident == set()
    assert slots.can_take
    assert slots.slot_of(1) is None
    slots.check_invariants()


def test_broken_uses_are_caught():
    slots = AdapterSlots(1)
    with pytest.raises(AssertionError, match="unpinned more often"):
        slots.unpin(1)
    slots.pin(1)
    with pytest.raises(AssertionError, match="while requests run"):
        slots.drop(1)
    with pytest.raises(AssertionError, match="in use"):
        slots.pin(2)


class SlotsMachine(RuleBasedStateMachine):
    """The device's content follows from the writes alone, and is right for every user."""

    @initialize(num_slots=st.integers(1, 3))
    def start(self, num_slots):
        self.slots, self.content, self.pins = AdapterSlots(num_slots), {}, []

    @rule(adapter_id=st.integers(1, 6))
    def pin(self, adapter_id):
        if self.slots.is_resident(adapter_id) or self.slots.can_take:
            slot, write = self.slots.pin(adapter_id)
            if write is not None:
                assert write.slot not in [slot for _, slot in self.pins]
                self.content[write.slot] = write.adapter_id
            self.pins.append((adapter_id, slot))
        else:
            assert len({adapter for adapter, _ in self.pins}) > 0

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        self.pins.remove(pin)
        self.slots.unpin(pin[0])

    @rule(adapter_id=st.integers(1, 6))
    def keep(self, adapter_id):
        self.slots.keep(adapter_id)

    @rule(adapter_id=st.integers(1, 6))
    def drop(self, adapter_id):
        if adapter_id not in [adapter for adapter, _ in self.pins]:
            self.slots.drop(adapter_id)
            assert not self.slots.is_resident(adapter_id)

    @invariant()
    def holds(self):
        if hasattr(self, "slots"):
            self.slots.check_invariants()
            assert all(self.content[slot] == adapter for adapter, slot in self.pins)
            if not self.pins:
                assert self.slots.can_take, "with nobody running, anybody can have a slot"


TestSlots = SlotsMachine.TestCase
