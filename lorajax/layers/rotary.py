"""Rotary position embedding: frequencies of every scaling rule, and the rotation itself.

Frequencies are computed once in float64 on the host and rounded to float32.
Sources: Su et al. 2021, arXiv:2104.09864 (rotary); Peng et al. 2023, arXiv:2309.00071 (YaRN);
the scaling rules' names and defaults are those of transformers' `rope_parameters`.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lorajax.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency of each pair of dimensions, and the factor on cos and sin.

    Returns (float32 [head_dim / 2] in radians per token, attention factor).
    """
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type in ("default", "dynamic"):
        # "dynamic" only changes sequences beyond the trained length, which are not served.
        return plain.astype(np.float32), 1.0
    if rope.rope_type == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    if rope.rope_type == "llama3":
        return _llama3(plain, rope).astype(np.float32), 1.0
    return _yarn(plain, rope, head_dim).astype(np.float32), _yarn_attention_factor(rope)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # over the trained length
    # turns:   ... low_freq_factor ............ high_freq_factor ...
    # kept:     0  |             0 → 1          |  1
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return plain * kept + plain / rope.factor * (1.0 - kept)


def _yarn(plain: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Dimensions that turn more than `beta_fast` times are kept, below `beta_slow` stretched."""
    length = rope.original_max_position_embeddings
    assert length is not None

    def dim_with_turns(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with_turns(rope.beta_fast), dim_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # pair index:   0 ... low ........ high ... head_dim / 2
    # stretched:    0      |  0 → 1     |  1
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1.0 - stretched)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotary_cos_sin(
    positions: Int32[Array, " tokens"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """cos and sin of every position's angles, float32."""
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None]
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rotary(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of every head by the token's angles."""
    cos, sin = cos.astype(x.dtype)[:, None], sin.astype(x.dtype)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
