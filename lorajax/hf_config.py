"""Hugging Face `config.json` → `ModelConfig`.

Invariant: every field is read, known to be harmless, or refused by name; nothing that changes the
model's numbers is skipped. Where a file is silent, the default is that of the family in transformers 5.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from lorajax.config import ModelConfig, MoEConfig
from lorajax.errors import ConfigError
from lorajax.hf_rope import read_rope, served_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    """How one family differs from Llama in what it reads, and in what it assumes where a file is silent.

    fields: read beside `_SHARED`.
    windows: which layers slide, where the file does not list them: all, or those from
        `max_window_layers` on. `window_flag`: only if `use_sliding_window` is set.
    """

    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    fields: frozenset[str] = frozenset()
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "upper"] = "none"
    window_flag: bool = False
    default_window: int | None = None


_WINDOW_FIELDS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})

FAMILIES = {
    "LlamaForCausalLM": _Family(
        architecture="llama",
        fields=frozenset({"attention_bias", "mlp_bias"}),
        max_position_embeddings=2048,
    ),
    "MistralForCausalLM": _Family(
        architecture="mistral",
        fields=frozenset({"sliding_window"}),
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        windows="all",
        default_window=4096,
    ),
    "Qwen2ForCausalLM": _Family(
        architecture="qwen2",
        fields=_WINDOW_FIELDS,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        qkv_bias=True,
        windows="upper",
        window_flag=True,
        default_window=4096,
    ),
    "Qwen3ForCausalLM": _Family(
        architecture="qwen3",
        fields=_WINDOW_FIELDS | {"attention_bias"},
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        head_dim=128,
        qk_norm=True,
        windows="upper",
        window_flag=True,
        default_window=4096,
    ),
    "Qwen3MoeForCausalLM": _Family(
        architecture="qwen3_moe",
        # max_window_layers stands in files of this family, but transformers slides every layer
        fields=_WINDOW_FIELDS
        | {
            "attention_bias", "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size",
            "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts",
        },
        max_position_embeddings=32_768,
        num_key_value_heads=4,
        qk_norm=True,
        windows="all",
        window_flag=True,
        default_window=4096,
    ),
}  # fmt: skip
"""Served architectures by the name that stands in `architectures`."""

_SHARED = frozenset({
    "architectures", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "layer_types", "max_position_embeddings", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
})  # fmt: skip

_HARMLESS = frozenset({
    # training
    "attention_dropout", "finetuning_task", "gradient_checkpointing", "initializer_range",
    "output_router_logits", "pretraining_tp", "problem_type", "router_aux_loss_coef", "router_jitter_noise",
    "use_cache",
    # how a library holds or runs the model
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map",
    "chunk_size_feed_forward", "dtype", "experts_implementation", "is_decoder", "output_attentions",
    "output_hidden_states", "return_dict", "tf_legacy_loss", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # labels of another head
    "id2label", "is_llama_config", "label2id",
    # the tokenizer's, or defaults of generate(), which here come from SamplingParams
    "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "length_penalty", "mask_token_id", "max_length", "max_new_tokens",
    "max_sequence_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "pad_token_id", "prefix", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "sep_token_id", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "typical_p", "unk_token_id",
})  # fmt: skip
"""No number of a forward pass depends on these."""


def read_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """A decoder's config from the parsed `config.json` and `generation_config.json`.

    Raises ConfigError, naming field, value and what is allowed.
    """
    family = _family(config)
    _refuse_unknown(config, family)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _kv_heads(config, family, heads)
    num_layers = _integer(config, "num_hidden_layers", most=1 << 16)
    rope = read_rope(config)
    max_positions = _integer(config, "max_position_embeddings", default=family.max_position_embeddings)
    attention_bias = _flag(config, "attention_bias")
    _only(config, "hidden_act", ("silu", "swish"), default="silu")
    bos = _token_ids("bos_token_id", config.get("bos_token_id"))
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        max_position_embeddings=served_length(config, rope, max_positions),
        rms_norm_eps=_positive(config, "rms_norm_eps", default=1e-6),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_windows(config, family, num_layers),
        moe=_moe(config, num_layers) if family.architecture == "qwen3_moe" else None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_ids(config, generation or {}),
    )


def _family(config: Mapping[str, Any]) -> _Family:
    served = ", ".join(sorted(FAMILIES))
    names, model_type = config.get("architectures"), config.get("model_type")
    if not names:  # transformers goes by model_type alone
        families = [family for family in FAMILIES.values() if family.architecture == model_type]
        if not families:
            raise ConfigError(
                f"architectures is {names!r} and model_type {model_type!r:.60}; served are {served}"
            )
        return families[0]
    if (
        not isinstance(names, list)
        or len(names) != 1
        or not isinstance(names[0], str)
        or names[0] not in FAMILIES
    ):
        raise ConfigError(f"architectures is {names!r:.120}; served are {served}")
    family = FAMILIES[names[0]]
    if model_type is not None and model_type != family.architecture:
        raise ConfigError(
            f"model_type is {model_type!r:.60} but architectures is {names}; allowed: {family.architecture!r}"
        )
    return family


def _refuse_unknown(config: Mapping[str, Any], family: _Family) -> None:
    """Unknown fields are refused unless they are empty: a new feature that is off changes nothing."""
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else None
        raise ConfigError(
            f"quantization_config: weights quantised by {method!r:.60}; served are unquantised ones"
        )
    known = _SHARED | _HARMLESS | family.fields
    unknown = [
        f"{name} = {value!r:.60}"
        for name, value in config.items()
        if name not in known and value not in (None, False, [], {})
    ]
    if unknown:
        raise ConfigError(f"config.json has fields that are not understood: {', '.join(sorted(unknown))}")


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    absent = heads if family.num_key_value_heads is None else family.num_key_value_heads
    kv_heads = _integer(
        config, "num_key_value_heads", default=heads if "num_key_value_heads" in config else absent
    )
    if heads % kv_heads:
        raise ConfigError(
            f"num_key_value_heads is {kv_heads}; allowed: a divisor of num_attention_heads = {heads}"
        )
    return kv_heads


def _head_dim(config: Mapping[str, Any], family: _Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(f"hidden_size is {hidden}; allowed: a multiple of num_attention_heads = {heads}")
    head_dim = _integer(config, "head_dim", default=family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; allowed: an even number, since rope turns pairs")
    return head_dim


def _sliding_windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int, ...]:
    """Window of every layer, 0 for full attention; () if no layer slides."""
    window = None
    if family.windows != "none" and (not family.window_flag or _flag(config, "use_sliding_window")):
        absent = None if "sliding_window" in config else family.default_window
        if config.get("sliding_window", absent) is not None:
            window = _integer(config, "sliding_window", default=absent)
    first = 0
    if family.windows == "upper" and window is not None:
        first = _integer(config, "max_window_layers", default=28, least=0)
    #            layer   0 ... first ... num_layers
    # windows "upper"    full |  window  |
    sliding = [window is not None and i >= first for i in range(num_layers)]
    if config.get("layer_types") is not None:
        listed = _layer_types(config["layer_types"], num_layers)
        if family.windows == "upper":
            if any(listed) and window is None:
                raise ConfigError(
                    "layer_types has 'sliding_attention' but use_sliding_window or sliding_window is off"
                )
            sliding = listed
        elif listed != sliding:
            raise ConfigError(
                "layer_types contradicts sliding_window, which holds for all layers of this family"
            )
    return tuple(window if slides else 0 for slides in sliding) if window and any(sliding) else ()


def _layer_types(value: Any, num_layers: int) -> list[bool]:
    """Whether each layer slides."""
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(value, list) or len(value) != num_layers or any(kind not in kinds for kind in value):
        raise ConfigError(
            f"layer_types is {value!r:.120}; allowed: {' or '.join(kinds)} for each of {num_layers} layers"
        )
    return [kind == "sliding_attention" for kind in value]


def _moe(config: Mapping[str, Any], num_layers: int) -> MoEConfig | None:
    """Experts of the layers that have them; None if none has (then it is a dense model)."""
    counts = {
        name: config[name] for name in ("num_experts", "num_local_experts") if config.get(name) is not None
    }
    if len(set(map(str, counts.values()))) > 1:
        raise ConfigError(f"num_experts and num_local_experts differ: {counts}; allowed: one value")
    experts = _integer(counts, next(iter(counts)), least=0) if counts else 128
    step = _integer(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        raise ConfigError(f"mlp_only_layers is {dense!r:.120}; allowed: a list of layers below {num_layers}")
    sparse = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not experts or not sparse:
        return None
    per_token = _integer(config, "num_experts_per_tok", default=8)
    if per_token > experts:
        raise ConfigError(f"num_experts_per_tok is {per_token}; allowed: at most num_experts = {experts}")
    return MoEConfig(
        num_experts=experts,
        num_experts_per_token=per_token,
        intermediate_size=_integer(config, "moe_intermediate_size", default=768),
        norm_topk_prob=_flag(config, "norm_topk_prob"),
        sparse_layers=sparse,
    )


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-text id that either file declares."""
    declared = [_token_ids("eos_token_id", source.get("eos_token_id")) for source in (config, generation)]
    return tuple(dict.fromkeys(token_id for ids in declared for token_id in ids))


def _token_ids(name: str, value: Any) -> list[int]:
    """Ids of a field that holds none, one or several; a negative one is an old spelling of none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ConfigError(f"{name} is {value!r:.60}; allowed: a token id, a list of them, or null")
    return [token_id for token_id in ids if token_id >= 0]


def _integer(
    config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = 1 << 31
) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= most:
        found = "missing" if value is None else f"{value!r:.60}"
        raise ConfigError(f"{name} is {found}; allowed: a whole number from {least} to {most}")
    return value


def _positive(config: Mapping[str, Any], name: str, *, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r:.60}; allowed: a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r:.60}; allowed: true, false")
    return bool(value)


def _only(config: Mapping[str, Any], name: str, allowed: tuple, *, default: Any) -> None:
    value = config.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r:.60}; allowed: {', '.join(map(repr, allowed))}")
