"""Tensor keys of an adapter file ↔ modules of the base model.

Invariant: every key binds to exactly one factor of exactly one module, and the bound modules are the
ones that the adapter's own config selects; otherwise nothing is bound and an error names both sides.
All of it is decided on names and shapes, before a tensor is read.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from lorajax.config import ModelConfig
from lorajax.errors import AdapterCapacityError, AdapterFormatError
from lorajax.lora.peft_config import CONFIG_NAME, PeftLoraConfig
from lorajax.lora.peft_keys import FactorKey
from lorajax.lora.targets import AdapterTarget, adapter_targets, hf_name, is_adaptable
from lorajax.lora.weights import AdapterWeights, sample_names

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundModule:
    """One module of the adapter: the keys of its two factors, its rank and scaling.

    transposed: the factors are those of `embed_tokens`, to be read transposed (weights tied).
    copies: keys of A and B saved once more under the module's own name; they must be equal.
    """

    path: str
    name: str
    key_a: str
    key_b: str
    rank: int
    scaling: float
    transposed: bool = False
    copies: tuple[str, ...] = ()


def bind(
    keys: Sequence[FactorKey], shapes: Shapes, peft_config: PeftLoraConfig, config: ModelConfig | None
) -> dict[str, BoundModule]:
    """Bind all factors of an adapter.

    shapes: tensor key → shape. config: the base model; None checks names and ranks only.

    Raises:
        AdapterFormatError: no factor at all, a factor without its partner, a module that the base
            lacks or the config does not select, or a selected module without factors, a wrong shape.
    """
    if not keys:
        raise AdapterFormatError("the adapter holds no LoRA tensor")
    pairs = _pairs(keys)
    targets = adapter_targets(config) if config else {path: None for path in pairs if is_adaptable(path)}
    unknown = [pair["A"].key for path, pair in pairs.items() if path not in targets]
    _refuse_unknown(unknown, len(pairs), config)
    tied = _ties_head(pairs, peft_config, config)
    _check_selection(pairs, peft_config, config, tied)
    modules = {
        path: _bind_module(path, pair, shapes, peft_config, targets[path]) for path, pair in pairs.items()
    }
    if tied:
        modules["lm_head"] = _tied_head(modules, peft_config)
    return dict(sorted(modules.items()))


def check_weights(weights: AdapterWeights, config: ModelConfig) -> None:
    """Check that arrays from memory fit the base model: every path, every shape.

    Raises:
        AdapterFormatError: names the modules at fault, what was found and what is expected.
    """
    targets = adapter_targets(config)
    if not weights.modules:
        raise AdapterFormatError("the adapter holds no LoRA module")
    _refuse_unknown([path for path in weights.modules if path not in targets], len(weights.modules), config)
    for path, module in weights.modules.items():
        _check_shapes(path, tuple(module.a.shape), tuple(module.b.shape), module.rank, targets[path])


def check_limits(
    ranks: Mapping[str, int],
    *,
    max_rank: int | None,
    target_modules: Collection[str] | None,
    experts: bool,
) -> None:
    """Check an adapter's modules (path → rank) against what the engine keeps memory for.

    Raises:
        AdapterFormatError: a module that the engine was told not to adapt.
        AdapterCapacityError: a rank above `max_rank`; names the largest one and its module.
    """
    if not experts and (paths := [path for path in ranks if ".experts." in path]):
        raise AdapterFormatError(f"adapters on experts cannot be served: {sample_names(paths)}")
    if target_modules is not None:
        left_out = [path for path in ranks if path.rpartition(".")[2] not in target_modules]
        if left_out:
            raise AdapterFormatError(
                f"{len(left_out)} of {len(ranks)} adapted modules are not served: {sample_names(left_out)}; "
                f"the engine adapts {', '.join(sorted(target_modules)) or 'none'}"
            )
    path = max(ranks, key=lambda path: ranks[path], default=None)
    if max_rank is not None and path is not None and ranks[path] > max_rank:
        raise AdapterCapacityError(f"rank {ranks[path]} of {path!r} is above the largest allowed, {max_rank}")


def _pairs(keys: Sequence[FactorKey]) -> dict[str, dict[str, FactorKey]]:
    pairs: dict[str, dict[str, FactorKey]] = {}
    for key in keys:
        pair = pairs.setdefault(key.path, {})
        if other := pair.get(key.factor):
            raise AdapterFormatError(
                f"tensors {other.key!r} and {key.key!r} are the same factor of one module"
            )
        if key.is_embedding != (key.path == "embed_tokens"):
            expected = "lora_embedding_A/B" if key.path == "embed_tokens" else "lora_A/B"
            raise AdapterFormatError(f"tensor {key.key!r}: the factors of this module are called {expected}")
        pair[key.factor] = key
    orphans = [factor.key for pair in pairs.values() if len(pair) == 1 for factor in pair.values()]
    if orphans:
        raise AdapterFormatError(
            f"{len(orphans)} factors stand without their partner: {sample_names(orphans)}"
        )
    return pairs


def _refuse_unknown(unknown: Sequence[str], num_modules: int, config: ModelConfig | None) -> None:
    if not unknown:
        return
    if config is None:
        base = "modules like 'layers.0.self_attn.q_proj', 'layers.0.mlp.up_proj', 'embed_tokens', 'lm_head'"
    else:
        inside = [hf_name(path) for path in adapter_targets(config) if path.startswith("layers.0.")]
        base = f"layers 0 to {config.num_layers - 1}, 'model.embed_tokens', 'lm_head', {sample_names(inside)}"
    raise AdapterFormatError(
        f"{len(unknown)} of {num_modules} adapted modules are not in the base model: "
        f"{sample_names(unknown)}; the base has {base}"
    )


def _ties_head(
    pairs: Mapping[str, Mapping[str, FactorKey]], peft_config: PeftLoraConfig, config: ModelConfig | None
) -> bool:
    """Whether PEFT gives the output head the factors of the embedding (`ensure_weight_tying`).

    PEFT then names only the embedding in `target_modules`. It saves the head's factors as well.
    """
    if not peft_config.ensure_weight_tying or "embed_tokens" not in pairs:
        return False
    if config is None and "lm_head" not in pairs:
        raise AdapterFormatError(
            f"{CONFIG_NAME}: ensure_weight_tying: whether the base ties lm_head to embed_tokens must be known"
        )
    return config is None or config.tie_word_embeddings


def _tied_head(modules: Mapping[str, BoundModule], peft_config: PeftLoraConfig) -> BoundModule:
    """y = x · Eᵀ of an embedding changed by E += (b · a)ᵀ: A of the head is bᵀ, and B is aᵀ."""
    embedding, own = modules["embed_tokens"], modules.get("lm_head")
    rank = peft_config.rank_of("lm_head")
    if rank != embedding.rank:
        raise AdapterFormatError(
            f"lm_head: rank {rank}, but ensure_weight_tying ties it to embed_tokens of rank {embedding.rank}"
        )
    return BoundModule(
        path="lm_head",
        name="lm_head",
        key_a=embedding.key_b,
        key_b=embedding.key_a,
        rank=rank,
        scaling=peft_config.scaling_of("lm_head"),
        transposed=True,
        copies=(own.key_a, own.key_b) if own else (),
    )


def _check_selection(
    pairs: Mapping[str, Mapping[str, FactorKey]],
    peft_config: PeftLoraConfig,
    config: ModelConfig | None,
    tied: bool,
) -> None:
    """The adapted modules must be the ones that PEFT would adapt for this config in this base.

    Experts are exempt as a whole: where a library keeps all experts in one tensor, PEFT finds no
    linears there, so a config that says `gate_proj` may rightly come with none of them.
    """
    own = {path: pair for path, pair in pairs.items() if not (tied and path == "lm_head")}
    extra = [pair["A"].key for pair in own.values() if not peft_config.selects(pair["A"].name)]
    if extra:
        raise AdapterFormatError(
            f"{len(extra)} of {len(own)} adapted modules are not among those that {CONFIG_NAME} selects "
            f"(target_modules, exclude_modules, layers_to_transform): {sample_names(extra)}"
        )
    if config is None or peft_config.target_modules is None:
        return
    # an adapter of the decoder without its head calls its layers "layers.0", not "model.layers.0"
    headless = "lm_head" not in own and all(pair["A"].name == path for path, pair in own.items())
    has_experts = any(".experts." in path for path in own)
    missing = [
        path
        for path, target in adapter_targets(config).items()
        if path not in pairs
        and not (path == "lm_head" and (tied or headless))
        and (has_experts or target.expert is None)
        and peft_config.selects(path if headless else hf_name(path))
    ]
    if missing:
        raise AdapterFormatError(
            f"{CONFIG_NAME} selects {len(missing)} modules for which there are no tensors: "
            f"{sample_names(missing)}; found {sample_names(pairs)}"
        )


def _bind_module(
    path: str,
    pair: Mapping[str, FactorKey],
    shapes: Shapes,
    peft_config: PeftLoraConfig,
    target: AdapterTarget | None,
) -> BoundModule:
    name, key_a, key_b = pair["A"].name, pair["A"].key, pair["B"].key
    rank = peft_config.rank_of(name)
    _check_shapes(path, shapes[key_a], shapes[key_b], rank, target)
    return BoundModule(
        path=path, name=name, key_a=key_a, key_b=key_b, rank=rank, scaling=peft_config.scaling_of(name)
    )


def _check_shapes(
    path: str, a: tuple[int, ...], b: tuple[int, ...], rank: int, target: AdapterTarget | None
) -> None:
    if len(a) != 2 or len(b) != 2:
        raise AdapterFormatError(f"{path}: A {list(a)} and B {list(b)} must be matrices")
    expected_a = (rank, target.d_in if target else a[1])
    expected_b = (target.d_out if target else b[0], rank)
    if a != expected_a or b != expected_b or 0 in a + b:
        raise AdapterFormatError(
            f"{path}: A {list(a)} and B {list(b)} do not fit; "
            f"expected A {list(expected_a)} and B {list(expected_b)} for rank {rank}"
        )


def unmatched_patterns(modules: Mapping[str, BoundModule], peft_config: PeftLoraConfig) -> list[str]:
    """Entries of `rank_pattern` and `alpha_pattern` that match no adapted module: likely mistyped."""
    names = [module.name for module in modules.values()]
    return [
        f"{field}[{pattern.text!r}]"
        for field, table in (
            ("rank_pattern", peft_config.rank_pattern),
            ("alpha_pattern", peft_config.alpha_pattern),
        )
        for pattern, _ in table
        if not any(map(pattern.fullmatch, names))
    ]
