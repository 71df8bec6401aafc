"""Checked reading of a GGUF file that comes from a stranger.

Format: ggml's docs/gguf.md (magic, version, counts, key-value metadata, tensor table, aligned data).
Invariant: every count and length is checked against the size of the file before anything is
allocated or looped over for it. Block formats are decoded by the `gguf` package.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from lorajax.checkpoints.regular_file import FormatFault, RegularFile
from lorajax.errors import CheckpointError

_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
_CHUNK = 1 << 20

_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


class GGUFTensor(NamedTuple):
    """One row of the tensor table. shape: outermost axis first; [begin, end): its bytes in the file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last axis; block formats never cross it."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block_size * block_bytes


class GGUFFile:
    """An open file whose header was found sound.

    metadata: key → number, bool, text or list of them. tensors: name → `GGUFTensor`.
    Raises CheckpointError for whatever is wrong with the file.
    """

    def __init__(self, path: Path):
        self.name = path.name
        try:
            self._file = RegularFile(path)
            self.metadata, self.tensors = _read_header(_Cursor(self._file), self._file.size)
        except FormatFault as fault:
            raise CheckpointError(f"{self.name}: {fault}") from None

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Float32 [stop - start, shape[-1]]: rows of the tensor seen as a matrix of its innermost axis.

        Raises CheckpointError for a block format that `gguf` cannot decode.
        """
        tensor = self.tensors[name]
        data = np.empty((stop - start, tensor.row_bytes), np.uint8)
        try:
            self._file.read_into(tensor.begin + start * tensor.row_bytes, data)
            values = gguf.quants.dequantize(data, tensor.type)
        except FormatFault as fault:
            raise CheckpointError(f"{self.name}: {fault}") from None
        except NotImplementedError:
            raise CheckpointError(
                f"{self.name}: tensor {name!r} is stored as {tensor.type.name}, which cannot be decoded"
            ) from None
        return values.astype(np.float32, copy=False).reshape(stop - start, tensor.shape[-1])


class _Cursor:
    """Reads the header front to back, a chunk at a time."""

    def __init__(self, file: RegularFile):
        self._file, self._chunk, self._chunk_begin, self.position = file, b"", 0, 0

    def take(self, count: int) -> bytes:
        limit = min(self._file.size, _MAX_HEADER_BYTES)
        if count > limit - self.position:
            raise FormatFault(f"truncated, or not GGUF: its header wants {count} bytes at {self.position}")
        begin = self.position - self._chunk_begin
        if begin + count > len(self._chunk):
            self._chunk, self._chunk_begin = self._file.read(self.position, max(count, _CHUNK)), self.position
            begin = 0
        self.position += count
        return self._chunk[begin : begin + count]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        data = self.take(self.uint64())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatFault(f"its header has text that is not UTF-8 before byte {self.position}") from None


def _read_header(cursor: _Cursor, size: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if size < 24 or cursor.take(4) != b"GGUF":
        raise FormatFault("not a GGUF file" + _what_it_is(cursor, size))
    version = cursor.uint32()
    if version not in _VERSIONS:
        raise FormatFault(f"GGUF version {version}; readable are {_VERSIONS} in little-endian order")
    num_tensors, num_keys = cursor.uint64(), cursor.uint64()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise FormatFault(f"its metadata has {key[:120]!r} twice")
        metadata[key] = _value(cursor, key)
    rows: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]] = []
    rows += [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise FormatFault(f"general.alignment is {alignment!r:.40}; allowed: a power of two")
    data_begin = -(-cursor.position // alignment) * alignment
    return metadata, _place(rows, data_begin, size)


def _what_it_is(cursor: _Cursor, size: int) -> str:
    start = cursor.take(min(size, 64) - cursor.position)
    return ", but a Git LFS pointer; fetch it with `git lfs pull`" if b"git-lfs" in start else ""


def _value(cursor: _Cursor, key: str) -> Any:
    kind = _value_type(cursor, key)
    if kind is not GGUFValueType.ARRAY:
        return _scalar(cursor, kind)
    kind, count = _value_type(cursor, key), cursor.uint64()
    if kind is GGUFValueType.ARRAY:
        raise FormatFault(f"metadata {key[:120]!r} is an array of arrays, which is not read")
    if kind is GGUFValueType.STRING:
        return [cursor.text() for _ in range(count)]
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.uint32()
    try:
        return GGUFValueType(number)
    except ValueError:
        raise FormatFault(f"metadata {key[:120]!r} has the unknown type {number}") from None


def _scalar(cursor: _Cursor, kind: GGUFValueType) -> Any:
    if kind is GGUFValueType.STRING:
        return cursor.text()
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(cursor.take(dtype.itemsize), dtype)[0].item()


def _tensor_row(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name, num_axes = cursor.text(), cursor.uint32()
    where = f"tensor {name[:120]!r}"
    if not 1 <= num_axes <= 4:
        raise FormatFault(f"{where} has {num_axes} axes; allowed: 1 to 4")
    shape = struct.unpack(f"<{num_axes}Q", cursor.take(8 * num_axes))[::-1]
    number, offset = cursor.uint32(), cursor.uint64()
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise FormatFault(f"{where} has the unknown type {number}") from None
    if any(not 1 <= axis < 1 << 48 for axis in shape) or shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        raise FormatFault(f"{where} has shape {shape}, which {kind.name} cannot store")
    return name, kind, shape, offset


def _place(
    rows: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], data_begin: int, size: int
) -> dict[str, GGUFTensor]:
    """Tensors with their bytes, which must lie in the file and not overlap; padding may stand between."""
    tensors: dict[str, GGUFTensor] = {}
    position = data_begin
    for name, kind, shape, offset in sorted(rows, key=lambda row: row[3]):
        begin = data_begin + offset
        tensor = GGUFTensor(kind, shape, begin, begin)
        tensor = tensor._replace(end=begin + math.prod(shape[:-1]) * tensor.row_bytes)
        if name in tensors:
            raise FormatFault(f"tensor {name[:120]!r} stands there twice")
        if begin < position:
            raise FormatFault(f"tensor {name[:120]!r} overlaps another")
        if tensor.end > size:
            raise FormatFault(
                f"truncated: tensor {name[:120]!r} ends at byte {tensor.end}, the file at {size}"
            )
        tensors[name] = tensor
        position = tensor.end
    return tensors
