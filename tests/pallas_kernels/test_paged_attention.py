"""Paged attention against float64, over every way in which a batch can be cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_attention

LAYER = 1


def make_case(seed, lengths, *, block, q_heads=6, kv_heads=2, head_dim=16, page_size=8, spare=2):
    """Sequences given as (cached, new) tokens; all that must not be read is NaN."""
    rng = np.random.default_rng(seed)
    widths = [-(-(cached + new) // page_size) for cached, new in lengths]
    max_pages, num_pages = max(widths) + spare, sum(widths) + spare + 1
    shape = (2, num_pages, page_size, kv_heads, head_dim)
    k_pages, v_pages = (np.full(shape, np.nan, np.float32) for _ in range(2))
    order = rng.permutation(num_pages)
    table = np.full((len(lengths), max_pages), order[-1], np.int32)  # unused entries: a page of NaN
    queries, positions, block_seq, sequences, used = [], [], [], [], 0
    for seq, (cached, new) in enumerate(lengths):
        pages = order[used : used + widths[seq]]
        used += widths[seq]
        table[seq, : len(pages)] = pages
        k, v = (rng.standard_normal((cached + new, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        for position in range(cached + new):
            cell = LAYER, pages[position // page_size], position % page_size
            k_pages[cell], v_pages[cell] = k[position], v[position]
        padded = -(-new // block) * block
        queries.append(rng.standard_normal((padded, q_heads, head_dim)).astype(np.float32))
        positions += [*range(cached, cached + new), *[-1] * (padded - new)]
        block_seq += [seq] * (padded // block)
        sequences.append((k, v))
    operands = (
        np.concatenate(queries),
        k_pages,
        v_pages,
        table,
        np.array(block_seq, np.int32),
        np.array(positions, np.int32),
    )
    return operands, sequences


def oracle(operands, sequences, *, window=0, soft_cap=None):
    q, _, _, _, block_seq, positions = operands
    block = len(q) // len(block_seq)
    out = np.zeros(q.shape)
    for token, position in enumerate(positions):
        if position < 0:
            continue
        k, v = (part.astype(np.float64) for part in sequences[block_seq[token // block]])
        first = max(0, position - window + 1) if window else 0
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            keys, values = (part[first : position + 1, head // group] for part in (k, v))
            logits = keys @ q[token, head].astype(np.float64) / np.sqrt(q.shape[2])
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            weights = np.exp(logits - logits.max())
            out[token, head] = weights @ values / weights.sum()
    return out


def run(operands, **options):
    return jax.jit(lambda *o: paged_attention(*o, layer=jnp.int32(LAYER), **options))(
        *map(jnp.asarray, operands)
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    block=st.sampled_from([1, 4, 16]),
    page_size=st.sampled_from([8, 16, 32]),
)
def test_equals_float64(seed, lengths, block, page_size):
    operands, sequences = make_case(seed, lengths, block=block, page_size=page_size)
    np.testing.assert_allclose(run(operands), oracle(operands, sequences), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_head_shapes(head_dim, q_heads, kv_heads):
    lengths = [(30, 1), (0, 1), (7, 1)]
    operands, sequences = make_case(
        0, lengths, block=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim
    )
    np.testing.assert_allclose(run(operands), oracle(operands, sequences), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_contexts_of_several_chunks(page_size):
    lengths = [(300, 16), (129, 3), (0, 16)]
    operands, sequences = make_case(1, lengths, block=16, page_size=page_size)
    np.testing.assert_allclose(run(operands), oracle(operands, sequences), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 8, 100])
def test_sliding_window(window):
    operands, sequences = make_case(2, [(150, 16), (3, 5)], block=16)
    ours = run(operands, sliding_window=window)
    np.testing.assert_allclose(ours, oracle(operands, sequences, window=window), atol=2e-5, rtol=1e-5)


def test_soft_cap_and_scale():
    operands, sequences = make_case(3, [(20, 4)], block=4)
    ours = run(operands, soft_cap=2.0, scale=16**-0.5)
    np.testing.assert_allclose(ours, oracle(operands, sequences, soft_cap=2.0), atol=2e-5, rtol=1e-5)


def test_padding_is_zero_and_an_empty_batch_is_all_zero():
    operands, _ = make_case(4, [(5, 3)], block=16)
    out = np.asarray(run(operands))
    assert not out[3:].any()
    empty = (*operands[:5], np.full_like(operands[5], -1))
    assert not np.asarray(run(empty)).any()


def test_bfloat16():
    operands, sequences = make_case(5, [(40, 16)], block=16, head_dim=64)
    half = [jnp.asarray(part, jnp.bfloat16) for part in operands[:3]]
    ours = run((*half, *operands[3:]))
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(ours, np.float64), oracle(operands, sequences), atol=4e-2)


def test_pages_without_layers():
    operands, sequences = make_case(6, [(9, 2)], block=1)
    q, k, v, *rest = map(jnp.asarray, operands)
    np.testing.assert_allclose(
        paged_attention(q, k[LAYER], v[LAYER], *rest), oracle(operands, sequences), atol=2e-5, rtol=1e-5
    )


def test_shapes_that_do_not_fit_are_refused():
    q, *rest = map(jnp.asarray, make_case(7, [(9, 2)], block=1)[0])
    with pytest.raises(ValueError, match="multiples of 2 kv heads"):
        paged_attention(q[:, :5], *rest, layer=jnp.int32(LAYER))
