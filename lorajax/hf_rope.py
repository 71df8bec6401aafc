"""Rope settings of a Hugging Face `config.json` → `RopeConfig`.

transformers 4 writes `rope_theta` and `rope_scaling` (with `type` or `rope_type` in it), transformers 5
`rope_parameters`, which holds the theta too. Invariant: all spellings of one setting give one
`RopeConfig`; values that contradict each other, and rules or fields that are not served, are refused.
Source of names and defaults: transformers 5, `modeling_rope_utils`.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from lorajax.config import RopeConfig
from lorajax.errors import ConfigError

_FIELDS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_NO_CHANGE = {"partial_rotary_factor": 1.0, "factor": 1.0}
"""Fields that say nothing at this value, whatever the rule."""


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rope of a parsed `config.json`. Raises ConfigError, naming field, value and what is allowed."""
    given = _merged(config)
    kind = _rope_type(given)
    theta = _theta(given)
    length = given.pop("original_max_position_embeddings", None)
    fields = {name: value for name, value in given.items() if value is not None}
    unserved = [
        f"{name} = {value!r:.60}"
        for name, value in fields.items()
        if name not in _FIELDS[kind] and not (name in _NO_CHANGE and value == _NO_CHANGE[name])
    ]
    if unserved:
        raise ConfigError(
            f"rope_type {kind!r} has {', '.join(unserved)}; "
            f"allowed: {', '.join(sorted(_FIELDS[kind])) or 'rope_theta only'}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    for name in _REQUIRED[kind]:
        if name not in fields and not (name == "original_max_position_embeddings" and length is not None):
            raise ConfigError(f"rope_type {kind!r} lacks {name}")
    if kind in ("yarn", "dynamic") and length is None:
        length = config.get("max_position_embeddings")
    rope = RopeConfig(
        theta=theta,
        rope_type=kind,
        original_max_position_embeddings=None if kind == "linear" else _length(length),
        **{name: _number(name, value) for name, value in fields.items() if name in _FIELDS[kind]},
    )
    if rope.factor < 1.0:
        raise ConfigError(f"rope factor is {rope.factor}; allowed: at least 1")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ConfigError(
            f"rope low_freq_factor is {rope.low_freq_factor}; "
            f"allowed: less than high_freq_factor = {rope.high_freq_factor}"
        )
    if kind == "yarn" and rope.beta_fast < rope.beta_slow:
        raise ConfigError(
            f"rope beta_fast is {rope.beta_fast}; allowed: at least beta_slow = {rope.beta_slow}"
        )
    return rope


def served_length(config: Mapping[str, Any], rope: RopeConfig, max_position_embeddings: int) -> int:
    """Longest sequence in tokens that a model with this rope was made for.

    YaRN with an explicit trained length serves `factor` times that, whether `max_position_embeddings`
    is the trained or the extended length; without one nothing says which it is, and it stands as it is.
    """
    explicit = _merged(config).get("original_max_position_embeddings") is not None
    if rope.rope_type == "yarn" and explicit and rope.original_max_position_embeddings is not None:
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every rope setting of the file under one name; a setting given twice must be the same."""
    found: dict[str, tuple[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        settings = config.get(place) or {}
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{place} is {settings!r:.60}; allowed: an object or null")
        for name, value in settings.items():
            if isinstance(value, Mapping):
                raise ConfigError(f"{place}.{name}: a rope for each kind of layer is not served")
            _add(found, name, f"{place}.{name}", value)
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        _add(found, name, name, config.get(name))
    return {name: value for name, (_, value) in found.items()}


def _add(found: dict[str, tuple[str, Any]], name: str, where: str, value: Any) -> None:
    if value is None:
        return
    before, known = found.setdefault(name, (where, value))
    if known != value:
        raise ConfigError(f"{before} is {known!r:.60} but {where} is {value!r:.60}; allowed: one value")


def _rope_type(given: dict[str, Any]) -> Any:
    kind, old_spelling = given.pop("rope_type", None), given.pop("type", None)
    if kind is not None and old_spelling is not None and kind != old_spelling:
        raise ConfigError(f"rope_type is {kind!r} but type is {old_spelling!r}; allowed: one value")
    kind = kind or old_spelling or "default"
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(f"rope_type is {kind!r:.60}; served are {', '.join(sorted(_FIELDS))}")
    return kind


def _theta(given: dict[str, Any]) -> float:
    theta = given.pop("rope_theta", None)
    if theta is None:
        warnings.warn("config.json names no rope_theta; 10000 is assumed, as in transformers", stacklevel=5)
        return 10_000.0
    return _number("rope_theta", theta)


def _number(name: str, value: Any) -> Any:
    if name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(f"rope truncate is {value!r:.60}; allowed: true, false")
        return value
    # mscale = 0 means "not given" in transformers
    least_is_allowed = name in ("mscale", "mscale_all_dim")
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and not least_is_allowed)
    ):
        raise ConfigError(f"rope {name} is {value!r:.60}; allowed: a positive number")
    return float(value)


def _length(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 1:
        raise ConfigError(
            f"original_max_position_embeddings is {value!r:.60}; allowed: a whole number of at least 1"
        )
    return int(value)
