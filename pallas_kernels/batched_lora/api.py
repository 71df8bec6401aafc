"""Gathered-adapter matmuls: every block of tokens multiplies with the adapter in its slot.

Shapes, here and in every implementation:
    x [tokens, d_in]; slot [blocks], where blocks divide the tokens evenly: all tokens of a block use
    one slot (decode: one token per block). Slot 0 is no adapter: its tokens do no work.
    a [slots, d_in, rank], b [slots, rank, d_out], scale [slots] float32, rank [slots] int32: with
    `layer`, each has a leading layers axis, of which one entry is read and nothing is copied.
    A fused projection has several members: a [slots, d_in, members * rank] with member m's columns at
    [m * rank, (m + 1) * rank), b and y are tuples, scale is [slots, members].
The intermediate of width rank, and all sums, are float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.batched_lora import pallas_triton, reference, xla
from pallas_kernels.batched_lora.gradient import differentiable
from pallas_kernels.implementation import choose


def lora_shrink(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "*layers slots d_in rank"],
    slot: Int32[Array, " blocks"],
    *,
    rank: Int32[Array, "*layers slots"] | None = None,
    layer: Int32[Array, ""] | None = None,
) -> Float[Array, "tokens rank"]:
    """h = x · A of each token's slot, float32; zero for slot 0 and beyond the slot's rank."""
    (a,), rank, layer = _stacked((a,), rank, layer, width=a.shape[-1])
    return reference.lora_shrink(x, a, slot, rank, layer)


def lora_expand(
    h: Float[Array, "tokens rank"],
    b: Float[Array, "*layers slots rank d_out"],
    slot: Int32[Array, " blocks"],
    scale: Float[Array, "*layers slots"],
    y: Float[Array, "tokens d_out"],
    *,
    rank: Int32[Array, "*layers slots"] | None = None,
    layer: Int32[Array, ""] | None = None,
) -> Float[Array, "tokens d_out"]:
    """y + scale · (h · B) of each token's slot; y for slot 0."""
    (b, scale), rank, layer = _stacked((b, scale), rank, layer, width=b.shape[-2])
    return reference.lora_expand(h, b, slot, scale, y, rank, layer)


def batched_lora(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "*layers slots d_in columns"],
    b: jax.Array | tuple[jax.Array, ...],
    slot: Int32[Array, " blocks"],
    scale: Float[Array, "..."],
    y: jax.Array | tuple[jax.Array, ...],
    *,
    rank: Int32[Array, "*layers slots"] | None = None,
    layer: Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """y + scale · ((x · A) · B) of each token's slot, for one output or for a fused projection's several.

    Differentiable with respect to x, a, b, scale and y.
    implementation: by default the fastest for the device and the shapes; see `pallas_kernels.implementation`.
    """
    members = y if isinstance(y, tuple) else (y,)
    factors = b if isinstance(b, tuple) else (b,)
    scale = scale if isinstance(y, tuple) else scale[..., None]
    (a, scale, *factors), rank, layer = _stacked(
        (a, scale, *factors), rank, layer, width=factors[0].shape[-2]
    )
    operands = x, a, tuple(factors), slot, scale, members, rank, layer
    refused = pallas_triton.why_refused(x.shape[0], slot.shape[0], factors[0].shape[-2])
    chosen = choose(implementation, refused)
    out: Any = differentiable(_RUN[chosen], *operands)
    return out if isinstance(y, tuple) else out[0]


_RUN = {
    "xla": xla.batched_lora,
    "triton": functools.partial(pallas_triton.batched_lora, interpret=False),
    "triton-interpret": functools.partial(pallas_triton.batched_lora, interpret=True),
}


def _stacked(
    arrays: tuple[jax.Array, ...], rank: jax.Array | None, layer: jax.Array | None, *, width: int
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Arrays and rank with a layers axis, and the index into it; without a rank, all columns count."""
    if layer is None:
        arrays = tuple(array[None] for array in arrays)
        rank = None if rank is None else rank[None]
    if rank is None:
        rank = jnp.full(arrays[0].shape[:2], width, jnp.int32)
    return arrays, rank, jnp.int32(0) if layer is None else layer
