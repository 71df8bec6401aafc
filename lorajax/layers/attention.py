"""Grouped-query self-attention with rotary positions, over paged KV or over whole sequences."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lorajax.config import ModelConfig
from lorajax.forward_context import ForwardContext
from lorajax.kv_cache import PagedKVCache, write_kv
from lorajax.layers.linear import Linear, QKVLinear
from lorajax.layers.norm import RMSNorm
from lorajax.layers.rotary import apply_rotary
from pallas_kernels import paged_attention


class Attention(nnx.Module):
    """Projects, rotates, stores K and V, attends, projects back.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Kwon et al. 2023,
    arXiv:2309.06180 (paged KV).
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv_proj = QKVLinear(
            config.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            use_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.o_proj = Linear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            use_bias=config.attention_output_bias,
            dtype=dtype,
            rngs=rngs,
        )
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.q_norm = RMSNorm(self.head_dim, **norm) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, **norm) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "tokens d_model"], kv_cache: PagedKVCache | None, ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_model"], PagedKVCache | None]:
        q, k, v = self.qkv_proj(x, ctx)
        q = q.reshape(-1, self.num_heads, self.head_dim)
        k = k.reshape(-1, self.num_kv_heads, self.head_dim)
        v = v.reshape(-1, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        assert ctx.rotary is not None, "the decoder sets the rotary angles"
        q, k = apply_rotary(q, *ctx.rotary), apply_rotary(k, *ctx.rotary)
        if kv_cache is None:
            attended = _attend_whole_sequences(q, k, v, ctx)
        else:
            assert ctx.attention is not None and ctx.layer is not None
            kv_cache = write_kv(kv_cache, k, v, ctx.attention.write_index, ctx.layer)
            attended = paged_attention(
                q,
                kv_cache.k,
                kv_cache.v,
                ctx.attention.page_table,
                ctx.attention.block_seq,
                ctx.positions,
                layer=ctx.layer,
            )
        return self.o_proj(attended.reshape(x.shape[0], -1), ctx), kv_cache


def _attend_whole_sequences(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    ctx: ForwardContext,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention within each of `ctx.num_sequences` sequences of equal length."""
    batched = (part.reshape(ctx.num_sequences, -1, *part.shape[1:]) for part in (q, k, v))
    return jax.nn.dot_product_attention(*batched, is_causal=True).reshape(q.shape)
