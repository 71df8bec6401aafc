"""GGUF models: config from metadata, dequantised tensors under Hugging Face names.

Source: ggml's docs/gguf.md; names of tensors and metadata, and what its converter does to weights, as
in llama.cpp. Invariant: every `<architecture>.*` key is read, harmless, or refused by name.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from lorajax.checkpoints.checkpoint import Checkpoint
from lorajax.checkpoints.gguf_file import GGUFFile
from lorajax.checkpoints.gguf_tokenizer import end_of_text_ids, load_gguf_tokenizer
from lorajax.checkpoints.safetensors_file import slice_bounds
from lorajax.config import ModelConfig, MoEConfig, RopeConfig
from lorajax.errors import CheckpointError
from lorajax.layers.rotary import rope_frequencies

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""GGUF's name → ours."""

_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_TENSORS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises CheckpointError if it is none, is damaged, or cannot be served."""
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.name}: architecture {architecture!r:.60}; served in GGUF are {', '.join(_ARCHITECTURES)}"
        )
    config = _Metadata(file, architecture).config()
    return Checkpoint(
        config=config,
        tensors=GGUFTensors(file, config, permuted=architecture == "llama"),
        load_tokenizer=lambda: load_gguf_tokenizer(file.metadata, file.name),
    )


class _Part(NamedTuple):
    """Where one Hugging Face tensor stands: in which tensor, at which expert, permuted in how many heads."""

    name: str
    expert: int | None = None
    heads: int | None = None


class GGUFTensors:
    """A `TensorSource`: the file's tensors under their Hugging Face names, float32.

    permuted: the converter of Llama models stores the rows of q and k so that the two dimensions that
    rotary embedding pairs stand side by side; Hugging Face has them half a head apart. Reading
    restores that order.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, *, permuted: bool):
        self._file = file
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_kv_heads} if permuted else {}
        self._parts: dict[str, _Part] = {}
        for stored in file.tensors:
            for name, expert in _hugging_face_names(stored, file):
                self._parts[name] = _Part(stored, expert, heads.get(name.split(".")[-2]))

    def keys(self) -> Collection[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        shape = self._file.tensors[part.name].shape
        return shape if part.expert is None else shape[1:]

    def dtype(self, name: str) -> np.dtype:
        assert name in self._parts
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A fresh array with `tensor[index]`; only the rows that it touches are read."""
        part, shape = self._parts[name], self.shape(name)
        bounds = slice_bounds(index, shape)
        if len(shape) == 1:
            values = self._file.read_rows(part.name, 0, 1)[0]
            return self._in_order(values, part.heads)[slice(*bounds[0])]
        (start, stop), columns = bounds[0], slice(*bounds[1])
        # a permuted row comes from anywhere in its head: read whole heads
        step = 1 if part.heads is None else shape[0] // part.heads
        first, last = start // step * step, -(-stop // step) * step
        before = 0 if part.expert is None else part.expert * shape[0]
        values = self._file.read_rows(part.name, before + first, before + last)
        values = self._in_order(values, None if part.heads is None else (last - first) // step)
        return np.ascontiguousarray(values[start - first : stop - first, columns])

    @staticmethod
    def _in_order(values: np.ndarray, heads: int | None) -> np.ndarray:
        if not heads:
            return values
        # [heads, pair, (first, second), ...]  ->  [heads, (all firsts, all seconds), ...]
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _hugging_face_names(stored: str, file: GGUFFile) -> list[tuple[str, int | None]]:
    """Names of the tensors that one of the file's holds, with their expert."""
    *head, kind = stored.rsplit(".", 1)
    stem = head[0] if head else ""
    if stored == _ROPE_FACTORS:  # part of the config
        return []
    if kind in ("weight", "bias"):
        if stem in _MODEL_TENSORS:
            return [(f"{_MODEL_TENSORS[stem]}.{kind}", None)]
        block, _, rest = stem.partition(".")
        layer, _, module = rest.partition(".")
        if block == "blk" and layer.isdecimal():
            prefix = f"model.layers.{int(layer)}."
            if module in _LAYER_TENSORS:
                return [(f"{prefix}{_LAYER_TENSORS[module]}.{kind}", None)]
            if module in _EXPERT_TENSORS and len(file.tensors[stored].shape) == 3:
                return [
                    (f"{prefix}mlp.experts.{expert}.{_EXPERT_TENSORS[module]}.{kind}", expert)
                    for expert in range(file.tensors[stored].shape[0])
                ]
    raise CheckpointError(f"{file.name}: tensor {stored[:120]!r} is not understood")


_READ = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length",
    "expert_count", "expert_feed_forward_length", "expert_used_count", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length",
})  # fmt: skip
_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal"})


