"""Log-probabilities of given tokens, and of the best ones in their places."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lorajax.pytree import pytree_dataclass

MAX_LOGPROBS = 20  # most alternatives that a request can ask for; the device always returns as many


@pytree_dataclass
class Logprobs:
    """Natural log-probabilities of raw logits. top: the best tokens of each row, best first; None if not
    asked for."""

    chosen: Float[Array, " rows"]
    top_token_ids: Int32[Array, "rows top"] | None = None
    top: Float[Array, "rows top"] | None = None


def token_logprobs(
    logits: Float[Array, "rows vocab"], token_ids: Int32[Array, " rows"], *, with_top: bool
) -> Logprobs:
    """Of one token per row, and with_top of the `MAX_LOGPROBS` best (the vocabulary, where it is smaller)."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    if not with_top:
        return Logprobs(chosen=chosen)
    top, top_token_ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    return Logprobs(chosen=chosen, top_token_ids=top_token_ids.astype(jnp.int32), top=top)
