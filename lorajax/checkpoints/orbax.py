"""Base models whose tensors are an Orbax checkpoint.

Format: a Hugging Face folder (config.json, tokenizer) with `orbax/` in place of the safetensors files:
an Orbax checkpoint of one flat tree {Hugging Face name: array}. The bits of every tensor are kept, so
that a model can go there and back. Tensors are read one by one, or slice by slice, through TensorStore.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorajax.checkpoints.checkpoint import TensorSource
from lorajax.checkpoints.safetensors_file import DTYPES
from lorajax.checkpoints.safetensors_folder import INDEX, SINGLE, read_json_file
from lorajax.errors import CheckpointError, ConfigError

TENSORS = "orbax"
_TREE = "_METADATA"
_COPIED = ("*.json", "*.jinja", "additional_chat_templates")


def has_orbax_tensors(folder: Path) -> bool:
    """Whether a model's folder holds its tensors as an Orbax checkpoint."""
    return (folder / TENSORS / _TREE).is_file()


class OrbaxTensors:
    """A `TensorSource`. Raises CheckpointError for a checkpoint that is damaged, or is no model's."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp  # takes seconds to import

        self._folder, self._name = (folder / TENSORS).absolute(), f"{folder.name}/{TENSORS}"
        tree = read_json_file(self._folder / _TREE)
        self._driver = "zarr3" if tree.get("use_zarr3") else "zarr"
        if not tree.get("use_ocdbt"):
            raise CheckpointError(f"{self._name}: written without OCDBT, Orbax's default, which is needed")
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                entries = checkpointer.metadata(self._folder).item_metadata.tree
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            # Orbax's own messages name the folder
            raise CheckpointError(f"{self._name}: not readable by Orbax ({type(error).__name__})") from error
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        for name, entry in entries.items():
            if not hasattr(entry, "shape") or np.dtype(entry.dtype) not in DTYPES.values():
                raise CheckpointError(
                    f"{self._name}: {name!r:.120} is no array of floats; "
                    "expected is a flat tree {Hugging Face name: array}"
                )
            self._shapes[name], self._dtypes[name] = tuple(entry.shape), np.dtype(entry.dtype)

    def keys(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[name]

    def read(self, name: str) -> np.ndarray:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A fresh array with `tensor[index]`; only the chunks that it touches are read."""
        import tensorstore

        base = {"driver": "file", "path": f"{self._folder}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        try:
            array = tensorstore.open(
                {"driver": self._driver, "kvstore": store}, read=True, open=True
            ).result()
            return np.array(array[index].read().result() if index else array.read().result())
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{self._name}: tensor {name!r} cannot be read ({type(error).__name__})"
            ) from error


def save_orbax(folder: Path, tensors: Mapping[str, Any] | TensorSource, *, like: Path) -> None:
    """Write a model with Orbax. Orbax writes the tensors whole or not at all, each process its shards.

    tensors: arrays (numpy, or JAX on any mesh) by Hugging Face name, or another checkpoint's.
    like: the Hugging Face folder whose config and tokenizer are copied.
    Raises ConfigError if the folder exists: a model is never written over another.
    """
    import orbax.checkpoint as ocp  # takes seconds to import

    _copy_files(like, folder)
    if not isinstance(tensors, Mapping):
        tensors = {name: tensors.read(name) for name in tensors.keys()}  # noqa: SIM118
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((folder / TENSORS).absolute(), dict(tensors))


def save_huggingface(
    folder: Path, tensors: TensorSource, *, like: Path, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as a Hugging Face folder; at most one shard is on the host at a time.

    like: the folder whose config and tokenizer are copied.
    Raises ConfigError if the folder exists.
    """
    from safetensors.numpy import save_file

    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors.keys()):
        num_bytes = int(np.prod(tensors.shape(name), dtype=np.int64)) * tensors.dtype(name).itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    _copy_files(like, folder)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, keys in zip(names, shards, strict=True):
        save_file({key: tensors.read(key) for key in keys}, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def _copy_files(source: Path, folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"folder {folder.name!r} exists; a model is never written over another")
    folder.mkdir(parents=True)
    for path in (path for pattern in _COPIED for path in source.glob(pattern) if path.name != INDEX):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name)