class _Metadata:
    """Reads the `<architecture>.*` keys of one file."""

    def __init__(self, file: GGUFFile, architecture: str):
        self._file, self._architecture = file, architecture
        prefix = f"{architecture}."
        self._values = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }

    def config(self) -> ModelConfig:
        self._refuse_unknown()
        tensors, file = self._file.tensors, self._file
        if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
            raise CheckpointError(f"{file.name}: no tensor 'token_embd.weight' that is a matrix")
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        kv_heads = self._integer("attention.head_count_kv", heads)
        head_dim = self._integer("attention.key_length", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"{file.name}: {heads} query heads, {kv_heads} kv heads of {head_dim} dimensions do not fit"
            )
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._integer(name, head_dim) != head_dim:
                self._refuse(name, f"the head's dimension {head_dim}")
        num_layers = self._integer("block_count")
        rope = self._rope(head_dim)
        length = self._integer("context_length")
        if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
            length = max(length, int(rope.original_max_position_embeddings * rope.factor))
        bos = file.metadata.get("tokenizer.ggml.bos_token_id")
        name = file.metadata.get("general.name")
        return ModelConfig(
            architecture=_ARCHITECTURES[self._architecture],  # pyright: ignore[reportArgumentType]
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=self._integer("feed_forward_length"),
            num_layers=num_layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=length,
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in tensors,
            rope=rope,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            attention_output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm=self._architecture in ("qwen3", "qwen3moe"),
            moe=self._moe(num_layers),
            bos_token_id=bos if type(bos) is int else None,
            eos_token_ids=end_of_text_ids(file.metadata),
            name=name if isinstance(name, str) and name else Path(file.name).stem,
        )

    def _refuse_unknown(self) -> None:
        unknown = [
            f"{name} = {value!r:.40}"
            for name, value in self._values.items()
            if name not in _READ | _HARMLESS and value not in (0, "", [], None)
        ]
        if unknown:
            raise CheckpointError(f"{self._file.name}: metadata that is not understood: {', '.join(unknown)}")

    def _moe(self, num_layers: int) -> MoEConfig | None:
        if self._architecture != "qwen3moe":
            if self._values.get("expert_count"):
                self._refuse("expert_count", "0")
            return None
        sparse = tuple(i for i in range(num_layers) if f"blk.{i}.ffn_gate_exps.weight" in self._file.tensors)
        return MoEConfig(
            num_experts=self._integer("expert_count"),
            num_experts_per_token=self._integer("expert_used_count"),
            intermediate_size=self._integer("expert_feed_forward_length"),
            norm_topk_prob=True,  # llama.cpp has no key for it: it always normalises
            sparse_layers=sparse,
        )

    def _rope(self, head_dim: int) -> RopeConfig:
        theta = self._number("rope.freq_base", 10_000.0)
        kind = self._values.get("rope.scaling.type", "none")
        if _ROPE_FACTORS in self._file.tensors:
            if kind != "none":
                self._refuse("rope.scaling.type", f"'none' beside {_ROPE_FACTORS}")
            return self._llama3_rope(theta, head_dim)
        if kind == "none":
            return RopeConfig(theta=theta)
        if kind not in ("linear", "yarn"):
            self._refuse("rope.scaling.type", "'none', 'linear', 'yarn'")
        factor = self._number("rope.scaling.factor")
        if kind == "linear":
            return RopeConfig(theta=theta, rope_type="linear", factor=factor)
        length = self._integer("rope.scaling.original_context_length")
        return RopeConfig(
            theta=theta, rope_type="yarn", factor=factor, original_max_position_embeddings=length
        )

    def _llama3_rope(self, theta: float, head_dim: int) -> RopeConfig:
        """The llama3 rule from the divisors of frequencies that the converter stores in place of it."""
        if self._file.tensors[_ROPE_FACTORS].shape != (head_dim // 2,):
            raise CheckpointError(f"{self._file.name}: {_ROPE_FACTORS} does not have {head_dim // 2} entries")
        factors = self._file.read_rows(_ROPE_FACTORS, 0, 1)[0]
        plain, _ = rope_frequencies(RopeConfig(theta=theta), head_dim)
        for length in (1 << power for power in range(5, 21)):
            rope = RopeConfig(
                theta=theta,
                rope_type="llama3",
                factor=float(factors.max()),
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=length,
            )
            if np.allclose(plain / rope_frequencies(rope, head_dim)[0], factors, rtol=1e-4, atol=0.0):
                return rope
        raise CheckpointError(f"{self._file.name}: {_ROPE_FACTORS} follows no rule that is served (llama3)")

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if type(value) is not int or value < 1:
            self._refuse(name, "a whole number of at least 1, the same for all layers")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        """A float32 of the file, as the shortest decimal that rounds to it: that is what was meant."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self._refuse(name, "a positive number")
        return float(str(np.float32(value)))

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        value = self._values.get(name)
        raise CheckpointError(
            f"{self._file.name}: {self._architecture}.{name} is "
            f"{'missing' if value is None else repr(value)[:60]}; allowed: {allowed}"
        )
