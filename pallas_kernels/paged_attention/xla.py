"""Paged attention for CPUs: a loop over chunks of keys with an online softmax.

The number of chunks is data: the longest context in the batch decides it, so one compiled program
serves every context length without reading the padding of the page table.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

KEYS_PER_CHUNK = 128


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    page_table: Int32[Array, "seqs max_pages"],
    block_seq: Int32[Array, " blocks"],
    positions: Int32[Array, " tokens"],
    layer: Int32[Array, ""],
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """See `pallas_kernels.paged_attention`."""
    tokens, q_heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[2], k_pages.shape[3]
    blocks, group = block_seq.shape[0], q_heads // kv_heads
    block = tokens // blocks
    rows = block * group  # queries of one block that share a kv head

    grouped = q.astype(jnp.float32).reshape(blocks, block, kv_heads, group, head_dim)
    queries = grouped.swapaxes(1, 2).reshape(blocks, kv_heads, rows, head_dim) * jnp.float32(scale)
    query_position = jnp.repeat(positions.reshape(blocks, block), group, axis=1)  # [blocks, rows]
    last_position = jnp.max(query_position, axis=1)

    pages_per_chunk = max(1, min(KEYS_PER_CHUNK // page_size, page_table.shape[1]))
    chunk = pages_per_chunk * page_size
    num_chunks = (jnp.max(positions) + chunk) // chunk
    table = page_table[block_seq]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_chunk)))

    def attend_chunk(index, carry):
        maximum, total, output = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_per_chunk, pages_per_chunk, axis=1)
        k = k_pages[layer, pages].reshape(blocks, chunk, kv_heads, head_dim).astype(jnp.float32)
        v = v_pages[layer, pages].reshape(blocks, chunk, kv_heads, head_dim).astype(jnp.float32)
        key_position = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        # A page's tail and a padded table entry may hold anything, NaN included; 0 * NaN must not leak.
        v = jnp.where((key_position[None] <= last_position[:, None])[:, :, None, None], v, 0.0)

        logits = jnp.einsum("nkrd,nckd->nkrc", queries, k)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        # visible:  position - window < key <= position
        distance = query_position[:, :, None] - key_position[None, None]
        visible = distance >= 0
        if sliding_window:
            visible &= distance < sliding_window
        logits = jnp.where(visible[:, None], logits, -jnp.inf)

        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        safe = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0.0)  # nothing visible yet
        weight = jnp.exp(logits - safe[..., None])
        shrink = jnp.exp(maximum - safe)
        total = total * shrink + jnp.sum(weight, axis=-1)
        output = output * shrink[..., None] + jnp.einsum("nkrc,nckd->nkrd", weight, v)
        return new_maximum, total, output

    start = (
        jnp.full((blocks, kv_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((blocks, kv_heads, rows), jnp.float32),
        jnp.zeros((blocks, kv_heads, rows, head_dim), jnp.float32),
    )
    _, total, output = jax.lax.fori_loop(0, num_chunks, attend_chunk, start)
    output = output / jnp.where(total > 0, total, 1.0)[..., None]
    output = output.reshape(blocks, kv_heads, block, group, head_dim).swapaxes(1, 2)
    return output.reshape(tokens, q_heads, head_dim).astype(q.dtype)
