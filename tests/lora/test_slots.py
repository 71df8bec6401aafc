"""Slots are written as a whole: nothing of the adapter that was there before remains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import TINY_LLAMA, adapters_of

import lorajax
from lorajax.lora.slots import LoRASlot, SlotArrays, pack_adapter, write_slot
from lorajax.lora.targets import adapter_targets


@pytest.fixture(scope="module")
def wrapped():
    model, config = lorajax.load_model(TINY_LLAMA, dtype="float32")
    lorajax.add_lora(model, lorajax.LoRAConfig(num_slots=4, max_rank=16))
    return nnx.state(model, LoRASlot), adapter_targets(config), config


def slot_of(slots, index):
    return jax.tree.map(lambda rows: np.asarray(rows[:, index]), slots)


def test_a_rewritten_slot_holds_exactly_the_new_adapter(wrapped):
    slots, targets, config = wrapped
    write = jax.jit(write_slot)
    adapters = [lorajax.load_adapter(path, config=config) for path in adapters_of(TINY_LLAMA).values()]
    for first in adapters:
        for second in adapters:
            after = write(slots, pack_adapter(first, slots, targets), jnp.int32(2))
            after = write(after, pack_adapter(second, slots, targets), jnp.int32(2))
            fresh = write(slots, pack_adapter(second, slots, targets), jnp.int32(2))
            jax.tree.map(np.testing.assert_array_equal, after, fresh)
            for untouched in (0, 1, 3):
                assert not any(leaf.any() for leaf in jax.tree.leaves(slot_of(after, untouched)))


def test_packed_factors_are_the_adapters_own(wrapped):
    slots, targets, config = wrapped
    weights = lorajax.load_adapter(adapters_of(TINY_LLAMA)["rslora_patterns"], config=config)
    packed = pack_adapter(weights, slots, targets)
    arrays = {
        tuple(key.key for key in path if hasattr(key, "key")): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            packed, is_leaf=lambda leaf: isinstance(leaf, SlotArrays)
        )[0]
    }
    checked = 0
    for path, module in weights.modules.items():
        target = targets[path]
        owner = ("layers",) if target.layer is not None else ()
        linear = arrays[(*owner, *target.module.split("."), "slots")]
        layer, member, width = target.layer or 0, target.member, linear.b[0].shape[1]
        columns = slice(member * width, member * width + module.rank)
        np.testing.assert_array_equal(linear.a[layer][:, columns], module.a.T)
        np.testing.assert_array_equal(linear.b[member][layer, : module.rank], module.b.T)
        assert not linear.b[member][layer, module.rank :].any()
        assert linear.scale[layer, member] == np.float32(module.scaling)
        assert linear.rank[layer] >= module.rank
        checked += 1
    assert checked == len(weights.modules) > 15


def test_packing_gives_the_same_bits_every_time(wrapped):
    slots, targets, config = wrapped
    weights = lorajax.load_adapter(adapters_of(TINY_LLAMA)["all_r16"], config=config)
    first, second = (pack_adapter(weights, slots, targets) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_ranks_are_padded_to_a_tile():
    assert [lorajax.LoRAConfig(num_slots=2, max_rank=r).padded_rank for r in (1, 16, 17, 48)] == [
        16,
        16,
        32,
        48,
    ]
