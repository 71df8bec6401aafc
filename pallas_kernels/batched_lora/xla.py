"""The gathered-adapter matmuls in XLA: gather each block's A and B, then one batched matmul."""

import jax.numpy as jnp


def lora_shrink(x, a, slot, layer):
    blocks = slot.shape[0]
    grouped = x.reshape(blocks, -1, x.shape[1])
    h = jnp.einsum("nbd,ndr->nbr", grouped, a[layer, slot], preferred_element_type=jnp.float32)
    return jnp.where((slot > 0)[:, None, None], h, 0.0).reshape(x.shape[0], -1)


def lora_expand(h, b, slot, scale, y, layer):
    blocks = slot.shape[0]
    grouped = (h.reshape(blocks, -1, h.shape[1]) * scale[layer, slot][:, None, None]).astype(b.dtype)
    delta = jnp.einsum("nbr,nro->nbo", grouped, b[layer, slot], preferred_element_type=jnp.float32)
    delta = jnp.where((slot > 0)[:, None, None], delta, 0.0).reshape(y.shape)
    return (y.astype(jnp.float32) + delta).astype(y.dtype)


def batched_lora(x, a, b, slot, scale, y, layer):
    h = lora_shrink(x, a, slot, layer)
    rank = h.shape[1] // len(y)
    return tuple(
        lora_expand(h[:, m * rank : (m + 1) * rank], b[m], slot, scale[..., m], y[m], layer) for m in range(len(y))
    )
