"""Writes checkpoints to disk for tests, whole and broken, with code that is not the code under test."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file


def copy_checkpoint(source: Path, folder: Path) -> Path:
    """A checkpoint's own files, without its adapters, to be changed."""
    folder.mkdir()
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(("expected_", "prompts")):
            shutil.copy(path, folder)
    return folder


def change_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON object on disk; None removes one."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value.update(changes)
    path.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


def split_into_shards(folder: Path, count: int) -> dict[str, str]:
    """Replace model.safetensors by shards and their index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[shard::count])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def write_gguf(source: Path, path: Path, kind: Any = None, **metadata: Any) -> Path:
    """Convert a Hugging Face folder as llama.cpp's converter does, by the name tables of `gguf`.

    kind: a quantisation for the matrices, none by default. metadata: keys of the architecture to set
    or, with None, to leave out.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    prefix = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, prefix)
    for key, value in {**_metadata(config), **metadata}.items():
        _add(writer, f"{prefix}.{key}", value)
    _write_tokenizer(writer, source, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    if config["rope_parameters"]["rope_type"] == "llama3" and "rope.scaling.type" not in metadata:
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    for name, tensor in _merged_experts(load_file(source / "model.safetensors")).items():
        if arch is gguf.MODEL_ARCH.LLAMA and "q_proj" in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if arch is gguf.MODEL_ARCH.LLAMA and "k_proj" in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if kind is not None and tensor.ndim > 1:
            writer.add_tensor(stored, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores them: of each head the halves' i-th rows become neighbours."""
    rows = [
        head * (len(tensor) // heads) + half * (len(tensor) // heads // 2) + i
        for head in range(heads)
        for i in range(len(tensor) // heads // 2)
        for half in (0, 1)
    ]
    return tensor[rows]


def llama3_factors(config: dict) -> np.ndarray:
    """Divisor of each frequency under the llama3 rule."""
    rope = config["rope_parameters"]
    factors = []
    for i in range(0, config["head_dim"], 2):
        frequency = rope["rope_theta"] ** -(i / config["head_dim"])
        turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
        kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        kept = min(1.0, max(0.0, kept))
        factors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return np.array(factors, np.float32)


def _metadata(config: dict) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    vocab = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()} | added
    tokens = [vocab.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])]
    control, normal, unused = 3, 1, 5
    kinds = [control if i in added else normal if i in vocab else unused for i in range(config["vocab_size"])]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    settings = json.loads((source / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])


def _merged_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All experts of one projection in one tensor, as GGUF has them."""
    merged, experts = {}, {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        if found:
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            merged[name] = tensor
    return merged | {name: np.stack([by[i] for i in range(len(by))]) for name, by in experts.items()}
