"""The tensors of a Hugging Face folder: one `model.safetensors`, or the shards that an index lists.

Invariant: every tensor stands in exactly one file, and all that the index lists are there.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from lorajax.checkpoints.regular_file import FormatFault, parse_json_object, read_small_file
from lorajax.checkpoints.safetensors_file import SafetensorsFile
from lorajax.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsFolder:
    """A `TensorSource`. Opens and checks every file; raises CheckpointError for whatever is wrong."""

    def __init__(self, folder: Path):
        listed = None
        if (folder / SINGLE).exists():  # as transformers: it wins over an index
            names = [SINGLE]
        elif (folder / INDEX).exists():
            listed = _weight_map(folder)
            names = sorted(set(listed.values()))
        else:
            raise CheckpointError(_why_no_tensors(folder))
        self._owner: dict[str, SafetensorsFile] = {}
        for name in names:
            file = SafetensorsFile(folder / name)
            for key in file.entries:
                if key in self._owner:
                    raise CheckpointError(f"tensor {key!r} stands in {self._owner[key].name} and in {name}")
                self._owner[key] = file
        for key, name in (listed or {}).items():
            if key not in self._owner or self._owner[key].name != name:
                raise CheckpointError(f"{INDEX}: tensor {key[:200]!r} is not in {name}")

    def keys(self) -> Collection[str]:
        return self._owner.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owner[name].entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._owner[name].entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self._owner[name].read(name)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._owner[name].read_slice(name, index)


def read_json_file(path: Path, max_bytes: int = 256 << 20) -> dict:
    """A JSON object on disk. Raises CheckpointError, which names the file and not its folder."""
    try:
        return parse_json_object(read_small_file(path, max_bytes))
    except FormatFault as fault:
        raise CheckpointError(f"{path.name}: {fault}") from None


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json_file(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is missing or empty")
    for name in set(map(str, weight_map.values())):
        # an index must not lead out of its folder
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX}: weight_map has {name[:120]!r}; allowed: a *.safetensors file")
    missing = sorted(name for name in set(weight_map.values()) if not (folder / name).exists())
    if missing:
        raise CheckpointError(
            f"{INDEX} lists {len(set(weight_map.values()))} files, of which {len(missing)} are not in the "
            f"folder: {', '.join(missing[:4])}"
        )
    return weight_map


def _why_no_tensors(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    missing = f"no {SINGLE} and no {INDEX} in the folder"
    tensors = [name for name in names if name.endswith(".safetensors")]
    if tensors:
        return f"{missing}, but {', '.join(tensors[:4])}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{missing}, but {pickles[0]}, a pickle, which is never loaded, since it can run code; "
            "save the model as safetensors (transformers: save_pretrained)"
        )
    return missing
