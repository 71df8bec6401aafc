"""Checked reading of a safetensors file that comes from a stranger.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header,
data). Invariant: the whole header is checked against the size of the file before any tensor is read.
"""

import math
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lorajax.checkpoints.regular_file import FormatFault, RegularFile, parse_json_object
from lorajax.errors import CheckpointError, LoraJaxError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What a weight may be stored as. Integers and 8-bit floats mean nothing without scales: refused."""

_BLOCK_BYTES = 16 << 20  # rows read at once for a slice that takes only part of each


class TensorEntry(NamedTuple):
    """One tensor as the header describes it: dtype, shape, and its bytes [begin, end) in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file whose header was found sound. `entries`: tensor name → `TensorEntry`.

    name: what errors call the file (its base name unless given), never its folder.
    error: the type to raise, for whatever is wrong with the file, now or while tensors are read.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str | None = None,
        error: type[LoraJaxError] = CheckpointError,
        max_header_bytes: int = MAX_HEADER_BYTES,
    ):
        self.name, self._error = name or path.name, error
        try:
            self._file = RegularFile(path)
            self.entries, self.metadata = _read_header(self._file, max_header_bytes)
        except FormatFault as fault:
            raise error(f"{self.name}: {fault}") from None

    def close(self) -> None:
        """Reading after this is an error of the caller. A dropped file closes itself."""
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, key: str) -> np.ndarray:
        """A fresh array with the tensor's values in the dtype of the file."""
        return self.read_slice(key, ())

    def read_slice(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
        """A fresh array with `tensor[index]`; slices of step 1, reading little more than what they name."""
        entry = self.entries[key]
        bounds = slice_bounds(index, entry.shape)
        array = np.empty([stop - start for start, stop in bounds], entry.dtype)
        if not array.size:
            return array
        if bounds[1:] == [(0, size) for size in entry.shape[1:]]:  # whole rows: one run of bytes
            row_bytes = (entry.end - entry.begin) // entry.shape[0] if entry.shape else 0
            self._read_into(entry.begin + (bounds[0][0] * row_bytes if bounds else 0), array)
            return array
        row_bytes = (entry.end - entry.begin) // entry.shape[0]
        rows_at_once = max(1, _BLOCK_BYTES // row_bytes)
        first, stop = bounds[0]
        part = tuple(slice(*bound) for bound in bounds[1:])
        for start in range(first, stop, rows_at_once):
            block = np.empty((min(rows_at_once, stop - start), *entry.shape[1:]), entry.dtype)
            self._read_into(entry.begin + start * row_bytes, block)
            array[start - first : start - first + len(block)] = block[(slice(None), *part)]
        return array

    def _read_into(self, offset: int, array: np.ndarray) -> None:
        try:
            self._file.read_into(offset, array)
        except FormatFault as fault:
            raise self._error(f"{self.name}: {fault}") from None


def slice_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """[start, stop) along every axis; axes that the index does not name are taken whole."""
    assert len(index) <= len(shape) and all(part.step in (None, 1) for part in index)
    whole = (slice(None),) * (len(shape) - len(index))
    return [
        (start, max(start, stop))
        for start, stop, _ in (part.indices(size) for part, size in zip((*index, *whole), shape, strict=True))
    ]


def _read_header(file: RegularFile, max_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    prefix = file.read(0, 8)
    if len(prefix) < 8:
        raise FormatFault(f"{len(prefix)} bytes long: too short for a safetensors file")
    header_size = int.from_bytes(prefix, "little")
    if not 2 <= header_size <= min(file.size - 8, max_bytes):
        raise FormatFault(_what_it_is(file, header_size, max_bytes))
    data = file.read(8, header_size)
    if not data.startswith(b"{"):
        raise FormatFault(_what_it_is(file, header_size, max_bytes))
    try:
        header = parse_json_object(data)
    except FormatFault as fault:
        raise FormatFault(f"its header is {fault}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatFault("its header's __metadata__ must map names to text")
    data_begin = 8 + header_size
    entries = {key: _entry(key, value, data_begin) for key, value in header.items()}
    _check_layout(entries, data_begin, file.size)
    return entries, metadata


def _what_it_is(file: RegularFile, header_size: int, max_bytes: int) -> str:
    """Why the file is no safetensors file, in the words of the commonest mistakes."""
    start = file.read(0, 64).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    if start[:1] == b"<":
        return "an HTML or XML page, not a safetensors file"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        return "a pickle checkpoint under another name; it is never unpickled"
    return (
        f"not a whole safetensors file: it declares a header of {header_size} bytes, "
        f"and is {file.size} bytes long (a header may have 2 to {max_bytes} bytes)"
    )


def _entry(key: str, value: Any, data_begin: int) -> TensorEntry:
    where = f"its header's tensor {key[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatFault(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatFault(f"{where}: dtype {str(dtype)[:20]!r}; readable are {', '.join(DTYPES)}")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise FormatFault(f"{where}: shape and data_offsets must be lists of whole numbers >= 0")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise FormatFault(f"{where}: {dtype} {shape} does not fill the bytes [{begin}, {end})")
    return TensorEntry(DTYPES[dtype], tuple(shape), data_begin + begin, data_begin + end)


def _is_counts(value: Any) -> bool:
    # 2**48: no file is larger, and a product of eight stays a quick integer
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_layout(entries: dict[str, TensorEntry], data_begin: int, size: int) -> None:
    """The tensors' bytes must tile [data_begin, size): no gap, no overlap, nothing behind."""
    position = data_begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps another tensor" if entry.begin < position else "leaves a gap before it"
            raise FormatFault(f"its header's tensor {key[:200]!r} {problem}")
        position = entry.end
    if position != size:
        missing = "truncated" if position > size else "followed by foreign bytes"
        raise FormatFault(f"{missing}: the header describes {position} bytes, found {size}")
