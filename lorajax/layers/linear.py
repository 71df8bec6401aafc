"""Linear layers of a decoder. Weights are stored `[..., d_out, d_in]`, as Hugging Face has them.

With the input dimension last, XLA's CPU matmul gives a row the same bits whatever rows stand beside
it (from two rows on), which a `[d_in, d_out]` layout does not.

Every linear is called as `linear(x, ctx)`, so that a LoRA wrapper can take its place.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lorajax.forward_context import ForwardContext


def init_weight(rngs: nnx.Rngs, *shape: int, dtype: jnp.dtype) -> nnx.Param:
    """Small random weights: a placeholder for a checkpoint, and toy models for tests."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))


def project(
    x: Float[Array, "tokens d_in"], weight: Float[Array, "*d_out d_in"]
) -> Float[Array, "tokens *d_out"]:
    """x · weightᵀ over the last axis of both.

    Multiplied as one matrix: XLA's CPU matmul would transpose a weight of three axes in every call.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ()))).reshape(x.shape[0], *weight.shape[:-1])


class Linear(nnx.Module):
    """y = x · Wᵀ (+ bias); weight [d_out, d_in]."""

    def __init__(self, d_in: int, d_out: int, *, use_bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = init_weight(rngs, d_out, d_in, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "tokens d_in"], ctx: ForwardContext) -> Float[Array, "tokens d_out"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


class QKVLinear(nnx.Module):
    """The fused q, k and v projections, grouped by kv head.

    weight: [kv_heads, (q_per_kv + 2) * head_dim, d_in]. Group g holds the query heads that share kv
    head g, then its key head, then its value head: so a split over kv heads is a split of axis 0, and
    each device finds its own q, k and v together.
    """

    def __init__(
        self,
        d_in: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        use_bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.q_per_kv = num_q_heads // num_kv_heads
        rows = (self.q_per_kv + 2) * head_dim
        self.weight = init_weight(rngs, num_kv_heads, rows, d_in, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((num_kv_heads, rows), dtype)) if use_bias else None

    def __call__(
        self, x: Float[Array, "tokens d_in"], ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_q"], Float[Array, "tokens d_kv"], Float[Array, "tokens d_kv"]]:
        grouped = project(x, self.weight[...])
        if self.bias is not None:
            grouped = grouped + self.bias[...][None]
        # rows of a group:  [ q q q | k | v ],  each head_dim long
        end_q = self.q_per_kv * self.head_dim
        end_k = end_q + self.head_dim
        parts = grouped[:, :, :end_q], grouped[:, :, end_q:end_k], grouped[:, :, end_k:]
        q, k, v = (part.reshape(x.shape[0], -1) for part in parts)
        return q, k, v


class GateUpLinear(nnx.Module):
    """The fused gate and up projections of a gated MLP; weight [2, d_ff, d_in]."""

    def __init__(self, d_in: int, d_ff: int, *, use_bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = init_weight(rngs, 2, d_ff, d_in, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((2, d_ff), dtype)) if use_bias else None

    def __call__(
        self, x: Float[Array, "tokens d_in"], ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_ff"], Float[Array, "tokens d_ff"]]:
        both = project(x, self.weight[...])
        if self.bias is not None:
            both = both + self.bias[...][None]
        return both[:, 0], both[:, 1]
