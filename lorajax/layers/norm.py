"""RMSNorm in the order of casts that transformers uses."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis: statistics in float32, the product in the input's type.

    (`nnx.RMSNorm` multiplies in float32, which rounds differently in bfloat16 and is refused under
    strict dtype promotion.) Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, dim: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + jnp.float32(self.eps))).astype(x.dtype)
        return normed * self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
