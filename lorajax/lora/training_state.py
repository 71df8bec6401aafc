"""The arrays of a live training state → `AdapterWeights`, with no file in between.

Layouts that are read. `path` is the module's name as Hugging Face has it, with or without a leading
`params`, `base_model` or `model`; layers are `layers.3`, `layers_3`, a list, or stacked (below). Trees
may be nested dicts, lists, `nnx.State`, Linen collections with boxed leaves, or flat dicts whose keys
are dotted names, names with slashes, or tuples.

    layout   leaves                                  shapes                    scaling
    Flax     path.lora_a, path.lora_b                [*in, r], [r, *out]       alpha / r; 1 without alpha
             path.lora.lora_a, …   (LoRALinear)
             path.lora_a.kernel, … (Linen Dense)
    qwix     path.kernel_lora_a, path.kernel_lora_b  [*in, r], [r, *out]       alpha / r
             (any parameter name for `kernel`)
    PEFT     path.lora_A.weight, path.lora_B.weight, [r, d_in], [d_out, r]     alpha / r
             also lora_A.default.weight, lora_embedding_A

`nnx.LoRA` and `nnx.LoRALinear` compute x · a · b and know no alpha, hence the 1. `*in` and `*out` may
be several axes, as einsum layers have them (heads, head_dim); with the base's config they are
flattened in row order, without it they are refused. A path without a layer index (`layers.self_attn.
q_proj`) is a stack: the first axis of both factors counts the layers.

Invariant: every leaf is one factor of one module, or the tree is refused. Leaves stay jax arrays (or
tracers), so that gradients flow through.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError
from lorajax.lora.binding import check_weights
from lorajax.lora.peft_keys import parse_keys
from lorajax.lora.targets import is_adaptable
from lorajax.lora.weights import AdapterWeights, AnyArray, LoRAModule, sample_names

_LEADING = ("params", "base_model", "model")
Layout = Literal["Flax", "qwix", "PEFT"]
Rename = Mapping[str, str] | Callable[[str], str] | None


class _Factor(NamedTuple):
    """One leaf: whose factor it is, and which."""

    layout: Layout
    path: str
    side: str  # "a" or "b"
    array: AnyArray


def read_pytree(
    tree: Any,
    rank: int | None = None,
    alpha: int | float | None = None,
    *,
    use_rslora: bool = False,
    config: ModelConfig | None = None,
    rename: Rename = None,
) -> AdapterWeights:
    """An adapter from a training state in one of the layouts above.

    tree: only the adapter's arrays, e.g. `nnx.state(model, nnx.LoRAParam)`. An `AdapterWeights` is
        returned as it is.
    rank: if given, the rank that every module must have.
    alpha: of the scaling alpha / r, or alpha / sqrt(r) with `use_rslora`.
    config: the base model, to check every path and shape against.
    rename: how the tree's module names become Hugging Face's: a table of single name parts
        ({"attn": "self_attn"}), or a function from dotted path to dotted path.

    Raises:
        AdapterFormatError: a leaf that is no factor, two layouts in one tree, an unknown module, a
            missing partner, a shape or rank that does not fit.
    """
    if alpha is not None and (isinstance(alpha, bool) or not abs(alpha) <= 3.4e38):
        raise AdapterFormatError(f"alpha = {alpha!r}; allowed: a finite number")
    if isinstance(tree, AdapterWeights):
        if alpha is not None or use_rslora:
            raise AdapterFormatError(
                "an AdapterWeights has its scalings already; alpha and use_rslora must be left out"
            )
        weights = tree
    else:
        factors = _factors(_named_leaves(tree), rename)
        weights = AdapterWeights(modules=_modules(factors, alpha, use_rslora, config))
    for path, module in weights.modules.items():
        if rank is not None and module.rank != rank:
            raise AdapterFormatError(f"{path}: rank {module.rank}; expected {rank}")
    if config is not None:
        check_weights(weights, config)
    return weights


def _named_leaves(tree: Any) -> dict[tuple[str, ...], AnyArray]:
    """Leaf arrays by the parts of their names."""
    leaves: dict[tuple[str, ...], AnyArray] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = tuple(part for key in key_path for part in _parts(key))
        if parts[-1:] == ("value",):  # a variable or a box around the array
            parts = parts[:-1]
        shown = ".".join(parts)
        if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise AdapterFormatError(f"leaf {shown!r} is {kind}; expected an array of floating-point numbers")
        if parts in leaves:
            raise AdapterFormatError(f"two leaves are called {shown!r}")
        leaves[parts] = leaf
    if not leaves:
        raise AdapterFormatError("the tree holds no array")
    return leaves


def _parts(key: Any) -> list[str]:
    """The name parts in one key of a tree path."""
    match key:
        case jax.tree_util.DictKey(key=tuple() as names):
            return [str(name) for name in names]
        case jax.tree_util.DictKey(key=name):
            return str(name).replace("/", ".").split(".")
        case jax.tree_util.SequenceKey(idx=index):
            return [str(index)]
        case jax.tree_util.GetAttrKey(name=name):
            return [name]
    raise AdapterFormatError(
        f"the tree has a node without names ({type(key).__name__}); give a dict or nnx.State"
    )


def _factors(leaves: Mapping[tuple[str, ...], AnyArray], rename: Rename) -> list[_Factor]:
    factors, others = [], {}
    for parts, array in leaves.items():
        if found := _flax_factor(parts):
            layout, module, side = found
            factors.append(_Factor(layout, _canonical(module, rename), side, array))
        else:
            others[".".join(parts)] = array
    if others:
        try:
            keys = parse_keys(others)
        except AdapterFormatError as error:
            raise AdapterFormatError(
                f"not all leaves are LoRA factors; give only the adapter's: {error}"
            ) from None
        if keys.base_copies:
            raise AdapterFormatError(
                f"leaf {keys.base_copies[0].key!r} is a weight of the base, no LoRA factor"
            )
        for key in keys.factors:
            path = _canonical(tuple(key.name.split(".")), rename)
            factors.append(_Factor("PEFT", path, key.factor.lower(), others[key.key]))
    if len(layouts := {factor.layout for factor in factors}) > 1:
        raise AdapterFormatError(f"the tree mixes the layouts {', '.join(sorted(layouts))}; expected one")
    return factors


def _flax_factor(parts: tuple[str, ...]) -> tuple[Layout, tuple[str, ...], str] | None:
    *module, last = parts
    if last == "kernel" and module and module[-1] in ("lora_a", "lora_b", "lora_A", "lora_B"):
        *module, last = module
        return "Flax", tuple(module), last[-1].lower()
    if last in ("lora_a", "lora_b"):
        return "Flax", tuple(module[:-1] if module[-1:] == ["lora"] else module), last[-1]
    if last.endswith(("_lora_a", "_lora_b")):
        return "qwix", tuple(module), last[-1]
    return None


def _canonical(parts: tuple[str, ...], rename: Rename) -> str:
    """Name parts of a module → canonical path, without the layer index if the layers are stacked."""
    while parts and parts[0] in _LEADING:
        parts = parts[1:]
    split = [piece for part in parts for piece in _split_index(part)]
    if isinstance(rename, Mapping):
        split = [rename.get(part, part) for part in split]
    path = ".".join(split)
    return rename(path) if callable(rename) else path


def _split_index(part: str) -> list[str]:
    """Linen calls the third of a list of submodules `layers_2`."""
    name, _, index = part.rpartition("_")
    return [name, index] if name == "layers" and index.isdigit() else [part]


def _modules(
    factors: list[_Factor], alpha: int | float | None, use_rslora: bool, config: ModelConfig | None
) -> dict[str, LoRAModule]:
    pairs: dict[str, dict[str, AnyArray]] = {}
    for factor in factors:
        if factor.side in pairs.setdefault(factor.path, {}):
            raise AdapterFormatError(f"two leaves are factor {factor.side} of {factor.path!r}")
        pairs[factor.path][factor.side] = factor.array
    if orphans := [path for path, pair in pairs.items() if len(pair) == 1]:
        raise AdapterFormatError(f"{len(orphans)} modules have only one factor: {sample_names(orphans)}")
    layout = factors[0].layout
    if alpha is None and (layout != "Flax" or use_rslora):
        raise AdapterFormatError(f"alpha is missing: the {layout} layout scales by alpha / r")
    modules: dict[str, LoRAModule] = {}
    for path, pair in pairs.items():
        for single, a, b in _unstacked(path, pair["a"], pair["b"], config):
            a, b = (a, b) if layout == "PEFT" else _as_peft(single, a, b, config)
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
                raise AdapterFormatError(
                    f"{single}: factors of shapes {list(a.shape)} and {list(b.shape)} are no pair"
                )
            if single in modules:
                raise AdapterFormatError(f"{single!r} is there both stacked and by itself")
            modules[single] = LoRAModule(a=a, b=b, scaling=_scaling(a.shape[0], alpha, use_rslora))
    return dict(sorted(modules.items()))


def _unstacked(
    path: str, a: AnyArray, b: AnyArray, config: ModelConfig | None
) -> list[tuple[str, AnyArray, AnyArray]]:
    """The module itself, or the modules of all layers if the path names a stack of them."""
    if is_adaptable(path):
        return [(path, a, b)]
    head, _, rest = path.partition(".")
    if head != "layers" or not is_adaptable(f"layers.0.{rest}"):
        raise AdapterFormatError(f"{path!r} is not a module that an adapter can have; see `rename`")
    layers = config.num_layers if config else a.shape[0]
    if a.ndim < 3 or b.ndim < 3 or a.shape[0] != layers or b.shape[0] != layers:
        raise AdapterFormatError(
            f"{path}: factors of shapes {list(a.shape)} and {list(b.shape)}; "
            f"expected a first axis of {layers} layers"
        )
    return [(f"layers.{layer}.{rest}", a[layer], b[layer]) for layer in range(layers)]


def _as_peft(path: str, a: AnyArray, b: AnyArray, config: ModelConfig | None) -> tuple[AnyArray, AnyArray]:
    """[*in, r], [r, *out] → [r, d_in], [d_out, r]."""
    if (
        min(a.ndim, b.ndim) < 2
        or 0 in (*a.shape, *b.shape)
        or (config is None and (a.ndim, b.ndim) != (2, 2))
    ):
        raise AdapterFormatError(
            f"{path}: factors of shapes {list(a.shape)} and {list(b.shape)}; both must be matrices "
            "(with a config, d_in and d_out may be several axes)"
        )
    return a.reshape(-1, a.shape[-1]).T, b.reshape(b.shape[0], -1).T


def _scaling(rank: int, alpha: int | float | None, use_rslora: bool) -> float:
    if alpha is None:
        return 1.0
    return float(alpha) / (math.sqrt(rank) if use_rslora else rank)
