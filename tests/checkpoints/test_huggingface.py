"""Hugging Face folders and Hub ids: tensors of one file or of shards, one clear error for what is wrong."""

import contextlib
import gc
import json
import os
import pickle
import shutil
import weakref

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import change_json, copy_checkpoint, split_into_shards
from golden_files import GOLDEN, TINY_LLAMA
from safetensors.numpy import load_file, save_file

from lorajax.checkpoints import TensorSource, open_checkpoint
from lorajax.errors import CheckpointError, ConfigError

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(TINY_LLAMA, tmp_path / "tiny-llama")


@pytest.mark.parametrize("source", sorted((GOLDEN / "tiny").iterdir()), ids=lambda path: path.name)
def test_tensors_are_those_that_the_reference_library_reads(source):
    checkpoint = open_checkpoint(source)
    expected = load_file(source / MODEL)
    assert isinstance(checkpoint.tensors, TensorSource)
    assert set(checkpoint.tensors.keys()) == expected.keys()
    for name, array in expected.items():
        assert checkpoint.tensors.shape(name) == array.shape
        assert checkpoint.tensors.dtype(name) == array.dtype
        np.testing.assert_array_equal(checkpoint.tensors.read(name), array)


@pytest.mark.parametrize("count", [1, 3])
def test_shards_are_one_model(folder, count):
    split_into_shards(folder, count)
    whole, shards = open_checkpoint(TINY_LLAMA).tensors, open_checkpoint(folder).tensors
    assert set(shards.keys()) == set(whole.keys())
    for name in whole.keys():  # noqa: SIM118 - a TensorSource is no dict
        np.testing.assert_array_equal(shards.read(name), whole.read(name))


def test_bfloat16_is_read_bit_for_bit(folder):
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(folder / MODEL).items()}
    save_file(tensors, folder / MODEL)
    source = open_checkpoint(folder).tensors
    for name, array in tensors.items():
        assert source.dtype(name) == ml_dtypes.bfloat16
        assert source.read(name).tobytes() == array.tobytes()


def test_generation_config_and_name(folder):
    change_json(folder / "generation_config.json", eos_token_id=[1, 3], temperature=0.6)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config["temperature"] == 0.6
    assert checkpoint.config.eos_token_ids == (1, 3)
    assert checkpoint.config.name == "tiny-llama"
    (folder / "generation_config.json").unlink()
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.generation_config == {}
    assert checkpoint.config.eos_token_ids == (1,)


def num_open_files(folder):
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(target.startswith(str(folder)) for target in targets)


