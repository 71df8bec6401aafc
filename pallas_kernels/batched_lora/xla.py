"""The gathered-adapter matmuls for CPUs: a loop over chunks of tokens that share an adapter.

Each turn reads one adapter's A and B and multiplies them with a fixed number of rows; the number of
turns is data. So cost follows the adapters and tokens in the batch, never the number of slots, and a batch
of base requests does no work at all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.batched_lora.runs import find_chunks


def rows_per_chunk(tokens: int, block: int) -> int:
    """Rows that one turn of the loop multiplies: 8 when decoding, 64 in a prefill, at least a block."""
    return min(tokens, max(block, 8 if block == 1 else 64 // block * block))


def batched_lora(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "layers slots d_in columns"],
    b: tuple[jax.Array, ...],
    slot: Int32[Array, " blocks"],
    scale: Float[Array, "layers slots members"],
    y: tuple[jax.Array, ...],
    rank: Int32[Array, "layers slots"],
    layer: Int32[Array, ""],
) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.batched_lora`."""
    tokens, members = x.shape[0], len(y)
    block = tokens // slot.shape[0]
    rows = rows_per_chunk(tokens, block)
    chunks = find_chunks(slot, rows // block)
    width = a.shape[3] // members
    column = jnp.arange(width, dtype=jnp.int32)

    def add_chunk(i: Int32[Array, ""], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin, this = chunks.first[i] * block, chunks.slot[i]
        # The last chunk's window may not fit behind `begin`: it is moved back, and masked.
        #   rows  |...begin##########end|   window = [start, start + rows), # = in the chunk
        start = jnp.minimum(begin, tokens - rows)
        index = start + jnp.arange(rows, dtype=jnp.int32)
        inside = (index >= begin) & (index < begin + chunks.length[i] * block)
        used = column < rank[layer, this]
        h = jnp.dot(
            jax.lax.dynamic_slice_in_dim(x, start, rows),
            _adapter(a, layer, this),
            preferred_element_type=jnp.float32,
        )
        added = []
        for member, (out, factor) in enumerate(zip(y, b, strict=True)):
            # unused columns of A and rows of B may hold anything, NaN included
            mine = jnp.where(inside[:, None] & used[None], h[:, member * width : (member + 1) * width], 0.0)
            mine = mine * scale[layer, this, member]
            matrix = jnp.where(used[:, None], _adapter(factor, layer, this), jnp.zeros((), factor.dtype))
            delta = jnp.dot(mine, matrix.astype(jnp.float32))
            old = jax.lax.dynamic_slice_in_dim(out, start, rows)
            new = jnp.where(inside[:, None], (old.astype(jnp.float32) + delta).astype(out.dtype), old)
            added.append(jax.lax.dynamic_update_slice_in_dim(out, new, start, axis=0))
        return tuple(added)

    return jax.lax.fori_loop(0, chunks.number, add_chunk, y)


def _adapter(stack: jax.Array, layer: Int32[Array, ""], slot: Int32[Array, ""]) -> jax.Array:
    """One slot's matrix, [rows, columns]; nothing else of the stack is read."""
    return jax.lax.dynamic_slice(stack, (layer, slot, 0, 0), (1, 1, *stack.shape[2:]))[0, 0]
