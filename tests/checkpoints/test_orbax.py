"""Models as Orbax checkpoints: there and back without a changed bit, and read in slices."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from golden_files import GOLDEN, TINY_LLAMA
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from lorajax.checkpoints import TensorSource, open_checkpoint
from lorajax.checkpoints.orbax import TENSORS, save_huggingface, save_orbax
from lorajax.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("source", sorted((GOLDEN / "tiny").iterdir()), ids=lambda path: path.name)
def test_there_and_back_every_bit_is_kept(tmp_path, source):
    original = open_checkpoint(source)
    save_orbax(tmp_path / "orbax", original.tensors, like=source)
    stored = open_checkpoint(tmp_path / "orbax")
    assert isinstance(stored.tensors, TensorSource)
    assert stored.config == original.config.__class__(**{**vars(original.config), "name": "orbax"})
    assert stored.load_tokenizer().encode("Hello") == original.load_tokenizer().encode("Hello")
    save_huggingface(tmp_path / "back", stored.tensors, like=tmp_path / "orbax")
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert before.keys() == after.keys() == set(stored.tensors.keys())
    for name, array in before.items():
        assert (array.dtype, array.shape) == (after[name].dtype, after[name].shape)
        assert array.tobytes() == after[name].tobytes()


@pytest.fixture
def small(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((8, 6)).astype(ml_dtypes.bfloat16),
        "b.weight": rng.standard_normal(5).astype(np.float16),
        "c": rng.standard_normal((2, 3, 4), np.float32),
    }
    save_orbax(tmp_path / "small", arrays, like=TINY_LLAMA)
    return tmp_path / "small", arrays


def test_slices(small):
    folder, arrays = small
    source = open_checkpoint(folder).tensors
    for name, array in arrays.items():
        assert (source.shape(name), source.dtype(name)) == (array.shape, array.dtype)
        index = tuple(slice(1, size) for size in array.shape)
        for part in ((), index[:1], index, (slice(None), *index[1:])):
            np.testing.assert_array_equal(source.read_slice(name, part), array[part])


def test_shards_of_a_mesh_are_saved_and_read_onto_another(tmp_path):
    array = np.arange(64, dtype=np.float32).reshape(16, 4)
    rows = NamedSharding(jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4]), PartitionSpec("tp"))
    columns = NamedSharding(
        jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2]), PartitionSpec(None, "tp")
    )
    save_orbax(tmp_path / "m", {"x": jax.device_put(array, rows)}, like=TINY_LLAMA)
    source = open_checkpoint(tmp_path / "m").tensors
    asked = []

    def read(index):
        asked.append(index)
        return source.read_slice("x", index)

    found = jax.make_array_from_callback(array.shape, columns, read)
    np.testing.assert_array_equal(np.asarray(found), array)
    assert len(asked) == 2 and all(index[1] != slice(None) for index in asked)


def test_large_models_are_written_in_shards(tmp_path):
    tensors = open_checkpoint(TINY_LLAMA).tensors
    save_huggingface(tmp_path / "model", tensors, like=TINY_LLAMA, max_shard_bytes=100_000)
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    found = open_checkpoint(tmp_path / "model").tensors
    assert set(found.keys()) == set(tensors.keys())
    for name in tensors.keys():  # noqa: SIM118 - a TensorSource is no dict
        np.testing.assert_array_equal(found.read(name), tensors.read(name))


def test_a_model_is_never_written_over_another(small):
    folder, arrays = small
    for save in (
        lambda: save_orbax(folder, arrays, like=TINY_LLAMA),
        lambda: save_huggingface(folder, open_checkpoint(TINY_LLAMA).tensors, like=TINY_LLAMA),
    ):
        with pytest.raises(ConfigError, match="'small' exists"):
            save()


def damage_tree(folder):
    (folder / TENSORS / "_METADATA").write_text("{")


def no_ocdbt(folder):
    path = folder / TENSORS / "_METADATA"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_ocdbt": False}))


def nested(folder):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / TENSORS, {"model": {"x": np.ones(2, np.float32)}}, force=True)


def integers(folder):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / TENSORS, {"x": np.ones(2, np.int32)}, force=True)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (damage_tree, "_METADATA: not valid JSON"),
        (no_ocdbt, "written without OCDBT"),
        (nested, "'model' is no array of floats"),
        (integers, "'x' is no array of floats"),
    ],
)
def test_what_is_wrong_is_named(small, breaks, message):
    folder, _ = small
    breaks(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder.parent) not in str(caught.value)


def test_lost_data_is_found_when_it_is_read(small):
    folder, arrays = small
    source = open_checkpoint(folder).tensors
    for path in (folder / TENSORS).rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        [source.read(name) for name in arrays]
