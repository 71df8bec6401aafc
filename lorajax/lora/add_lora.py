"""Give a model adapter slots, or take them away: linears are wrapped and unwrapped in place."""

import jax.numpy as jnp
from flax import nnx

from lorajax.layers.embedding import Embedding, LMHead
from lorajax.layers.linear import GateUpLinear, Linear, QKVLinear
from lorajax.lora.layers import (
    EmbeddingWithLoRA,
    GateUpLinearWithLoRA,
    LinearWithLoRA,
    LMHeadWithLoRA,
    QKVLinearWithLoRA,
)
from lorajax.lora.slots import LoRAConfig, init_slots
from lorajax.lora.targets import AdapterTarget, adapter_targets
from lorajax.models.decoder import Decoder

_WRAPPER = {
    Embedding: EmbeddingWithLoRA,
    LMHead: LMHeadWithLoRA,
    Linear: LinearWithLoRA,
    QKVLinear: QKVLinearWithLoRA,
    GateUpLinear: GateUpLinearWithLoRA,
}


def add_lora(model: Decoder, config: LoRAConfig) -> Decoder:
    """Wrap the model's linears, embedding and head with empty adapter slots. Returns the same model.

    The base weights are shared, not copied. A second call is an error: the layers are wrapped already.
    """
    dtype = model.embed_tokens.weight[...].dtype
    for name, members in _linears(model, config).items():
        first = members[0]
        owner, attribute = _place(model, name, first)
        base = getattr(owner, attribute)
        slots = init_slots(
            config,
            num_layers=1 if first.layer is None else model.config.num_layers,
            d_in=first.d_in,
            d_outs=tuple(target.d_out for target in members),
            dtype=jnp.dtype(dtype),
        )
        setattr(owner, attribute, _WRAPPER[type(base)](base, slots))
    return model


def remove_lora(model: Decoder) -> Decoder:
    """Put every wrapper's base back in its place. Returns the same model."""
    for module, target in {
        target.module: target for target in adapter_targets(model.config).values()
    }.items():
        owner, attribute = _place(model, module, target)
        layer = getattr(owner, attribute)
        setattr(owner, attribute, getattr(layer, "base", layer))
    return model


def _place(model: Decoder, name: str, target: AdapterTarget) -> tuple[nnx.Module, str]:
    """The module that holds the linear, and the attribute under which it does."""
    *parents, attribute = name.split(".")
    owner = model if target.layer is None else model.layers
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


def _linears(model: Decoder, config: LoRAConfig) -> dict[str, list[AdapterTarget]]:
    """Path of each linear to wrap -> its members in order (those of one layer stand for all layers)."""
    linears: dict[str, dict[int, AdapterTarget]] = {}
    for target in adapter_targets(model.config).values():
        linears.setdefault(target.module, {})[target.member] = target

    def wanted(members: dict[int, AdapterTarget]) -> bool:
        names = {target.path.rpartition(".")[2] for target in members.values()}
        return config.target_modules is None or bool(names & config.target_modules)

    return {
        name: [members[i] for i in sorted(members)] for name, members in linears.items() if wanted(members)
    }
