"""A forward pass without an engine: the same modules that serve, differentiable in the adapter."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from lorajax.errors import AdapterFormatError
from lorajax.forward_context import LoRAContext, dense_context
from lorajax.lora.add_lora import add_lora, remove_lora
from lorajax.lora.slots import LoRAConfig, LoRASlot, pack_adapter
from lorajax.lora.targets import adapter_targets
from lorajax.lora.weights import AdapterWeights
from lorajax.models.decoder import Decoder


def forward(
    model: Decoder, token_ids: Integer[Array, "batch length"], adapter: AdapterWeights | None = None
) -> Float[Array, "batch length vocab"]:
    """Logits after every token of a batch of equally long sequences, float32.

    adapter: applied to all sequences; its arrays may be traced, so `jax.grad` with respect to them
        works. None is the base model.
    Raises AdapterFormatError if the adapter has a module that the model has not.
    """
    if adapter is not None:
        unknown = sorted(set(adapter.modules) - set(adapter_targets(model.config)))
        if unknown:
            raise AdapterFormatError(f"the model has no {unknown[0]} ({len(unknown)} such modules)")
    graphdef, slots, weights = nnx.split(model, LoRASlot, ...)
    return _forward(graphdef, slots, weights, token_ids, adapter)


@jax.jit(static_argnums=0)  # the structure decides what is compiled
def _forward(
    graphdef: nnx.GraphDef,
    slots: nnx.State,
    weights: nnx.State,
    token_ids: Integer[Array, "batch length"],
    adapter: AdapterWeights | None,
) -> Float[Array, "batch length vocab"]:
    model = remove_lora(nnx.merge(graphdef, slots, weights))
    batch, length = token_ids.shape
    lora = None
    if adapter is not None:
        model = _with_single_adapter(model, adapter)
        lora = LoRAContext(slot=jnp.ones((1,), jnp.int32))  # all tokens are one block of slot 1
    ctx = dense_context(batch, length, lora)
    hidden, _ = model(token_ids.reshape(-1).astype(jnp.int32), None, ctx)
    return model.logits(hidden, ctx).reshape(batch, length, -1)


def _with_single_adapter(model: Decoder, adapter: AdapterWeights) -> Decoder:
    """The model with two slots: none, and the adapter."""
    model = add_lora(model, LoRAConfig(num_slots=2, max_rank=adapter.rank))
    graphdef, slots, weights = nnx.split(model, LoRASlot, ...)
    packed = pack_adapter(adapter, slots, adapter_targets(model.config), xp=jnp)
    slots = jax.tree.map(lambda values: jnp.stack([jnp.zeros_like(values), values], axis=1), packed)
    return nnx.merge(graphdef, slots, weights)
