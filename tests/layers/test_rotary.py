"""Rotary frequencies and angles against their definitions in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lorajax.config import RopeConfig
from lorajax.layers.rotary import apply_rotary, rope_frequencies, rotary_cos_sin

HEAD_DIM = 64


def plain(theta):
    return np.array([theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)])


def test_default_and_linear():
    np.testing.assert_allclose(rope_frequencies(RopeConfig(theta=1e5), HEAD_DIM)[0], plain(1e5), rtol=1e-7)
    linear = RopeConfig(rope_type="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(linear, HEAD_DIM)[0], plain(1e4) / 4, rtol=1e-7)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_by_wavelength(factor):
    rope = RopeConfig(
        theta=5e5, rope_type="llama3", factor=factor, original_max_position_embeddings=8192,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    expected = []
    for frequency in plain(5e5):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    frequencies, attention_factor = rope_frequencies(rope, HEAD_DIM)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-7)
    assert attention_factor == 1.0


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    rope = RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    frequencies, attention_factor = rope_frequencies(rope, HEAD_DIM)
    np.testing.assert_allclose(frequencies[:4], plain(1e6)[:4], rtol=1e-7)
    np.testing.assert_allclose(frequencies[-4:], plain(1e6)[-4:] / 4, rtol=1e-7)
    assert np.all(np.diff(frequencies) < 0)
    assert attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    same = RopeConfig(
        theta=1e6,
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=32768,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert rope_frequencies(same, HEAD_DIM)[1] == 1.0


@pytest.mark.parametrize("position", [0, 1, 2000, 9000])
def test_rotation_turns_pairs_by_the_angle(position):
    rope = RopeConfig(theta=1e5)
    cos, sin = rotary_cos_sin(jnp.array([position], jnp.int32), rope, HEAD_DIM)
    x = np.random.default_rng(position).standard_normal((1, 2, HEAD_DIM)).astype(np.float32)
    turned = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * np.exp(1j * position * plain(1e5))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(apply_rotary(jnp.asarray(x), cos, sin), expected, atol=2e-3)
