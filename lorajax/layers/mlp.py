"""The gated MLP (SwiGLU) of Llama and its relatives."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lorajax.config import ModelConfig
from lorajax.forward_context import ForwardContext
from lorajax.layers.linear import GateUpLinear, Linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d_model, d_ff, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = GateUpLinear(d_model, d_ff, use_bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(d_ff, d_model, use_bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens d_model"], ctx: ForwardContext
    ) -> Float[Array, "tokens d_model"]:
        gate, up = self.gate_up_proj(x, ctx)
        return self.down_proj(jax.nn.silu(gate) * up, ctx)
