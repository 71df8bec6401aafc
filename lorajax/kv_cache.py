"""The paged KV arrays of all layers: made once, written in place.

Invariant: the arrays are only ever donated into a step and carried through its layer scan; as
`xs`/`ys` of the scan, or undonated, every step would copy the whole cache.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lorajax.config import ModelConfig
from lorajax.pytree import pytree_dataclass


@pytree_dataclass
class PagedKVCache:
    """Keys and values, [layers, pages, page_size, kv_heads, head_dim]."""

    k: Float[Array, "layers pages page_size kv_heads head_dim"]
    v: Float[Array, "layers pages page_size kv_heads head_dim"]

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


def init_kv_cache(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> PagedKVCache:
    """A cache of zeros; `kv_cache_bytes_per_page` tells its size."""
    shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
    return PagedKVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def kv_cache_bytes_per_page(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes over all layers, keys and values together."""
    elements = 2 * config.num_layers * page_size * config.num_kv_heads * config.head_dim
    return elements * jnp.dtype(dtype).itemsize


def write_kv(
    cache: PagedKVCache,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    write_index: Int32[Array, " tokens"],
    layer: Int32[Array, ""],
) -> PagedKVCache:
    """Write each token's key and value into its cell of the given layer.

    write_index: page_id * page_size + offset. Padding points past the last cell and is dropped;
    it never points at a real page, where it would overwrite someone's KV.
    """
    page, offset = jnp.divmod(write_index, jnp.int32(cache.page_size))

    def put(pages: jax.Array, new: jax.Array) -> jax.Array:
        return pages.at[layer, page, offset].set(new.astype(pages.dtype), mode="drop")

    return PagedKVCache(k=put(cache.k, k), v=put(cache.v, v))
