"""What a request asks to be done to its logits before a token is drawn: biases, penalties, masks.

Rows never mix, and a row with neutral values keeps its bits.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from lorajax.arrays import AnyArray
from lorajax.pytree import pytree_dataclass

WORD_BITS = 32


@pytree_dataclass
class LogitsAdjustment:
    """Settings of each row. A set of tokens is a row of bits: token t is bit t % 32 of word t // 32.

    allowed: tokens that may be drawn. repetition: penalty of the tokens in `seen`, which are those of
    the prompt and the output; 1 is off.
    bias: added before the repetition penalty. penalty: taken off after it (presence and frequency).
    Both None in a batch where no row has either.
    """

    allowed: UInt32[AnyArray, "rows words"]
    seen: UInt32[AnyArray, "rows words"]
    repetition: Float[AnyArray, " rows"]
    bias: Float[AnyArray, "rows vocab"] | None = None
    penalty: Float[AnyArray, "rows vocab"] | None = None


def adjust(logits: Float[Array, "rows vocab"], by: LogitsAdjustment) -> Float[Array, "rows vocab"]:
    """Bias, repetition penalty, presence and frequency penalties, then the mask, as vLLM orders them.

    The repetition penalty divides positive logits and multiplies negative ones (CTRL, arXiv:1909.05858).
    Tokens that are not allowed get -inf.
    """
    vocab = logits.shape[1]
    if by.bias is not None:
        logits = logits + by.bias
    repetition = by.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(_unpack(by.seen, vocab), repeated, logits)
    if by.penalty is not None:
        logits = logits - by.penalty
    return jnp.where(_unpack(by.allowed, vocab), logits, -jnp.inf)


def num_words(vocab_size: int) -> int:
    """Words of a set of tokens."""
    return -(-vocab_size // WORD_BITS)


def _unpack(bits: UInt32[Array, "rows words"], vocab: int) -> Bool[Array, "rows vocab"]:
    shifts = jnp.asarray(np.arange(WORD_BITS, dtype=np.uint32))
    flags = (bits[:, :, None] >> shifts[None, None, :]) & jnp.uint32(1)
    return flags.reshape(bits.shape[0], -1)[:, :vocab].astype(bool)
