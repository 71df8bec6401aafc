"""What the gathered-adapter matmuls mean, in a few lines. Differentiable; every block gathers its own
A and B, so memory and time grow with the number of blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def lora_shrink(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "layers slots d_in columns"],
    slot: Int32[Array, " blocks"],
    rank: Int32[Array, "layers slots"],
    layer: Int32[Array, ""],
    *,
    members: int = 1,
) -> Float[Array, "tokens columns"]:
    """h = x · A of each block's slot; zero beyond the slot's rank in every member, and for slot 0."""
    grouped = x.reshape(slot.shape[0], -1, x.shape[1])
    column = jnp.arange(a.shape[3], dtype=jnp.int32) % (a.shape[3] // members)
    used = (slot > 0)[:, None] & (column[None] < rank[layer, slot][:, None])
    factor = jnp.where(used[:, None], a[layer, slot], jnp.zeros((), a.dtype))
    h = jnp.einsum("nbd,ndr->nbr", grouped, factor, preferred_element_type=jnp.float32)
    return h.astype(jnp.float32).reshape(x.shape[0], -1)


def lora_expand(
    h: Float[Array, "tokens rank"],
    b: Float[Array, "layers slots rank d_out"],
    slot: Int32[Array, " blocks"],
    scale: Float[Array, "layers slots"],
    y: Float[Array, "tokens d_out"],
    rank: Int32[Array, "layers slots"],
    layer: Int32[Array, ""],
) -> Float[Array, "tokens d_out"]:
    """y + scale · (h · B) of each block's slot; y for slot 0."""
    row = jnp.arange(b.shape[2], dtype=jnp.int32)
    used = (slot > 0)[:, None] & (row[None] < rank[layer, slot][:, None])
    grouped = jnp.where(used[:, None], h.reshape(slot.shape[0], -1, h.shape[1]), 0.0)
    scaled = grouped * jnp.where(slot > 0, scale[layer, slot], 0.0)[:, None, None]
    factor = jnp.where(used[:, :, None], b[layer, slot].astype(jnp.float32), 0.0)
    delta = jnp.einsum("nbr,nro->nbo", scaled, factor).reshape(y.shape)
    return (y.astype(jnp.float32) + delta).astype(y.dtype)


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
    """Both, for every member of a fused projection."""
    h = lora_shrink(x, a, slot, rank, layer, members=len(y))
    width = h.shape[1] // len(y)
    return tuple(
        lora_expand(h[:, m * width : (m + 1) * width], b[m], slot, scale[..., m], y[m], rank, layer)
        for m in range(len(y))
    )