def test_files_are_closed_with_the_checkpoint(folder):
    split_into_shards(folder, 3)
    checkpoint = open_checkpoint(folder)
    assert num_open_files(folder) == 3
    gone = weakref.ref(checkpoint.tensors)
    del checkpoint
    gc.collect()
    assert gone() is None
    assert num_open_files(folder) == 0


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def pickle_only(folder):
    (folder / MODEL).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def lose_a_shard(folder):
    split_into_shards(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def misplace_a_tensor(folder):
    weight_map = split_into_shards(folder, 2)
    weight_map["model.norm.weight"] = next(
        name for name in weight_map.values() if name != weight_map["model.norm.weight"]
    )
    change_json(folder / INDEX, weight_map=weight_map)


def list_an_absent_tensor(folder):
    weight_map = split_into_shards(folder, 2)
    change_json(folder / INDEX, weight_map={**weight_map, "lm_head.weight": weight_map["model.norm.weight"]})


def repeat_a_tensor(folder):
    weight_map = split_into_shards(folder, 2)
    for name in set(weight_map.values()):
        tensors = load_file(folder / name)
        save_file({**tensors, "model.norm.weight": np.ones(64, np.float32)}, folder / name)


def lead_out_of_the_folder(folder):
    weight_map = split_into_shards(folder, 1)
    change_json(folder / INDEX, weight_map=dict.fromkeys(weight_map, "../other.safetensors"))


def without_index(folder):
    split_into_shards(folder, 2)
    (folder / INDEX).unlink()


BROKEN = {
    "no_config": (remove("config.json"), "no config.json"),
    "config_not_json": (write("config.json", b"{"), "config.json: not valid JSON"),
    "config_a_list": (write("config.json", b"[]"), "config.json: expected a JSON object"),
    "config_not_utf8": (write("config.json", b'{"a": "\xff"}'), "config.json: not UTF-8"),
    "config_key_twice": (write("config.json", b'{"a": 1, "a": 2}'), "config.json: .*twice"),
    "generation_not_json": (
        write("generation_config.json", b"nope"),
        "generation_config.json: not valid JSON",
    ),
    "no_tensors": (remove(MODEL), "no model.safetensors and no model.safetensors.index.json"),
    "pickle_only": (pickle_only, "pytorch_model.bin, a pickle, which is never loaded"),
    "truncated": (lambda folder: write(MODEL, (folder / MODEL).read_bytes()[:-9])(folder), "truncated"),
    "empty": (write(MODEL, b""), "model.safetensors: 0 bytes long"),
    "lfs_pointer": (write(MODEL, b"version https://git-lfs.github.com/spec/v1\noid 1\n"), "Git LFS pointer"),
    "missing_shard": (lose_a_shard, "lists 3 files, of which 1 .*model-00002-of-00003"),
    "misplaced_tensor": (misplace_a_tensor, "'model.norm.weight' is not in"),
    "absent_tensor": (list_an_absent_tensor, "'lm_head.weight' is not in"),
    "tensor_twice": (repeat_a_tensor, "'model.norm.weight' stands in .* and in"),
    "index_out_of_folder": (lead_out_of_the_folder, "other.safetensors.*allowed"),
    "no_index": (without_index, "but model-00001-of-00002.safetensors"),
    "no_weight_map": (
        lambda folder: (remove(MODEL)(folder), write(INDEX, b"{}")(folder)),
        "weight_map is missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named(folder, name):
    breaks, message = BROKEN[name]
    breaks(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder.parent) not in str(caught.value)


def test_an_unknown_architecture_is_refused_with_the_served_ones(folder):
    change_json(folder / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "source", ["./missing", "/missing/model", "missing", "a/b/c", "missing.gguf", "x/y.gguf", ""]
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(monkeypatch, tmp_path, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    if source:
        with pytest.raises(CheckpointError, match="no such folder"):
            open_checkpoint(source)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "missing" / "model")


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"x.bin: neither"):
        open_checkpoint(tmp_path / "x.bin")


def test_a_revision_is_only_for_the_hub(folder):
    with pytest.raises(ConfigError, match="revision is 'main'"):
        open_checkpoint(folder, revision="main")


def test_hub_ids_are_fetched_without_pickles(monkeypatch, tmp_path, folder):
    asked = {}

    def download(hub_id, **arguments):
        asked.update(arguments, hub_id=hub_id)
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("owner/name", revision="v1")
    assert checkpoint.config.name == "owner/name"
    assert (asked["hub_id"], asked["revision"]) == ("owner/name", "v1")
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["allow_patterns"])


def test_offline_without_a_cached_copy(monkeypatch, tmp_path):
    """The library's own offline path, not a stand-in for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        CheckpointError, match="'owner/name' is no local folder and cannot be fetched"
    ) as caught:
        open_checkpoint("owner/name")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_on_disk_wins_over_the_hub(monkeypatch, tmp_path):
    copy_checkpoint(TINY_LLAMA, tmp_path / "name")
    (tmp_path / "owner").mkdir()
    shutil.move(tmp_path / "name", tmp_path / "owner")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("owner/name").config.name == "name"


def test_a_file_that_changes_after_it_was_opened(folder):
    source = open_checkpoint(folder).tensors
    data = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="became shorter"):
        [source.read(name) for name in source.keys()]  # noqa: SIM118


def test_an_index_beside_a_single_file_is_ignored(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert "model.norm.weight" in open_checkpoint(folder).tensors.keys()  # noqa: SIM118
