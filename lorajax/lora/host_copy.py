"""Host copies of adapters: cast once, checked to be finite, and never changed again.

Invariant: the arrays of a host copy are read-only and shared with nobody, so a slot that is written
from it twice holds the same bits.
"""

import jax
import numpy as np
from numpy.typing import DTypeLike

from lorajax.errors import AdapterFormatError
from lorajax.lora.weights import AdapterWeights, AnyArray, LoRAModule


def host_copy(weights: AdapterWeights, dtype: DTypeLike) -> AdapterWeights:
    """The adapter as read-only numpy arrays of the serving dtype, whatever its leaves were.

    Raises:
        AdapterFormatError: a value that is not finite in `dtype`; names the module.
    """
    modules = {}
    for path, module in weights.modules.items():
        a = finite_cast(module.a, np.dtype(dtype), f"{path}: A")
        b = finite_cast(module.b, np.dtype(dtype), f"{path}: B")
        modules[path] = LoRAModule(a=a, b=b, scaling=module.scaling)
    return AdapterWeights(modules=modules)


def finite_cast(array: AnyArray, dtype: np.dtype, name: str) -> np.ndarray:
    """A read-only copy in `dtype`. Checked after the cast: 70000 is no float16.

    Raises:
        AdapterFormatError: not all values are finite; calls the array `name`.
    """
    copy = cast(np.asarray(jax.device_get(array)), dtype, copy=True)
    if not np.isfinite(copy).all():
        raise AdapterFormatError(f"{name} holds values that are not finite in {dtype.name}")
    copy.setflags(write=False)
    return copy


def cast(array: np.ndarray, dtype: np.dtype, *, copy: bool = False) -> np.ndarray:
    """Round to `dtype`; what is too large becomes infinite, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=copy)
