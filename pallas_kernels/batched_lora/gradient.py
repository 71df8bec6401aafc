"""Gradients of `batched_lora`, whichever implementation runs forward: those of the reference."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.batched_lora import reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(run: Callable, x, a, b, slot, scale, y, rank, layer):
    """`run` on these operands, differentiable in x, a, b, scale and y."""
    return run(x, a, b, slot, scale, y, rank, layer)


def _forward(run, x, a, b, slot, scale, y, rank, layer):
    return run(x, a, b, slot, scale, y, rank, layer), (x, a, b, slot, scale, y, rank, layer)


def _backward(_run, saved, gradient):
    x, a, b, slot, scale, y, rank, layer = saved
    slot, rank, layer = jnp.asarray(slot), jnp.asarray(rank), jnp.asarray(layer)
    _, pull_back = jax.vjp(
        lambda x, a, b, scale, y: reference.batched_lora(x, a, b, slot, scale, y, rank, layer),
        x,
        a,
        b,
        scale,
        y,
    )
    dx, da, db, dscale, dy = pull_back(gradient)
    return dx, da, db, None, dscale, dy, None, None


differentiable.defvjp(_forward, _backward)
