"""The array type of structs that hold numpy arrays on their way into `jax.jit` and JAX arrays inside."""

from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    AnyArray = jax.Array  # what code under jit sees; the host side builds these structs from untyped fields
else:
    AnyArray = jax.Array | np.ndarray
