"""Hugging Face `config.json` → `ModelConfig`.

Invariant: every field is read, known to be harmless, or refused by name; nothing that changes the
model's numbers is skipped, and no rope setting falls back to a default that the file contradicts.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from lorajax.config import ModelConfig, RopeConfig
from lorajax.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
}

_READ = {
    "architectures", "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pretraining_tp", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size", "_name_or_path",
}  # fmt: skip

# What training, transformers itself or generation uses; no number of a forward pass depends on it.
_HARMLESS = {
    "attention_dropout", "dtype", "id2label", "initializer_range", "is_llama_config", "label2id", "pad_token_id",
    "rope_interleaved_note", "torch_dtype", "transformers_version", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type", "auto_map",
    "_attn_implementation_autoset", "_attn_implementation", "transformers.js_config", "unsloth_version",
    "unsloth_fixed", "task_specific_params", "finetuning_task", "tokenizer_class", "prefix", "sep_token_id",
    "decoder_start_token_id", "is_decoder", "is_encoder_decoder", "layer_types",
}  # fmt: skip


def read_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """A decoder's config from the parsed `config.json` and `generation_config.json`.

    Raises ConfigError, naming field, value and what is allowed.
    """
    architecture = _architecture(config)
    _refuse_unknown(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_key_value_heads is {kv_heads}; allowed: a divisor of num_attention_heads = {heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"hidden_size is {hidden}; allowed: a multiple of num_attention_heads = {heads}")
    _only(config, "hidden_act", ("silu", "swish"), default="silu")
    _only(config, "pretraining_tp", (1,), default=1)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_integer(config, "head_dim", default=hidden // heads),
        max_position_embeddings=_integer(config, "max_position_embeddings", default=2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos_ids(config, generation or {}),
        name=str(config.get("_name_or_path") or ""),
    )


def _architecture(config: Mapping[str, Any]) -> Any:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"architectures is {names}; served are {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[names[0]]


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Unknown fields are refused unless they are empty: a new feature that is off changes nothing."""
    unknown = [
        f"{name} = {value!r:.60}"
        for name, value in config.items()
        if name not in _READ | _HARMLESS and value not in (None, False, [], {})
    ]
    if unknown:
        raise ConfigError(f"config.json has fields that are not understood: {', '.join(sorted(unknown))}")


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least 1")
    return value


def _only(config: Mapping[str, Any], name: str, allowed: tuple, *, default: Any) -> None:
    value = config.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-text id that either file declares."""
    ids: list[int] = []
    for source in (config, generation):
        declared = source.get("eos_token_id")
        ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
    return tuple(dict.fromkeys(ids))


# ---- rope: transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters` ----

_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    given = dict(config.get("rope_scaling") or {})
    for name, value in (config.get("rope_parameters") or {}).items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"rope_scaling.{name} is {given[name]!r} but rope_parameters.{name} is {value!r}"
            )
        given[name] = value
    kind = given.pop("rope_type", None)
    old_kind = given.pop("type", None)
    if kind is not None and old_kind is not None and kind != old_kind:
        raise ConfigError(
            f"rope_type is {kind!r} but type is {old_kind!r}; allowed: the same, or one of them"
        )
    kind = kind or old_kind or "default"
    if kind not in _ROPE_FIELDS:
        raise ConfigError(f"rope_type is {kind!r}; served are {', '.join(sorted(_ROPE_FIELDS))}")
    theta = _theta(config, given)
    unknown = sorted(set(given) - _ROPE_FIELDS[kind] - {"partial_rotary_factor"})
    if given.pop("partial_rotary_factor", 1.0) != 1.0 or unknown:
        raise ConfigError(
            f"rope settings {unknown or ['partial_rotary_factor']} are not served with {kind!r}"
        )
    if kind in ("llama3", "yarn", "linear", "dynamic") and "factor" not in given:
        raise ConfigError(f"rope_type {kind!r} needs a factor")
    if kind in ("llama3", "yarn", "dynamic"):
        trained = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        given.setdefault("original_max_position_embeddings", trained)
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name != "truncate" and (isinstance(value, bool) or not _is_positive(value)):
            raise ConfigError(f"rope {name} is {value!r}; allowed: a positive number")
    return RopeConfig(theta=theta, rope_type=kind, **fields)


def _theta(config: Mapping[str, Any], given: dict[str, Any]) -> float:
    inner, outer = given.pop("rope_theta", None), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(f"rope_theta is {outer!r} but rope_parameters.rope_theta is {inner!r}")
    theta = inner if inner is not None else outer
    if theta is None:
        warnings.warn("config.json names no rope_theta; 10000 is assumed", stacklevel=4)
        theta = 10_000.0
    if not _is_positive(theta):
        raise ConfigError(f"rope_theta is {theta!r}; allowed: a positive number")
    return float(theta)


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )
