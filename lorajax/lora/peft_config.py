"""`adapter_config.json` of a PEFT LoRA adapter: every field of `LoraConfig` in one table.

Invariant: no field is passed over. Each one is applied, or harmless (it cannot change what the
finished adapter computes), or refused unless it holds the value that means "off". A field that the
table does not know may come from a later PEFT: it is refused unless it is null, false or empty.

Source: `LoraConfig` of PEFT 0.10 to 0.21, huggingface.co/docs/peft/package_reference/lora.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from lorajax.errors import AdapterFormatError
from lorajax.lora.module_patterns import ModulePattern, module_pattern, suffix_pattern

CONFIG_NAME = "adapter_config.json"
MAX_REGEXES = 256  # in one table; plain module names are not counted


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """What is done with one field. `off`: the values of a refused field that ask for nothing."""

    rule: Literal["applied", "harmless", "refused"]
    reason: str
    off: tuple = (None, False)


_TRAINING = "only steers training"
_RECORD = "only records how the adapter was made"
_EMPTY = (None, [], {})

FIELDS: dict[str, FieldRule] = {
    "peft_type": FieldRule("applied", "must be LORA"),
    "task_type": FieldRule("applied", "must be CAUSAL_LM or null: other tasks train a head of their own"),
    "r": FieldRule("applied", "rank of modules without an entry in rank_pattern"),
    "lora_alpha": FieldRule("applied", "scaling is alpha / r"),
    "use_rslora": FieldRule("applied", "scaling is alpha / sqrt(r)"),
    "rank_pattern": FieldRule("applied", "rank per module"),
    "alpha_pattern": FieldRule("applied", "alpha per module"),
    "target_modules": FieldRule("applied", "must select the modules that the tensors adapt"),
    "exclude_modules": FieldRule("applied", "taken from target_modules"),
    "layers_to_transform": FieldRule("applied", "taken from target_modules"),
    "layers_pattern": FieldRule("applied", "name of the list of layers that layers_to_transform counts"),
    "init_lora_weights": FieldRule("applied", "an initialisation that changed the base weights is refused"),
    "ensure_weight_tying": FieldRule(
        "applied", "in a tied model lm_head gets the factors of embed_tokens, transposed"
    ),
    "base_model_name_or_path": FieldRule("harmless", "compared with the served model's name; shapes decide"),
    "revision": FieldRule("harmless", _RECORD),
    "peft_version": FieldRule("harmless", _RECORD),
    "auto_mapping": FieldRule("harmless", _RECORD),
    "inference_mode": FieldRule("harmless", _TRAINING),
    "lora_dropout": FieldRule("harmless", _TRAINING),
    "loftq_config": FieldRule("harmless", "used only by init_lora_weights 'loftq', which is refused"),
    "eva_config": FieldRule("harmless", "initialisation that leaves the base weights alone"),
    "corda_config": FieldRule("harmless", "used only by init_lora_weights 'corda', which is refused"),
    "lora_ga_config": FieldRule("harmless", "used only by init_lora_weights 'lora_ga', which is refused"),
    "velora_config": FieldRule("harmless", "changes the backward pass only"),
    "megatron_core": FieldRule("harmless", "used only with megatron_config"),
    "qalora_group_size": FieldRule("harmless", "used only with use_qalora"),
    "runtime_config": FieldRule("harmless", "not part of the adapter"),
    "bias": FieldRule("refused", "trained biases would replace the base model's", off=(None, "none")),
    "use_dora": FieldRule("refused", "DoRA rescales the base weights' columns"),
    "lora_bias": FieldRule("refused", "a bias of the update"),
    "fan_in_fan_out": FieldRule("refused", "weights stored as (d_in, d_out), as no served model has them"),
    "modules_to_save": FieldRule("refused", "fully trained copies of base modules", off=_EMPTY),
    "trainable_token_indices": FieldRule("refused", "trained rows of the embedding", off=_EMPTY),
    "target_parameters": FieldRule("refused", "LoRA on parameters that are no linear layers", off=_EMPTY),
    "layer_replication": FieldRule("refused", "a base with repeated layers", off=_EMPTY),
    "megatron_config": FieldRule("refused", "Megatron's parallel layers", off=_EMPTY),
    "alora_invocation_tokens": FieldRule("refused", "activated LoRA: applies from a token on", off=_EMPTY),
    "use_qalora": FieldRule("refused", "QA-LoRA pools the input in groups"),
    "use_bdlora": FieldRule("refused", "block-diagonal factors", off=(None, False, {})),
    "arrow_config": FieldRule("refused", "routing between adapters", off=_EMPTY),
    "kasa_config": FieldRule("refused", "KaSA truncates the base weights", off=_EMPTY),
    "monteclora_config": FieldRule("refused", "samples around the factors", off=_EMPTY),
}

_UNKNOWN = FieldRule("refused", "a field that this version does not know", off=(None, False, "", [], {}))

# Initialisations after which the base weights are still the checkpoint's own. The others (pissa*,
# olora, corda, loftq, lora_ga) move a part of the base into the factors; PEFT's own conversion to
# plain LoRA, `path_initial_model_for_weight_conversion`, leaves `true` here.
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftLoraConfig:
    """The applied fields of an adapter's config, checked. Names are module names in the base model."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    target_modules: tuple[str, ...] | ModulePattern | Literal["all-linear"] | None
    exclude_modules: tuple[str, ...] | ModulePattern
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool
    base_model_name: str | None

    def rank_of(self, name: str) -> int:
        """The first pattern that matches decides, in the order of the file."""
        return next((rank for pattern, rank in self.rank_pattern if pattern.fullmatch(name)), self.r)

    def alpha_of(self, name: str) -> float:
        return next(
            (alpha for pattern, alpha in self.alpha_pattern if pattern.fullmatch(name)), self.lora_alpha
        )

    def scaling_of(self, name: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rank stabilisation (arXiv:2312.03732), of this module."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank)

    def selects(self, name: str) -> bool:
        """Whether PEFT would adapt the linear of this name. True if the config does not say."""
        if _listed(name, self.exclude_modules):
            return False
        targets = self.target_modules
        if targets is None:
            return True
        if targets == "all-linear":
            return name.rpartition(".")[2] not in ("lm_head", "embed_tokens")
        if isinstance(targets, ModulePattern) or name in targets or self.layers_to_transform is None:
            return _listed(name, targets)
        return _listed(name, targets) and self._layer_of(name) in self.layers_to_transform

    def _layer_of(self, name: str) -> int | None:
        """The first number that stands behind the list of layers.

        model.layers.3.mlp.experts.7.up_proj
              ^^^^^^ ^ layer
        """
        parts = name.split(".")
        numbered = [position for position, part in enumerate(parts[:-1]) if part.isdigit()]
        if not self.layers_pattern:  # any list will do, if it has a parent: "layers.3…" has none
            return next((int(parts[position]) for position in numbered if position >= 2), None)
        for pattern in self.layers_pattern:
            for position in numbered:
                if _ends_with(".".join(parts[:position]), pattern):
                    return int(parts[position])
        return None


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _listed(name: str, modules: tuple[str, ...] | ModulePattern) -> bool:
    if isinstance(modules, ModulePattern):
        return modules.fullmatch(name)
    return any(_ends_with(name, module) for module in modules)


def why_refused(name: str, value: Any) -> str | None:
    """Why an adapter with this field cannot be served; None if the field is applied, harmless or off."""
    rule = FIELDS.get(name, _UNKNOWN)
    is_off = rule.rule != "refused" or any(_same(value, off) for off in rule.off)
    return None if is_off else rule.reason


def read_config(fields: Mapping[str, Any]) -> PeftLoraConfig:
    """Check every field of an `adapter_config.json`.

    Raises:
        AdapterFormatError: names the field, what it holds and what is allowed.
    """
    for name, value in fields.items():
        if not _is_finite(value):
            raise _error(name, value, "finite numbers")
        if reason := why_refused(name, value):
            shown = f"{name[:80]} = {_shown(value)}"
            raise AdapterFormatError(f"{CONFIG_NAME}: {shown} cannot be served: {reason}")
    if fields.get("peft_type") != "LORA":
        raise _error("peft_type", fields.get("peft_type"), "'LORA'")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise _error("task_type", fields["task_type"], "'CAUSAL_LM' or null")
    _check_init(fields.get("init_lora_weights"))
    layers, targets = _layers(fields.get("layers_to_transform")), fields.get("target_modules")
    if isinstance(targets, str) and layers is not None:
        raise AdapterFormatError(f"{CONFIG_NAME}: layers_to_transform needs target_modules to be a list")
    return PeftLoraConfig(
        r=_rank("r", fields.get("r")),
        lora_alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        use_rslora=_flag("use_rslora", fields.get("use_rslora")),
        rank_pattern=_pattern_table("rank_pattern", fields.get("rank_pattern"), _rank),
        alpha_pattern=_pattern_table("alpha_pattern", fields.get("alpha_pattern"), _alpha),
        target_modules=_targets(targets),
        exclude_modules=_modules("exclude_modules", fields.get("exclude_modules")),
        layers_to_transform=layers,
        layers_pattern=_layers_pattern(fields.get("layers_pattern")),
        ensure_weight_tying=_flag("ensure_weight_tying", fields.get("ensure_weight_tying")),
        base_model_name=_text("base_model_name_or_path", fields.get("base_model_name_or_path")),
    )


def _error(name: str, value: Any, allowed: str) -> AdapterFormatError:
    found = "is missing" if value is None else f"= {_shown(value)}"
    return AdapterFormatError(f"{CONFIG_NAME}: {name[:160]} {found}; allowed: {allowed}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _same(value: Any, off: Any) -> bool:
    return type(value) is type(off) and value == off  # 0 is not false


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _error(name, value, "a whole number > 0")
    return value


def _alpha(name: str, value: Any) -> float:
    """Zero and negative alphas are numbers that PEFT applies as they stand; so are they here."""
    if type(value) not in (int, float) or abs(value) > 3.4e38:
        raise _error(name, value, "a number that float32 can hold")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _error(name, value, "true or false")
    return bool(value)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _error(name, value, "text or null")
    return value or None


def _pattern_table(name: str, value: Any, check: Any) -> tuple[tuple[ModulePattern, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _error(name, value, "a table from module pattern to number")
    table = tuple(
        (suffix_pattern(name, key), check(f"{name}[{key[:120]!r}]", item)) for key, item in value.items()
    )
    if (regexes := sum(not pattern.is_plain for pattern, _ in table)) > MAX_REGEXES:
        raise AdapterFormatError(
            f"{CONFIG_NAME}: {name} has {regexes} regular expressions; allowed {MAX_REGEXES}"
        )
    return table


def _targets(value: Any) -> tuple[str, ...] | ModulePattern | Literal["all-linear"] | None:
    if value is None:
        return None
    if isinstance(value, str) and value.lower() == "all-linear":
        return "all-linear"
    return _modules("target_modules", value)


def _modules(name: str, value: Any) -> tuple[str, ...] | ModulePattern:
    """A list holds endings of module names; a text is a regular expression for the whole name."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return module_pattern(name, value)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _error(name, value, "a list of module names, or one regular expression")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    layers = [value] if type(value) is int else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise _error("layers_to_transform", value, "a layer index >= 0, or a list of them")
    return frozenset(layers)


def _layers_pattern(value: Any) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) and value else value or []
    if not isinstance(patterns, list) or not all(
        isinstance(item, str) and item.replace(".", "_").isidentifier() for item in patterns
    ):
        raise _error("layers_pattern", value, "the name of the list of layers, or several")
    return tuple(patterns)


def _check_init(value: Any) -> None:
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, str) and value.lower() in _HARMLESS_INITS)
    ):
        return
    raise AdapterFormatError(
        f"{CONFIG_NAME}: init_lora_weights = {_shown(value)} cannot be served: the factors belong to a "
        "modified base; convert the adapter with PEFT's path_initial_model_for_weight_conversion"
    )
