"""An adapter's folder on disk: which files may be read, and which never are.

Invariant: only `adapter_config.json`, `adapter_model.safetensors` and a tokenizer's JSON files are
ever opened; nothing is unpickled. With `roots`, symlinks are followed first and what lies outside is
refused. Errors name a file by its base name: a client must not learn the server's folders.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lorajax.checkpoints.regular_file import FormatFault, parse_json_object, read_small_file
from lorajax.checkpoints.safetensors_file import SafetensorsFile
from lorajax.errors import AdapterFormatError
from lorajax.lora.peft_config import CONFIG_NAME

TENSORS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 32 << 20  # ~150 bytes a tensor: room for 200 thousand tensors

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def confined(path: str | Path, roots: Collection[str | Path] | None) -> Path:
    """The path with all symlinks followed, if it lies in one of the roots; `None` allows any place.

    Raises:
        AdapterFormatError: outside of all roots. The message names only the last part of the path.
    """
    if not str(path):
        raise AdapterFormatError("the path of an adapter is empty")
    try:
        resolved = Path(os.path.realpath(path))
    except ValueError:  # an embedded null byte
        raise AdapterFormatError("a path holds a null byte") from None
    if roots is not None and not any(resolved.is_relative_to(os.path.realpath(root)) for root in roots):
        raise AdapterFormatError(
            f"{Path(path).name[:80]}: lies outside of the folders that adapters may come from"
        )
    return resolved


class AdapterFolder:
    """A folder that holds a PEFT adapter: the paths of its two files, checked to be there."""

    def __init__(self, path: str | Path, roots: Collection[str | Path] | None = None):
        """
        Raises:
            AdapterFormatError: no such folder, a file missing, or a format that is not read; the
                message says which and what to do.
        """
        self.path = confined(path, roots)
        self._roots = roots
        names = _list_names(self.path, Path(path).name)
        if TENSORS_NAME not in names:
            raise AdapterFormatError(_why_no_tensors(names))
        if CONFIG_NAME not in names:
            raise AdapterFormatError(f"{CONFIG_NAME} is missing: r and lora_alpha cannot be guessed")
        self.names = frozenset(names)

    def open_tensors(self) -> SafetensorsFile:
        """The adapter's tensors, checked against the size of their file; close it after reading."""
        return SafetensorsFile(
            confined(self.path / TENSORS_NAME, self._roots),
            name=TENSORS_NAME,
            error=AdapterFormatError,
            max_header_bytes=MAX_HEADER_BYTES,
        )

    def read_config(self) -> dict[str, Any]:
        """The fields of `adapter_config.json`, as they stand."""
        return self.read_json(CONFIG_NAME, MAX_CONFIG_BYTES)

    def read_json(self, name: str, max_bytes: int) -> dict[str, Any]:
        try:
            return parse_json_object(self._read(name, max_bytes))
        except FormatFault as fault:
            raise AdapterFormatError(f"{name}: {fault}") from None

    def read_text(self, name: str, max_bytes: int) -> str:
        try:
            return self._read(name, max_bytes).decode("utf-8")
        except UnicodeDecodeError:
            raise AdapterFormatError(f"{name}: not UTF-8 text") from None

    def _read(self, name: str, max_bytes: int) -> bytes:
        try:
            return read_small_file(confined(self.path / name, self._roots), max_bytes)
        except FormatFault as fault:
            raise AdapterFormatError(f"{name}: {fault}") from None


def _list_names(folder: Path, shown: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        problem = "no such folder"
    except NotADirectoryError:
        problem = "a file; give the folder that holds it"
    except OSError as error:
        problem = str(error.strerror)
    raise AdapterFormatError(f"adapter folder {shown[:80]!r}: {problem}")


def _why_no_tensors(names: set[str]) -> str:
    missing = f"{TENSORS_NAME} is missing"
    pickles = sorted(name for name in names if name.endswith(_PICKLE_SUFFIXES))
    tensors = sorted(name for name in names if name.endswith(".safetensors"))
    if any("-of-" in name for name in tensors) or f"{TENSORS_NAME}.index.json" in names:
        return f"{missing}: adapters in shards are not read; save the adapter as one file"
    if tensors:
        return f"{missing}: found {tensors[0][:120]!r}; PEFT's name for the file is {TENSORS_NAME}"
    if pickles:
        return (
            f"{missing}: found {pickles[0][:120]!r}, a pickle, which is never loaded, since it can run code; "
            "save the adapter as safetensors (PEFT: save_pretrained(..., safe_serialization=True))"
        )
    return f"{missing}: the folder holds no adapter"
