"""Bounded reading of files that may come from a stranger.

Invariant: nothing is allocated for a size that the file itself does not have, and pipes and devices,
which could block or never end, are refused. Data is read with `preadv`, never mapped: a file that
shrinks while it is mapped kills the process.
"""

import json
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np

_MAX_READ = 1 << 30  # one system call transfers less than 2 GiB


class FormatFault(ValueError):
    """What is wrong with a file, to follow "<name>: " in the typed error of whoever opened it."""


class RegularFile:
    """A regular file, open for reading until it is closed or dropped. Safe to read from several threads."""

    def __init__(self, path: Path):
        """Raises FormatFault if there is no such file, or it is no regular one."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise FormatFault(f"cannot be opened: {getattr(error, 'strerror', error)}") from None
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatFault("not a regular file")

    def close(self) -> None:
        self._finalizer()

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes; fewer only at the end of the file."""
        buffer = np.empty(max(0, min(count, self.size - offset)), np.uint8)
        return buffer[: self._fill(offset, buffer)].tobytes()

    def read_into(self, offset: int, array: np.ndarray) -> None:
        """Fill a C-contiguous array with the bytes from `offset` on. Raises FormatFault at the file's end."""
        buffer = array.reshape(-1).view(np.uint8)
        if self._fill(offset, buffer) != buffer.size:
            raise FormatFault("the file became shorter while it was read")

    def _fill(self, offset: int, buffer: np.ndarray) -> int:
        done = 0
        while done < buffer.size:
            count = os.preadv(self._fd, [buffer[done : done + _MAX_READ].data], offset + done)
            if count == 0:
                break
            done += count
        return done


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """All of a regular file. Raises FormatFault if it cannot be read, or is longer than `max_bytes`."""
    file = RegularFile(path)
    try:
        if file.size > max_bytes:
            raise FormatFault(f"longer than the {max_bytes} bytes that are read")
        return file.read(0, file.size)
    finally:
        file.close()


def parse_json_object(data: bytes) -> dict[str, Any]:
    """A JSON object: UTF-8, no key twice, bounded depth. Raises FormatFault for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError:
        raise FormatFault("not UTF-8 text") from None
    except RecursionError:
        raise FormatFault("JSON nested too deeply") from None
    except FormatFault:  # a ValueError too, with its own message
        raise
    except ValueError as error:
        raise FormatFault(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatFault(f"expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise FormatFault(f"the key {twice[:120]!r} stands there twice")
    return value
