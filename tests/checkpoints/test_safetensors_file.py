"""Safetensors files of strangers: tensors bit for bit, or one typed error."""

import json
import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors_bytes import header_bytes, safetensors_bytes

from lorajax.checkpoints.safetensors_file import SafetensorsFile
from lorajax.errors import AdapterFormatError, CheckpointError


def read_all(path):
    with SafetensorsFile(path) as file:
        return {key: file.read(key) for key in file.entries}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_the_reference_library_writes(tmp_path, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(dtype),
        "b": np.zeros((0, 4), dtype),
        "c": dtype(2.5)[None],
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_all(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for key, array in tensors.items():
        assert found[key].dtype == array.dtype
        assert found[key].shape == array.shape
        assert found[key].tobytes() == array.tobytes()


def test_odd_offsets_of_mixed_dtypes(tmp_path):
    tensors = {
        "h": np.arange(3, dtype=np.float16),
        "d": np.arange(2, dtype=np.float64),
        "f": np.ones(1, np.float32),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    found = read_all(path)
    assert {key: found[key].tolist() for key in tensors} == {
        key: array.tolist() for key, array in tensors.items()
    }


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD = safetensors_bytes({"a": np.ones(2, np.float32)})

BROKEN = {
    "empty": (b"", "too short"),
    "seven_bytes": (b"1234567", "too short"),
    "eight_zero_bytes": (bytes(8), "not a whole safetensors file"),
    "huge_header_length": (struct.pack("<Q", 1 << 40) + b"{}", "not a whole safetensors file"),
    "largest_header_length": (b"\xff" * 8 + b"{}", "not a whole safetensors file"),
    "cut_in_header": (GOOD[:20], "not a whole safetensors file"),
    "cut_in_data": (GOOD[:-4], "truncated"),
    "data_behind": (GOOD + b"x", "foreign bytes"),
    "lfs_pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "Git LFS pointer",
    ),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "zip_pickle": (b"PK\x03\x04" + bytes(60), "pickle"),
    "not_utf8": (header_bytes(b'{"\xff": 1}'), "UTF-8"),
    "not_json": (header_bytes(b"{nonsense}"), "not valid JSON"),
    "not_an_object": (header_bytes(b"[1, 2]"), "not a whole safetensors file"),
    "deep_json": (header_bytes(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "key_twice": (header_bytes(b'{"a":' + json.dumps(ONE).encode() + b',"a":1}') + bytes(8), "twice"),
    "overlap": (
        header_bytes({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}) + bytes(12),
        "overlaps",
    ),
    "same_bytes_for_two": (header_bytes({"a": ONE, "b": ONE}) + bytes(8), "overlaps"),
    "gap": (header_bytes({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}) + bytes(20), "gap"),
    "shape_larger_than_bytes": (header_bytes({"a": {**ONE, "shape": [3]}}) + bytes(8), "does not fill"),
    "shape_overflows": (header_bytes({"a": {**ONE, "shape": [1 << 47] * 8}}) + bytes(8), "does not fill"),
    "negative": (
        header_bytes({"a": {**ONE, "shape": [-2], "data_offsets": [8, 0]}}) + bytes(8),
        "whole numbers",
    ),
    "bool_shape": (header_bytes({"a": {**ONE, "shape": [True, 2]}}) + bytes(8), "whole numbers"),
    "float_offsets": (header_bytes({"a": {**ONE, "data_offsets": [0.0, 8.0]}}) + bytes(8), "whole numbers"),
    "three_offsets": (header_bytes({"a": {**ONE, "data_offsets": [0, 4, 8]}}) + bytes(8), "whole numbers"),
    "missing_field": (header_bytes({"a": {"dtype": "F32", "shape": [2]}}) + bytes(8), "expected dtype"),
    "float8": (header_bytes({"a": {**ONE, "dtype": "F8_E4M3", "shape": [8]}}) + bytes(8), "F8_E4M3"),
    "integers": (header_bytes({"a": {**ONE, "dtype": "I64", "shape": [1]}}) + bytes(8), "I64"),
    "metadata_no_text": (header_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(tmp_path, case):
    raw, message = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_all(path)
    assert str(tmp_path) not in str(caught.value)
    assert "x.safetensors" in str(caught.value)


def test_no_allocation_follows_the_length_field(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 30) + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_all(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_the_typed_error_or_tensors(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("random") / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        read_all(path)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_one_changed_byte_gives_the_typed_error_or_tensors_of_the_same_size(
    tmp_path_factory, position, value
):
    path = tmp_path_factory.mktemp("changed") / "x.safetensors"
    path.write_bytes(GOOD[:position] + bytes([value]) + GOOD[position + 1 :])
    try:
        found = read_all(path)
    except CheckpointError:
        return
    assert sum(array.nbytes for array in found.values()) == 8


def test_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("pipe", "not a regular file"),
        ("folder", "not a regular file"),
        ("none", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            read_all(tmp_path / name)
        assert str(tmp_path) not in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    with SafetensorsFile(path) as file:
        os.truncate(path, len(GOOD) - 1)
        with pytest.raises(CheckpointError, match="shorter"):
            file.read("a")


def test_the_error_is_of_the_type_and_the_name_that_the_opener_wants(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    with SafetensorsFile(path, name="adapter.safetensors", error=AdapterFormatError) as file:
        os.truncate(path, len(GOOD) - 1)
        with pytest.raises(AdapterFormatError, match=r"^adapter\.safetensors: .*shorter"):
            file.read("a")
    with pytest.raises(AdapterFormatError, match=r"^adapter\.safetensors: truncated"):
        SafetensorsFile(path, name="adapter.safetensors", error=AdapterFormatError)


def test_headers_above_the_limit_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    size = int.from_bytes(GOOD[:8], "little")
    SafetensorsFile(path, max_header_bytes=size).close()
    with pytest.raises(CheckpointError, match=f"2 to {size - 1} bytes"):
        SafetensorsFile(path, max_header_bytes=size - 1)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    bounds=st.lists(st.tuples(st.integers(-6, 6) | st.none(), st.integers(-6, 6) | st.none()), max_size=3),
)
def test_a_slice_is_that_of_the_whole(tmp_path_factory, shape, bounds):
    path = tmp_path_factory.mktemp("slices") / "x.safetensors"
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path.write_bytes(safetensors_bytes({"before": np.ones(3, np.float16), "a": array}))
    index = tuple(slice(*bound) for bound in bounds[: len(shape)])
    with SafetensorsFile(path) as file:
        found = file.read_slice("a", index)
    np.testing.assert_array_equal(found, array[index])


def test_a_slice_reads_little_more_than_it_names(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.ones((1024, 4096), np.float32)}))
    with SafetensorsFile(path) as file:
        for index in ((slice(10, 20),), (slice(500, 510), slice(0, 8))):
            tracemalloc.start()
            file.read_slice("a", index)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 20
