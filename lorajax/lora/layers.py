"""LoRA by composition: each wrapper holds a base layer and its adapter slots, and adds the update.

A wrapper is called like its base layer. The base keeps its weights, under `base`, and is never
changed; without `ctx.lora` a wrapper is its base and nothing more.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from lorajax.forward_context import ForwardContext
from lorajax.layers.embedding import Embedding, LMHead
from lorajax.layers.linear import GateUpLinear, Linear, QKVLinear
from lorajax.lora.slots import LoRASlot
from pallas_kernels import batched_lora, lora_expand

_FIRST_LAYER = 0  # embedding and head stand once in the model: their slots have a single layer


def _add_lora(x: Array, y: Any, slots: LoRASlot, ctx: ForwardContext, layer: Array | None) -> Any:
    """y (one array, or one per member of a fused projection) plus each token's adapter update."""
    assert ctx.lora is not None
    arrays = slots.get_value()
    single = not isinstance(y, tuple)
    return batched_lora(
        x,
        arrays.a,
        arrays.b[0] if single else arrays.b,
        ctx.lora.slot,
        arrays.scale[..., 0] if single else arrays.scale,
        y,
        rank=arrays.rank,
        layer=layer,
    )


class LinearWithLoRA(nnx.Module):
    """A `Linear` with adapter slots (`o_proj`, `down_proj`)."""

    def __init__(self, base: Linear, slots: LoRASlot):
        self.base, self.slots = base, slots

    def __call__(self, x: Float[Array, "tokens d_in"], ctx: ForwardContext) -> Float[Array, "tokens d_out"]:
        y = self.base(x, ctx)
        return y if ctx.lora is None else _add_lora(x, y, self.slots, ctx, ctx.layer)


class QKVLinearWithLoRA(nnx.Module):
    """The fused q, k, v projections with adapter slots of three members."""

    def __init__(self, base: QKVLinear, slots: LoRASlot):
        self.base, self.slots = base, slots

    def __call__(
        self, x: Float[Array, "tokens d_in"], ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_q"], Float[Array, "tokens d_kv"], Float[Array, "tokens d_kv"]]:
        qkv = self.base(x, ctx)
        return qkv if ctx.lora is None else _add_lora(x, qkv, self.slots, ctx, ctx.layer)


class GateUpLinearWithLoRA(nnx.Module):
    """The fused gate and up projections with adapter slots of two members."""

    def __init__(self, base: GateUpLinear, slots: LoRASlot):
        self.base, self.slots = base, slots

    def __call__(
        self, x: Float[Array, "tokens d_in"], ctx: ForwardContext
    ) -> tuple[Float[Array, "tokens d_ff"], Float[Array, "tokens d_ff"]]:
        gate_up = self.base(x, ctx)
        return gate_up if ctx.lora is None else _add_lora(x, gate_up, self.slots, ctx, ctx.layer)


class EmbeddingWithLoRA(nnx.Module):
    """A token embedding with adapter slots: x · A is a look-up of A's row of the token.

    The update goes to the input side only; a tied head keeps the base weight, as in PEFT.
    """

    def __init__(self, base: Embedding, slots: LoRASlot):
        self.base, self.slots = base, slots

    @property
    def weight(self) -> nnx.Param:
        return self.base.weight

    def __call__(
        self, token_ids: Int32[Array, " tokens"], ctx: ForwardContext
    ) -> Float[Array, "tokens d_model"]:
        y = self.base(token_ids, ctx)
        if ctx.lora is None:
            return y
        arrays = self.slots.get_value()
        block = token_ids.shape[0] // ctx.lora.slot.shape[0]
        token_slot = jnp.repeat(ctx.lora.slot, block, total_repeat_length=token_ids.shape[0])
        h = arrays.a[_FIRST_LAYER, token_slot, token_ids].astype(jnp.float32)
        return lora_expand(
            h,
            arrays.b[0],
            ctx.lora.slot,
            arrays.scale[..., 0],
            y,
            rank=arrays.rank,
            layer=jnp.int32(_FIRST_LAYER),
        )


class LMHeadWithLoRA(nnx.Module):
    """The language-model head with adapter slots; `ctx.lora` holds one slot per row of logits."""

    def __init__(self, base: LMHead, slots: LoRASlot):
        self.base, self.slots = base, slots

    @property
    def weight(self) -> nnx.Param | None:
        return self.base.weight

    def __call__(
        self,
        hidden: Float[Array, "rows d_model"],
        embedding_weight: Float[Array, "vocab d_model"],
        ctx: ForwardContext,
    ) -> Float[Array, "rows vocab"]:
        y = self.base(hidden, embedding_weight, ctx)
        return y if ctx.lora is None else _add_lora(hidden, y, self.slots, ctx, jnp.int32(_FIRST_LAYER))
