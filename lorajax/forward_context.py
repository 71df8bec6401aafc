"""What a forward pass hands to every layer: pytrees of small integer arrays, no weights.

Tokens are packed: one axis `tokens` holds the tokens of all requests. The axis is cut into `blocks`
of equal length, and every block belongs to one request (so to one adapter, and to one page table).
A decode batch has one token per block; a prefill batch is packed by the host in blocks of several.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Float, Int32

from lorajax.arrays import AnyArray
from lorajax.pytree import pytree_dataclass, static_field


@pytree_dataclass
class AttentionMetadata:
    """Where the tokens of a batch write and read their keys and values.

    write_index: cell of the page pool, page_id * page_size + offset; out of range for padding.
    block_seq: row of `page_table` to which each block of tokens belongs.
    page_table: the pages of each sequence in order; unused entries are 0 and never read.
    """

    write_index: Int32[AnyArray, " tokens"]
    block_seq: Int32[AnyArray, " blocks"]
    page_table: Int32[AnyArray, "seqs max_pages"]


@pytree_dataclass
class LoRAContext:
    """The adapter slot of each block of tokens. Slot 0 is the base model and padding."""

    slot: Int32[AnyArray, " blocks"]


@pytree_dataclass
class ForwardContext:
    """All that a layer needs beside its input.

    positions: absolute position of each token in its sequence; -1 for padding.
    attention: None in a forward pass without a KV cache, where the tokens are `num_sequences`
        whole sequences of equal length, one after another.
    lora: None if no adapter takes part: the wrappers then do no work at all.
    rotary: cos and sin of the positions, [tokens, head_dim / 2]; set once by the decoder.
    layer: index of the running layer, set by the decoder's scan; selects the layer's adapter and KV.
    """

    positions: Int32[AnyArray, " tokens"]
    attention: AttentionMetadata | None = None
    lora: LoRAContext | None = None
    rotary: tuple[Float[AnyArray, "tokens half"], Float[AnyArray, "tokens half"]] | None = None
    layer: Int32[AnyArray, ""] | None = None
    num_sequences: int = static_field(default=1)

    def replace(self, **changes) -> "ForwardContext":
        return dataclasses.replace(self, **changes)


def dense_context(num_sequences: int, length: int, lora: LoRAContext | None = None) -> ForwardContext:
    """Context of `num_sequences` whole sequences of `length` tokens, attended without a cache."""
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_sequences)
    return ForwardContext(positions=positions, lora=lora, num_sequences=num_sequences)
