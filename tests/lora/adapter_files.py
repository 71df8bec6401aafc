"""Writes adapters to disk for tests, whole and broken, with code that is not the code under test."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_bytes import safetensors_bytes

from lorajax.config import ModelConfig, MoEConfig, RopeConfig

PREFIX = "base_model.model."

TOY = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope=RopeConfig(),
)
TOY_MOE = ModelConfig(
    **{
        **{field: getattr(TOY, field) for field in TOY.__dataclass_fields__},
        "architecture": "qwen3_moe",
        "moe": MoEConfig(
            num_experts=3,
            num_experts_per_token=2,
            intermediate_size=12,
            norm_topk_prob=True,
            sparse_layers=(1,),
        ),
    }
)


def tiny_config(folder: Path, **changes: Any) -> ModelConfig:
    """What the adapters need of a tiny checkpoint's config."""
    raw = json.loads((folder / "config.json").read_text())
    fields = {field: getattr(TOY, field) for field in TOY.__dataclass_fields__}
    heads = raw["num_attention_heads"]
    return ModelConfig(
        **{
            **fields,
            "vocab_size": raw["vocab_size"],
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_kv_heads": raw["num_key_value_heads"],
            "head_dim": raw.get("head_dim", raw["hidden_size"] // heads),
            "tie_word_embeddings": raw["tie_word_embeddings"],
            **changes,
        }
    )


# (d_in, d_out) in the toy model, written out by hand
WIDTHS = {
    "q_proj": (16, 32),
    "k_proj": (16, 16),
    "v_proj": (16, 16),
    "o_proj": (32, 16),
    "gate_proj": (16, 24),
    "up_proj": (16, 24),
    "down_proj": (24, 16),
    "embed_tokens": (40, 16),
    "lm_head": (16, 40),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}


def hf_name(leaf: str, layer: int = 0) -> str:
    if leaf == "lm_head":
        return leaf
    if leaf == "embed_tokens":
        return f"model.{leaf}"
    return f"model.layers.{layer}.{'self_attn' if leaf[0] in 'qkvo' else 'mlp'}.{leaf}"


def lora_tensors(
    leaves: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    *,
    layers: tuple[int, ...] = (0, 1),
    dtype: Any = np.float32,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Tensors of a LoRA adapter of the toy model under the keys that PEFT saves."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for leaf in leaves:
        d_in, d_out = WIDTHS[leaf]
        for layer in layers if leaf in LINEARS else (0,):
            name = PREFIX + hf_name(leaf, layer)
            a, b = (
                f"{name}.lora_embedding_{x}" if leaf == "embed_tokens" else f"{name}.lora_{x}.weight"
                for x in "AB"
            )
            tensors[a] = rng.standard_normal((rank, d_in)).astype(dtype)
            tensors[b] = rng.standard_normal((d_out, rank)).astype(dtype)
    return tensors


def write_adapter(
    folder: Path,
    tensors: dict[str, np.ndarray] | bytes | None = None,
    config: dict[str, Any] | str | None = None,
    **fields: Any,
) -> Path:
    """A folder with both files. `fields` go over the default config; `config` replaces it.

    target_modules is what the tensors adapt, unless it is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = lora_tensors() if tensors is None else tensors
    raw = tensors if isinstance(tensors, bytes) else safetensors_bytes(tensors, {"format": "pt"})
    (folder / "adapter_model.safetensors").write_bytes(raw)
    if config is None:
        names = (
            []
            if isinstance(tensors, bytes)
            else [key.split(".lora_")[0].removeprefix(PREFIX) for key in tensors]
        )
        config = {**CONFIG, "target_modules": sorted(set(names)), **fields}
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    return folder
