"""Sampling on the device: one row per request, all settings as data, rows never mix.

A row's draw depends only on its logits, its settings and its key (seed, child index, position), so a
request gets the same tokens in any batch, row or bucket.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from lorajax.arrays import AnyArray
from lorajax.pytree import pytree_dataclass


@pytree_dataclass
class SamplingInputs:
    """Settings of each row.

    temperature: 0 is greedy: the row is an argmax over its unscaled logits.
    top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: low and high word. child, position: make the key of this very token.
    """

    temperature: Float[AnyArray, " rows"]
    top_k: Int32[AnyArray, " rows"]
    top_p: Float[AnyArray, " rows"]
    min_p: Float[AnyArray, " rows"]
    seed: UInt32[AnyArray, "rows 2"]
    child: Int32[AnyArray, " rows"]
    position: Int32[AnyArray, " rows"]


def sample(logits: Float[Array, "rows vocab"], inputs: SamplingInputs | None) -> Int32[Array, " rows"]:
    """Draw one token per row, from logits that are already adjusted (`lorajax.logits_adjustment`).

    inputs: None if every row is greedy, which skips all but the argmax.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return best if inputs is None else jnp.where(inputs.temperature > 0, _draw(logits, inputs), best)


def _draw(logits: Float[Array, "rows vocab"], inputs: SamplingInputs) -> Int32[Array, " rows"]:
    """Temperature, then min-p, top-k and top-p, then a Gumbel-max draw with the row's own key."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
    scaled = logits / temperature[:, None]
    filters = (inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)
    kept = jax.lax.cond(
        jnp.any(filters), kept_tokens, lambda scaled, _: jnp.ones_like(scaled, bool), scaled, inputs
    )

    def noise(seed: Array, child: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), child), position)
        return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

    gumbel = jax.vmap(noise)(inputs.seed, inputs.child, inputs.position)
    return jnp.argmax(jnp.where(kept, scaled + gumbel, -jnp.inf), axis=-1).astype(jnp.int32)


def kept_tokens(scaled: Float[Array, "rows vocab"], inputs: SamplingInputs) -> Bool[Array, "rows vocab"]:
    """Tokens that min-p, top-k and top-p leave, each filter over what the one before left.

    Tokens that tie with the last one kept are kept as well.
    """
    probs = jax.nn.softmax(scaled, axis=-1)
    kept = probs >= inputs.min_p[:, None] * jnp.max(probs, axis=-1, keepdims=True)
    order = _ordered_bits(scaled)

    k = jnp.where(inputs.top_k > 0, inputs.top_k, scaled.shape[1]).astype(jnp.float32)
    ones = kept.astype(jnp.float32)
    kept &= order >= _threshold(order, ones, jnp.minimum(k, jnp.sum(ones, axis=-1)))[:, None]

    mass = jnp.where(kept, probs, 0.0)
    target = jnp.where(inputs.top_p < 1, inputs.top_p * jnp.sum(mass, axis=-1), 0.0)
    threshold = _threshold(order, mass, target)[:, None]
    return kept & ((order >= threshold) | (inputs.top_p >= 1)[:, None])


def _ordered_bits(x: Float[Array, "rows vocab"]) -> Int32[Array, "rows vocab"]:
    """int32 in the order of the floats: a threshold on them can be found bit by bit, without a sort."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _threshold(
    order: Int32[Array, "rows vocab"], weight: Float[Array, "rows vocab"], target: Float[Array, " rows"]
) -> Int32[Array, " rows"]:
    """The largest t for which the weight of {order >= t} reaches the target (a 32-step bisection)."""
    lowest = jnp.full(target.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    highest = jnp.full(target.shape, jnp.iinfo(jnp.int32).max, jnp.int32)

    # invariant:  lowest reaches the target,  highest (exclusive) does not
    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        reached = jnp.sum(jnp.where(order >= middle[:, None], weight, 0.0), axis=-1) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    return jax.lax.fori_loop(0, 32, halve, (lowest, highest))[0]
