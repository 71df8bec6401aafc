"""Attention of packed tokens over paged keys and values."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention import xla


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Float[Array, "*layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "*layers pages page_size kv_heads head_dim"],
    page_table: Int32[Array, "seqs max_pages"],
    block_seq: Int32[Array, " blocks"],
    positions: Int32[Array, " tokens"],
    *,
    layer: Int32[Array, ""] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Each token attends to the keys of its sequence up to its own position.

    q: queries; q_heads is a multiple of kv_heads, and head h reads kv head h // (q_heads / kv_heads).
    k_pages, v_pages: the page pools; with `layer`, those of all layers, of which one is read.
    page_table: pages of each sequence in order. block_seq: the row of page_table of each block of
        tokens; blocks divide the tokens evenly (decode: one token each).
    positions: of each token in its sequence; its key is in its page already. -1 is padding: output 0.
    scale: of the logits, by default head_dim ** -0.5. sliding_window: most keys that a token sees, its
        own included; None or 0 sees all. soft_cap: c in c * tanh(logits / c).
    Cost follows the longest context in the batch, not the width of page_table. Softmax is in float32.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, blocks = k_pages.shape[-2], block_seq.shape[0]
    if q_heads % kv_heads or tokens % blocks:
        raise ValueError(
            f"q has {q_heads} heads and {tokens} tokens; allowed: multiples of {kv_heads} kv heads and "
            f"{blocks} blocks"
        )
    if layer is None:
        k_pages, v_pages = k_pages[None], v_pages[None]
    return xla.paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        block_seq,
        positions,
        jnp.int32(0) if layer is None else layer,
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
