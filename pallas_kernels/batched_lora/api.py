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

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.batched_lora import xla


def lora_shrink(
    x: Float[Array, "tokens d_in"],
    a: Float[Array, "*layers slots d_in rank"],
    slot: Int32[Array, " blocks"],
    *,
    rank: Int32[Array, "*layers slots"] | None = None,
    layer: Int32[Array, ""] | None = None,
) -> Float[Array, "tokens rank"]:
    """h = x · A of each token's slot, float32; zero for slot 0."""
    a, layer = _stacked(a, layer)
    return xla.lora_shrink(x, a, slot, layer)


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
    """y + scale · (h · B) of each token's slot; y unchanged for slot 0."""
    scale, _ = _stacked(scale, layer)
    b, layer = _stacked(b, layer)
    return xla.lora_expand(h, b, slot, scale, y, layer)


def batched_lora(x, a, b, slot, scale, y, *, rank=None, layer=None):
    """y + scale · ((x · A) · B) of each token's slot, for one output or for a fused projection's several."""
    single = not isinstance(y, tuple)
    stacked_scale, _ = _stacked(scale, layer)
    stacked_b = tuple(_stacked(part, layer)[0] for part in ((b,) if single else b))
    a, layer = _stacked(a, layer)
    scale = stacked_scale[..., None] if single else stacked_scale
    out = xla.batched_lora(x, a, stacked_b, slot, scale, (y,) if single else y, layer)
    return out[0] if single else out


def _stacked(array, layer):
    """The array with a layers axis, and the index into it."""
    return (array[None], jnp.int32(0)) if layer is None else (array, layer)
