"""Weighted sums of adapters, exact: ranks are concatenated, nothing is decomposed or truncated."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.weights import AdapterWeights, AnyArray, LoRAModule


def blend_adapters(parts: Sequence[tuple[AdapterWeights, int | float]]) -> AdapterWeights:
    """The adapter whose update is Σ weight · update of each part.

    Per module, with w the weight and s the scaling of a part:

        Σ w·s·B·A  =  S · [B₁·(w₁s₁/S)  B₂·(w₂s₂/S) …] · [A₁; A₂; …]

    so its rank is the sum of the parts' ranks. S is the w·s of largest size. A part whose ratio to S
    is 1, or any power of two, is taken over bit for bit; the B of any other is multiplied by the
    ratio, in float32 or wider. A module that only one part adapts keeps its factors and gets the
    scaling w·s. Parts of weight 0 are left out.

    Raises:
        ConfigError: no part, all weights 0, or a weight that is no number that float32 can hold.
        AdapterFormatError: the parts adapt one module with different shapes.
    """
    for _, weight in parts:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"blend: weight {weight!r}; allowed: finite numbers")
    kept = [(adapter, float(weight)) for adapter, weight in parts if weight != 0]
    if not kept:
        raise ConfigError(
            f"blend: {len(parts)} parts, none with a weight other than 0; at least one is needed"
        )
    paths = sorted({path for adapter, _ in kept for path in adapter.modules})
    modules = {}
    for path in paths:
        terms = [
            (adapter.modules[path], weight * adapter.modules[path].scaling)
            for adapter, weight in kept
            if path in adapter.modules
        ]
        if not all(abs(factor) <= 3.4e38 for _, factor in terms):
            raise ConfigError(f"blend: weight times scaling of {path!r} is more than float32 holds")
        modules[path] = _sum_terms(path, terms)
    return AdapterWeights(modules=modules)


def _sum_terms(path: str, terms: list[tuple[LoRAModule, float]]) -> LoRAModule:
    first, factor = terms[0]
    if len(terms) == 1:
        return LoRAModule(a=first.a, b=first.b, scaling=factor)
    widths = {(module.a.shape[1], module.b.shape[0]) for module, _ in terms}
    if len(widths) > 1:
        raise AdapterFormatError(f"{path}: the adapters differ in (d_in, d_out): {sorted(widths)}")
    scaling = max((factor for _, factor in terms), key=abs)
    if scaling == 0:
        scaling, terms = 0.0, [(module, 0.0) for module, _ in terms]
    arrays = [array for module, _ in terms for array in (module.a, module.b)]
    xp = np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
    ratios = [factor / scaling if scaling else 1.0 for _, factor in terms]
    dtype = _common_dtype(arrays, exact=all(map(_is_power_of_two, ratios)))
    a = xp.concatenate([module.a.astype(dtype) for module, _ in terms], axis=0)
    scaled = [
        module.b.astype(dtype) * dtype.type(ratio) for (module, _), ratio in zip(terms, ratios, strict=True)
    ]
    b = xp.concatenate(scaled, axis=1)
    return LoRAModule(a=a, b=b, scaling=scaling)


def _common_dtype(arrays: list[AnyArray], *, exact: bool) -> np.dtype:
    """The arrays' own dtype if they share it and nothing is multiplied; otherwise float32 or wider."""
    dtypes = {np.dtype(array.dtype) for array in arrays}
    if exact and len(dtypes) == 1:
        return dtypes.pop()
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def _is_power_of_two(ratio: float) -> bool:
    return abs(math.frexp(ratio)[0]) == 0.5
