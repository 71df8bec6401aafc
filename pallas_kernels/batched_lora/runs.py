"""Which tokens share an adapter: runs of neighbouring blocks with one slot, cut into chunks.

    slot     0 0 3 3 3 3 3 1 1 0        chunk of at most 4 blocks
    chunks       [  3   ] 3 [1]          first = 2, 6, 7;  length = 4, 1, 2

Base and padding blocks are in no chunk, so they cost nothing. Any order of slots is right; the fewer runs,
the fewer chunks, so a host that sorts its batch by slot saves work.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Chunks(NamedTuple):
    """number chunks; entry i < number: its first block, number of blocks and slot. Later entries are junk."""

    number: Int32[Array, ""]
    first: Int32[Array, " blocks"]
    length: Int32[Array, " blocks"]
    slot: Int32[Array, " blocks"]


def find_chunks(slot: Int32[Array, " blocks"], max_length: int) -> Chunks:
    """Chunks of at most `max_length` blocks that cover every block with a slot above 0."""
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), slot[:-1]])
    run_start = jnp.maximum.accumulate(jnp.where(slot != before, index, 0))
    starts = (slot > 0) & ((index - run_start) % max_length == 0)
    # starts first, in order; the end of a chunk is the next block that is not of its run, or too far
    first = jnp.argsort(~starts, stable=True).astype(jnp.int32)
    behind = jnp.concatenate([slot[1:], jnp.full((1,), -1, jnp.int32)])
    run_end = jnp.flip(jnp.minimum.accumulate(jnp.flip(jnp.where(slot != behind, index + 1, slot.shape[0]))))
    length = jnp.minimum(run_end[first] - first, max_length)
    return Chunks(jnp.sum(starts, dtype=jnp.int32), first, length, slot[first])
