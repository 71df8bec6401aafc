"""The decoder that all served families share: embedding, a scan over equal layers, norm, logits.

Layer weights are stacked on a leading `layers` axis and scanned, which keeps compile time and
dispatch independent of depth. Adapter slots and the KV cache are whole-model arrays that a layer
indexes with `ctx.layer`: sliced by the scan, they would be copied in every layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from lorajax.config import ModelConfig
from lorajax.forward_context import ForwardContext
from lorajax.kv_cache import PagedKVCache
from lorajax.layers.attention import Attention
from lorajax.layers.embedding import Embedding, LMHead
from lorajax.layers.mlp import MLP
from lorajax.layers.norm import RMSNorm
from lorajax.layers.rotary import rotary_cos_sin
from lorajax.lora.slots import LoRASlot


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "tokens d_model"], kv_cache: PagedKVCache | None, ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_model"], PagedKVCache | None]:
        attended, kv_cache = self.self_attn(self.input_layernorm(hidden), kv_cache, ctx)
        hidden = hidden + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden), ctx)
        return hidden, kv_cache


class Decoder(nnx.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(layer_rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, rngs=layer_rngs)

        self.layers = stacked_layers(rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = LMHead(
            config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, token_ids: Int32[Array, " tokens"], kv_cache: PagedKVCache | None, ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_model"], PagedKVCache | None]:
        """Run all layers. Returns the normed hidden state of every token, and the written cache."""
        ctx = ctx.replace(rotary=rotary_cos_sin(ctx.positions, self.config.rope, self.config.head_dim))
        graphdef, slots, weights = nnx.split(self.layers, LoRASlot, ...)

        def run_layer(carry, layer_weights_and_index):
            hidden, kv_cache = carry
            layer_weights, index = layer_weights_and_index
            layer = nnx.merge(graphdef, slots, layer_weights)
            return layer(hidden, kv_cache, ctx.replace(layer=index)), None

        hidden = self.embed_tokens(token_ids, ctx)
        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (hidden, kv_cache), _ = jax.lax.scan(run_layer, (hidden, kv_cache), (weights, indices))
        return self.norm(hidden), kv_cache

    def logits(self, hidden: Float[Array, "rows d_model"], ctx: ForwardContext) -> Float[Array, "rows vocab"]:
        """Logits of the given rows, float32. `ctx.lora` must be that of the rows, not of all tokens."""
        return self.lm_head(hidden, self.embed_tokens.weight[...], ctx)
