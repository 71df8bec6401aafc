"""Token embedding and the language-model head. A tied model uses one weight for both."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from lorajax.forward_context import ForwardContext
from lorajax.layers.linear import init_weight, project


class Embedding(nnx.Module):
    """weight [vocab, d_model]."""

    def __init__(self, vocab_size: int, d_model: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = init_weight(rngs, vocab_size, d_model, dtype=dtype)

    def __call__(
        self, token_ids: Int32[Array, " tokens"], ctx: ForwardContext
    ) -> Float[Array, "tokens d_model"]:
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")


class LMHead(nnx.Module):
    """Logits over the vocabulary. Owns a weight only where the model is untied.

    The weight is an argument of the call, because in a tied model it is the embedding's.
    """

    def __init__(self, vocab_size: int, d_model: int, *, tied: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = None if tied else init_weight(rngs, vocab_size, d_model, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "rows d_model"],
        embedding_weight: Float[Array, "vocab d_model"],
        ctx: ForwardContext,
    ) -> Float[Array, "rows vocab"]:
        weight = embedding_weight if self.weight is None else self.weight[...]
        return project(hidden, weight).astype(jnp.float32)
