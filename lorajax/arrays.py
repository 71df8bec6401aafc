"""The array types that annotations name."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
"""An array on the device or on the host."""
