"""Adapters as Orbax checkpoints.

Own format: one tree, {"factors": {path: {"a", "b"}}, "scaling": {path: float64}}, that any Orbax
`PyTreeCheckpointer` restores. Other Orbax checkpoints are read as the training states that they are,
see `lorajax.lora.training_state`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.training_state import Rename, read_pytree
from lorajax.lora.weights import AdapterWeights, LoRAModule

_MARKER = "_METADATA"


def is_orbax_folder(folder: str | Path) -> bool:
    """Whether a folder holds an Orbax checkpoint of a tree of arrays."""
    return (Path(folder) / _MARKER).is_file()


def save_orbax(weights: AdapterWeights, folder: str | Path) -> None:
    """Write an Orbax checkpoint; arrays keep their dtype. Orbax writes it whole or not at all.

    Raises:
        ConfigError: the folder exists. AdapterFormatError: the adapter holds no module.
    """
    import orbax.checkpoint as ocp  # takes seconds to import

    folder = Path(folder).absolute()
    if folder.exists():
        raise ConfigError(f"folder {folder.name!r} exists; an adapter is never written over another")
    if not weights.modules:
        raise AdapterFormatError("the adapter holds no LoRA module")
    tree = {
        "factors": {path: {"a": module.a, "b": module.b} for path, module in weights.modules.items()},
        "scaling": {path: np.float64(module.scaling) for path, module in weights.modules.items()},
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def load_orbax(
    folder: str | Path,
    rank: int | None = None,
    alpha: int | float | None = None,
    *,
    use_rslora: bool = False,
    config: ModelConfig | None = None,
    rename: Rename = None,
) -> AdapterWeights:
    """Read an adapter that `save_orbax` wrote, or an Orbax checkpoint of a LoRA training state.

    The other arguments are those of `AdapterWeights.from_pytree`; `alpha`, `use_rslora` and `rename`
    are for training states only, since an adapter of ours has its scalings. Leaves are numpy arrays.

    Raises:
        AdapterFormatError: no Orbax checkpoint, a damaged one, or not one of an adapter.
    """
    import orbax.checkpoint as ocp  # takes seconds to import

    folder = Path(folder).absolute()
    if not is_orbax_folder(folder):
        raise AdapterFormatError(f"{folder.name!r} is no Orbax checkpoint")
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            structure = checkpointer.metadata(folder).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
            tree = checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=as_numpy))
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        # Orbax's own messages name the folder
        raise AdapterFormatError(
            f"{folder.name!r} cannot be read by Orbax ({type(error).__name__})"
        ) from error
    source = _own_format(tree) if isinstance(tree, Mapping) and set(tree) == {"factors", "scaling"} else tree
    return read_pytree(source, rank, alpha, use_rslora=use_rslora, config=config, rename=rename)


def _own_format(tree: Mapping[str, Any]) -> AdapterWeights:
    factors, scalings = tree["factors"], tree["scaling"]
    if set(factors) != set(scalings):
        raise AdapterFormatError("the Orbax checkpoint has not one scaling for each module")
    modules = {}
    for path, pair in sorted(factors.items()):
        a, b, scaling = pair["a"], pair["b"], float(scalings[path])
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not abs(scaling) <= 3.4e38:
            raise AdapterFormatError(
                f"{path}: A {list(a.shape)}, B {list(b.shape)}, scaling {scaling} are no LoRA"
            )
        modules[path] = LoRAModule(a=a, b=b, scaling=scaling)
    return AdapterWeights(modules=modules)
