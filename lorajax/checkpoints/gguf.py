"""GGUF files: dequantised tensors under Hugging Face names, config, tokenizer and chat template.

Source: the GGUF specification (ggml docs/gguf.md); names of tensors and metadata as llama.cpp writes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from lorajax.checkpoints.checkpoint import Checkpoint
from lorajax.config import ModelConfig, RopeConfig
from lorajax.errors import CheckpointError
from lorajax.tokenizer import Tokenizer

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4

# Pre-tokenizer name -> pieces, outermost first, before byte-level BPE.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of a Llama model. Raises CheckpointError if it is none, or damaged."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path.name}: not a readable GGUF file ({error})") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path.name}: GGUF architecture {architecture!r}; served is 'llama'")
    tensors = GGUFTensors(reader, path.name, metadata)
    return Checkpoint(
        config=_config(metadata, tensors, path),
        tensors=tensors,
        load_tokenizer=lambda: _tokenizer(metadata, path.name),
    )


class GGUFTensors:
    """The file's tensors under their Hugging Face names, dequantised to float32 when read.

    llama.cpp stores the rows of q and k so that the two dimensions that rotary embedding pairs stand
    side by side; Hugging Face has them half a head apart. `read` restores that order.
    """

    def __init__(self, reader: gguf.GGUFReader, file_name: str, metadata: dict[str, Any]):
        self._heads = {
            "q_proj": metadata["llama.attention.head_count"],
            "k_proj": metadata.get("llama.attention.head_count_kv", metadata["llama.attention.head_count"]),
        }
        self._tensors = {}
        for tensor in reader.tensors:
            name = _hugging_face_name(tensor.name)
            if name is None:
                raise CheckpointError(f"{file_name}: unknown tensor {tensor.name!r}")
            self._tensors[name] = tensor

    def keys(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name))
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return values
        # [heads, pair, (first, second), d_in]  ->  [heads, (all firsts, all seconds), d_in]
        return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _hugging_face_name(name: str) -> str | None:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if head != "blk" or part not in _LAYER_TENSORS:
        return None
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}"


def _config(metadata: dict[str, Any], tensors: GGUFTensors, path: Path) -> ModelConfig:
    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise CheckpointError(f"{path.name}: GGUF metadata has no llama.{key}")
        return value

    heads, d_model = get("attention.head_count"), get("embedding_length")
    return ModelConfig(
        architecture="llama",
        vocab_size=tensors.shape("model.embed_tokens.weight")[0],
        hidden_size=d_model,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_attention_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", d_model // heads),
        max_position_embeddings=get("context_length"),
        # stored as float32; the shortest decimal that rounds to it is what was meant
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        tie_word_embeddings="lm_head.weight" not in tensors.keys(),  # noqa: SIM118
        rope=RopeConfig(theta=get("rope.freq_base", 10_000.0)),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(t for t in [metadata.get("tokenizer.ggml.eos_token_id")] if t is not None),
        name=metadata.get("general.name", path.stem),
    )


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _digits_then_gpt2,
    "gpt-2": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def _tokenizer(metadata: dict[str, Any], file_name: str) -> Tokenizer:
    """Byte-level BPE from vocabulary and merges. Raises CheckpointError for other kinds."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file_name}: tokenizer {model!r} with pre-tokenizer {pre!r}; served is 'gpt2' with "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    fast.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    fast.add_special_tokens(
        [
            AddedToken(t, special=True)
            for t, kind in zip(tokens, kinds, strict=False)
            if kind == _CONTROL_TOKEN
        ]
    )
    fast.add_tokens([t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED_TOKEN])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return Tokenizer(
        fast,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        eos_token_ids=() if eos is None else (eos,),
    )
