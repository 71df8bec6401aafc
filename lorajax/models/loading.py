"""Fill a model's arrays from a checkpoint by its key table.

Invariant: after `load_weights` every element of every array came from exactly one tensor of the
checkpoint; otherwise `CheckpointError` lists all that is missing, unknown or of the wrong shape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lorajax.checkpoints.checkpoint import TensorSource
from lorajax.config import ModelConfig
from lorajax.errors import CheckpointError
from lorajax.models import llama
from lorajax.models.decoder import Decoder
from lorajax.models.key_table import KeyRule, KeyTable

KEY_TABLES: dict[str, Callable[[ModelConfig], KeyTable]] = {
    "llama": llama.key_table,
}


def load_weights(
    config: ModelConfig,
    tensors: TensorSource,
    *,
    dtype: jnp.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the decoder that `config` describes with the checkpoint's weights in `dtype`.

    progress: called with (tensors read, tensors in all).
    Raises CheckpointError, naming every tensor at fault.
    """
    if config.architecture not in KEY_TABLES:
        raise CheckpointError(
            f"architecture {config.architecture!r} is not served; served are {', '.join(sorted(KEY_TABLES))}"
        )
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(model)
    arrays = {
        ".".join(map(str, path)): np.empty(var.get_value().shape, var.get_value().dtype)
        for path, var in nnx.to_flat_state(shapes)
    }
    _fill(arrays, _bind(KEY_TABLES[config.architecture](config), config, tensors), tensors, progress)

    def on_device(path: tuple, _: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(arrays.pop(".".join(str(key.key) for key in path if hasattr(key, "key"))))

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(on_device, shapes))


def _bind(table: KeyTable, config: ModelConfig, tensors: TensorSource) -> dict[str, KeyRule]:
    """Match every key with its rule, or report all that do not fit."""
    bound: dict[str, KeyRule] = {}
    faults: list[str] = []
    patterns = [(rule.pattern, rule) for rule in table]
    for key in tensors.keys():  # noqa: SIM118 - a TensorSource is no dict
        rules = [rule for pattern, rule in patterns if pattern.match(key)]
        if len(rules) != 1:
            faults.append(f"{key}: not a tensor of this architecture")
        elif rules[0].path is None:
            continue
        elif (rules[0].layer_of(key) or 0) >= config.num_layers:
            faults.append(f"{key}: the model has {config.num_layers} layers")
        elif tensors.shape(key) != rules[0].shape:
            faults.append(f"{key}: shape {tensors.shape(key)}, expected {rules[0].shape}")
        else:
            bound[key] = rules[0]
    faults += [f"{key}: missing" for key in _expected_keys(table, config) if key not in tensors.keys()]  # noqa: SIM118
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"checkpoint does not fit {config.architecture}: {shown}")
    return bound


def _expected_keys(table: KeyTable, config: ModelConfig) -> list[str]:
    keys = []
    for rule in table:
        if rule.path is None:
            continue
        layers = range(config.num_layers) if "{layer}" in rule.key else range(1)
        keys += [rule.key.replace("{layer}", str(layer)) for layer in layers]
    return keys


def _fill(
    arrays: dict[str, np.ndarray],
    bound: dict[str, KeyRule],
    tensors: TensorSource,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Put every tensor into its region; the regions of a table are disjoint and cover the arrays."""
    filled = dict.fromkeys(arrays, 0)
    for count, (key, rule) in enumerate(bound.items(), start=1):
        assert rule.path is not None
        layer = rule.layer_of(key)
        target = arrays[rule.path] if layer is None else arrays[rule.path][layer]
        tensor = tensors.read(key)
        target[rule.region] = tensor.reshape(rule.view or rule.shape)
        filled[rule.path] += tensor.size
        if progress is not None:
            progress(count, len(bound))
    unset = [path for path, array in arrays.items() if filled[path] != array.size]
    assert not unset, f"the key table leaves {unset} unset"
