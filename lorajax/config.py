"""What a decoder is: `ModelConfig`, read from a Hugging Face `config.json` (or from GGUF metadata)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Names follow transformers' `rope_parameters`."""

    theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts in the MLP of the layers listed in `sparse_layers`."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and behaviour of one decoder-only model. All sizes are in elements.

    `sliding_window[i]` is the attention window of layer i in tokens (0: full attention).
    """

    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    @property
    def num_query_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_kv_heads

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """From a parsed `config.json`; see `lorajax.hf_config`. Raises ConfigError."""
        from lorajax.hf_config import read_hf_config  # it builds this class

        return read_hf_config(config, generation_config)
