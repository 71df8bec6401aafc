"""One suite over all implementations of the gathered-adapter matmuls, against float64."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import batched_lora, lora_expand, lora_shrink
from pallas_kernels.batched_lora import pallas_triton, reference
from pallas_kernels.batched_lora.runs import find_chunks
from pallas_kernels.implementation import Implementation, choose

RUNNABLE = ("xla", "triton-interpret")
WIDTH = 16


def make_case(seed, *, slots, blocks, block, d_in, d_outs, dtype=np.float32, layers=2):
    """Random operands; whatever must not be read is NaN."""
    rng = np.random.default_rng(seed)
    tokens, members = len(blocks) * block, len(d_outs)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    a, b = normal(layers, slots, d_in, members * WIDTH), [normal(layers, slots, WIDTH, d) for d in d_outs]
    rank = rng.integers(0, WIDTH + 1, (layers, slots)).astype(np.int32)
    rank[:, 0] = 0
    for layer in range(layers):
        for slot in range(slots):
            unused = slice(rank[layer, slot], None)
            for factor in b:
                factor[layer, slot, unused] = np.nan
            for member in range(members):
                a[layer, slot, :, member * WIDTH :][:, :WIDTH][:, unused] = np.nan
            if layer != 1 or slot not in blocks:
                a[layer, slot] = np.nan
    scale = normal(layers, slots, members)
    x, y = normal(tokens, d_in), [normal(tokens, d) for d in d_outs]

    def cast(array):
        return jnp.asarray(array, dtype)

    return {
        "x": cast(x),
        "a": cast(a),
        "b": tuple(map(cast, b)),
        "slot": jnp.asarray(blocks, jnp.int32),
        "scale": jnp.asarray(scale),
        "y": tuple(map(cast, y)),
        "rank": jnp.asarray(rank),
        "layer": jnp.int32(1),
    }


def oracle(case):
    """float64, token by token, from the definition."""
    x, a, scale = (np.asarray(case[name], np.float64) for name in ("x", "a", "scale"))
    rank, slots = np.asarray(case["rank"]), np.asarray(case["slot"])
    block = len(x) // len(slots)
    outs = []
    for member, (y, b) in enumerate(zip(case["y"], case["b"], strict=True)):
        out, b = np.array(y, np.float64), np.asarray(b, np.float64)
        for token in range(len(x)):
            slot = slots[token // block]
            used = rank[1, slot] if slot else 0
            if used:
                columns = slice(member * WIDTH, member * WIDTH + used)
                out[token] += scale[1, slot, member] * (x[token] @ a[1, slot][:, columns]) @ b[1, slot][:used]
        outs.append(out)
    return outs


def run(case, implementation):
    operands = [case[name] for name in ("x", "a", "b", "slot", "scale", "y")]
    return jax.jit(functools.partial(batched_lora, implementation=implementation))(
        *operands, rank=case["rank"], layer=case["layer"]
    )


@pytest.mark.parametrize("implementation", RUNNABLE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_equals_float64(implementation, data):
    slots = data.draw(st.integers(2, 6))
    case = make_case(
        data.draw(st.integers(0, 2**32 - 1)),
        slots=slots,
        blocks=data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=12)),
        block=data.draw(st.sampled_from([1, 16])),
        d_in=data.draw(st.sampled_from([8, 70])),
        d_outs=data.draw(st.sampled_from([(16,), (40, 9, 9)])),
    )
    for ours, expected in zip(run(case, implementation), oracle(case), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize(
    "blocks",
    [[0], [3], [0] * 8, [1, 2, 3, 4, 5], [1] * 9, [2, 2, 0, 2, 1, 1], [5, 4, 3, 2, 1, 0]],
    ids=["one base token", "one token", "all base", "full slot set", "one run", "gaps", "unsorted"],
)
@pytest.mark.parametrize("block", [1, 16])
def test_batches_of_every_kind(implementation, blocks, block):
    case = make_case(1, slots=6, blocks=blocks, block=block, d_in=24, d_outs=(40, 9))
    for ours, expected, before in zip(run(case, implementation), oracle(case), case["y"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)
        base = np.repeat(np.asarray(blocks) == 0, block)
        np.testing.assert_array_equal(np.asarray(ours)[base], np.asarray(before)[base])


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_bfloat16(implementation):
    case = make_case(2, slots=4, blocks=[1, 2, 3, 0], block=16, d_in=64, d_outs=(48,), dtype=jnp.bfloat16)
    (ours,), (expected,) = run(case, implementation), oracle(case)
    assert ours.dtype == jnp.bfloat16
    error = np.abs(np.asarray(ours, np.float64) - expected).max() / np.abs(expected).max()
    assert error < 2e-2


def test_shrink_and_expand_are_the_two_halves():
    case = make_case(3, slots=4, blocks=[1, 0, 3, 2, 2], block=1, d_in=24, d_outs=(40,))
    rank, layer = case["rank"], case["layer"]
    h = lora_shrink(case["x"], case["a"], case["slot"], rank=rank, layer=layer)
    (y,), (b,) = case["y"], case["b"]
    out = lora_expand(h, b, case["slot"], case["scale"][..., 0], y, rank=rank, layer=layer)
    assert h.dtype == jnp.float32
    np.testing.assert_allclose(out, oracle(case)[0], rtol=1e-5, atol=1e-4)


def test_without_layers_and_rank_all_columns_count():
    rng = np.random.default_rng(0)
    x, a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 8), (2, 8, 16), (2, 16, 5)))
    y, scale = jnp.zeros((3, 5)), jnp.array([0.0, 2.0])
    out = batched_lora(x, a, b, jnp.array([1, 0, 1], jnp.int32), scale, y)
    expected = 2.0 * np.asarray(x, np.float64) @ np.asarray(a[1], np.float64) @ np.asarray(b[1], np.float64)
    expected[1] = 0
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_gradients_are_those_of_the_reference(implementation):
    case = make_case(4, slots=3, blocks=[1, 0, 2, 2], block=1, d_in=24, d_outs=(40, 9))
    clean = jax.tree.map(lambda leaf: jnp.nan_to_num(leaf) if leaf.dtype == jnp.float32 else leaf, case)
    names = ("x", "a", "b", "scale", "y")

    def loss(op, operands):
        every = {**clean, **operands}
        order = [every[n] for n in ("x", "a", "b", "slot", "scale", "y", "rank", "layer")]
        return sum(jnp.sum(jnp.sin(out)) for out in op(*order))

    def ours(x, a, b, slot, scale, y, rank, layer):
        return batched_lora(x, a, b, slot, scale, y, rank=rank, layer=layer, implementation=implementation)

    operands = {name: clean[name] for name in names}
    gradients = [jax.grad(functools.partial(loss, op))(operands) for op in (ours, reference.batched_lora)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_chunks_cover_every_adapter_block_once(slots, longest):
    chunks = find_chunks(jnp.asarray(slots, jnp.int32), longest)
    covered = []
    for i in range(int(chunks.number)):
        first, length = int(chunks.first[i]), int(chunks.length[i])
        assert 1 <= length <= longest
        assert set(slots[first : first + length]) == {int(chunks.slot[i])}
        covered += range(first, first + length)
    assert covered == [i for i, slot in enumerate(slots) if slot > 0]


def test_a_named_implementation_that_cannot_run_says_every_reason():
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*blocks of 3"):
        choose("triton", pallas_triton.why_refused(6, 2, 16))
    with pytest.raises(ValueError, match="xla, triton"):
        choose("cuda", None)
    assert choose(None, None) == "xla"
    assert set(RUNNABLE) < set(get_args(Implementation))


SHAPES = {
    "SmolLM2 qkv": (576, (576, 192, 192)),
    "SmolLM2 down": (1536, (576,)),
    "Qwen3-8B qkv": (4096, (4096, 1024, 1024)),
    "Qwen3-8B gate/up": (4096, (12288, 12288)),
    "Qwen3-30B-A3B qkv": (2048, (4096, 512, 512)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "blocks"), [(32, 32), (512, 32)], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda_without_a_gpu(name, tokens, blocks, dtype):
    d_in, d_outs = SHAPES[name]
    members, lead = len(d_outs), (36, 5)

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    operands = (
        shape(tokens, d_in),
        shape(*lead, d_in, members * WIDTH),
        tuple(shape(*lead, WIDTH, d_out) for d_out in d_outs),
        shape(blocks, dtype=jnp.int32),
        shape(*lead, members, dtype=jnp.float32),
        tuple(shape(tokens, d_out) for d_out in d_outs),
        shape(*lead, dtype=jnp.int32),
        shape(dtype=jnp.int32),
    )
    text = lowered_for_cuda(functools.partial(pallas_triton.batched_lora, interpret=False), operands)
    assert text.count("lora_shrink") >= 1
    assert text.count("lora_expand") >= members


def lowered_for_cuda(function, operands):
    """Lowering for a platform that is not there; jax 0.11 wants to be told of the device."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
