"""Checked reading of a safetensors file that comes from a stranger.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header,
data). Invariant: the whole header is checked against the size of the file before any tensor is read,
and no allocation follows a number in the file that the file's own size does not cover.

Data is read with `pread`, never mapped: a file that shrinks while it is mapped kills the process.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lorajax.errors import AdapterFormatError

MAX_HEADER_BYTES = 32 << 20  # ~150 bytes a tensor: room for 200 thousand tensors

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class TensorEntry(NamedTuple):
    """One tensor as the header describes it: dtype, shape, and its bytes [begin, end) in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file whose header was found sound. `entries`: tensor name → `TensorEntry`."""

    def __init__(self, name: str, fd: int):
        self.name = name
        self._fd = fd
        self.entries = _read_entries(name, fd)

    def read(self, key: str) -> np.ndarray:
        """A fresh array with the tensor's values in the dtype of the file."""
        entry = self.entries[key]
        data = _read_bytes(self._fd, entry.begin, entry.end - entry.begin)
        if len(data) != entry.end - entry.begin:
            raise AdapterFormatError(f"{self.name}: the file became shorter while it was read")
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)


@contextmanager
def open_safetensors(path: Path, name: str | None = None) -> Iterator[SafetensorsFile]:
    """Open and check a safetensors file. Errors call it `name` (its base name), not by its folder.

    Raises:
        AdapterFormatError: not a regular file, not safetensors, damaged, or a dtype other than
            F64, F32, F16 and BF16.
    """
    name = name or path.name
    fd = open_regular_file(path, name)
    try:
        yield SafetensorsFile(name, fd)
    finally:
        os.close(fd)


def open_regular_file(path: Path, name: str) -> int:
    """A descriptor for reading; refuses pipes and devices, which could block or never end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterFormatError(f"{name}: cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterFormatError(f"{name}: not a regular file")
    return fd


def read_json_object(text: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object of a stranger: UTF-8, no key twice, bounded depth.

    Raises:
        AdapterFormatError: anything else.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique_keys(pairs, name))
    except UnicodeDecodeError:
        raise AdapterFormatError(f"{name}: not UTF-8 text") from None
    except RecursionError:
        raise AdapterFormatError(f"{name}: JSON nested too deeply") from None
    except AdapterFormatError:  # a ValueError too, with its own message
        raise
    except ValueError as error:
        raise AdapterFormatError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterFormatError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise AdapterFormatError(f"{name}: the key {twice[:120]!r} stands there twice")
    return value


def _read_entries(name: str, fd: int) -> dict[str, TensorEntry]:
    size = os.fstat(fd).st_size
    prefix = _read_bytes(fd, 0, 8)
    if len(prefix) < 8:
        raise AdapterFormatError(f"{name}: {len(prefix)} bytes long: too short for a safetensors file")
    header_size = int.from_bytes(prefix, "little")
    if header_size > min(size - 8, MAX_HEADER_BYTES) or header_size < 2:
        raise AdapterFormatError(f"{name}: {_what_it_is(fd, header_size, size)}")
    header_bytes = _read_bytes(fd, 8, header_size)
    if not header_bytes.startswith(b"{"):
        raise AdapterFormatError(f"{name}: {_what_it_is(fd, header_size, size)}")
    header = read_json_object(header_bytes, f"header of {name}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterFormatError(f"header of {name}: __metadata__ must map names to text")
    data_begin = 8 + header_size
    entries = {key: _entry(name, key, value, data_begin) for key, value in header.items()}
    _check_layout(name, entries, data_begin, size)
    return entries


def _what_it_is(fd: int, header_size: int, size: int) -> str:
    """Why the file is no safetensors file, in the words of the commonest mistakes."""
    start = _read_bytes(fd, 0, min(size, 64)).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    if start[:1] == b"<":
        return "an HTML or XML page, not a safetensors file"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        return "a pickle checkpoint under another name; it is never unpickled"
    return (
        f"not a whole safetensors file: it declares a header of {header_size} bytes, "
        f"and is {size} bytes long (a header may have 2 to {MAX_HEADER_BYTES} bytes)"
    )


def _entry(name: str, key: str, value: Any, data_begin: int) -> TensorEntry:
    where = f"header of {name}: tensor {key[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise AdapterFormatError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise AdapterFormatError(f"{where}: dtype {str(dtype)[:20]!r}; readable are {', '.join(DTYPES)}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise AdapterFormatError(f"{where}: shape and data_offsets must be lists of whole numbers >= 0")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise AdapterFormatError(f"{where}: {dtype} {shape} does not fill the bytes [{begin}, {end})")
    return TensorEntry(DTYPES[dtype], tuple(shape), data_begin + begin, data_begin + end)


def _is_counts(value: Any) -> bool:
    # 2**48: no file is larger, and a product of eight stays a quick integer
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_layout(name: str, entries: dict[str, TensorEntry], data_begin: int, size: int) -> None:
    """The tensors' bytes must tile [data_begin, size): no gap, no overlap, nothing behind."""
    position = data_begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps another tensor" if entry.begin < position else "leaves a gap before it"
            raise AdapterFormatError(f"header of {name}: tensor {key[:200]!r} {problem}")
        position = entry.end
    if position != size:
        missing = "truncated" if position > size else "followed by foreign bytes"
        raise AdapterFormatError(f"{name}: {missing}: the header describes {position} bytes, found {size}")


def _read_bytes(fd: int, offset: int, count: int) -> bytes:
    """Up to `count` bytes; fewer only at the end of the file."""
    parts = []
    while count and (part := os.pread(fd, min(count, 1 << 30), offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)
