"""The functions that the engine jits: pure, on padded batches, with all that varies as data.

`prefill_step` runs packed prompt tokens and returns logits of the rows asked for; `decode_step` runs
one token per sequence and returns logits of every row.
"""

from flax import nnx
from jaxtyping import Float, Int32

from lorajax.arrays import AnyArray
from lorajax.forward_context import AttentionMetadata, ForwardContext, LoRAContext
from lorajax.kv_cache import PagedKVCache
from lorajax.pytree import pytree_dataclass


@pytree_dataclass
class StepBatch:
    """One padded batch. Padding tokens have position -1, slot 0 and a write index out of range.

    slot: adapter slot per block; None in an engine without LoRA.
    logits_rows: tokens whose logits a prefill returns; padding repeats row 0.
    logits_slot: adapter slot of those rows.
    """

    token_ids: Int32[AnyArray, " tokens"]
    positions: Int32[AnyArray, " tokens"]
    write_index: Int32[AnyArray, " tokens"]
    block_seq: Int32[AnyArray, " blocks"]
    page_table: Int32[AnyArray, "seqs max_pages"]
    slot: Int32[AnyArray, " blocks"] | None = None
    logits_rows: Int32[AnyArray, " rows"] | None = None
    logits_slot: Int32[AnyArray, " rows"] | None = None

    def context(self) -> ForwardContext:
        return ForwardContext(
            positions=self.positions,
            attention=AttentionMetadata(
                write_index=self.write_index, block_seq=self.block_seq, page_table=self.page_table
            ),
            lora=None if self.slot is None else LoRAContext(slot=self.slot),
        )


def prefill_step(
    graphdef: nnx.GraphDef, slots: nnx.State, weights: nnx.State, kv_cache: PagedKVCache, batch: StepBatch
) -> tuple[Float[AnyArray, "rows vocab"], PagedKVCache]:
    """Write the KV of the batch's tokens; return the logits of `batch.logits_rows`."""
    model = nnx.merge(graphdef, slots, weights)
    ctx = batch.context()
    hidden, cache = model(batch.token_ids, kv_cache, ctx)
    assert batch.logits_rows is not None and cache is not None
    lora = None if batch.logits_slot is None else LoRAContext(slot=batch.logits_slot)
    return model.logits(hidden[batch.logits_rows], ctx.replace(lora=lora)), cache


def decode_step(
    graphdef: nnx.GraphDef, slots: nnx.State, weights: nnx.State, kv_cache: PagedKVCache, batch: StepBatch
) -> tuple[Float[AnyArray, "seqs vocab"], PagedKVCache]:
    """Write the KV of one token per sequence; return the logits that follow each."""
    model = nnx.merge(graphdef, slots, weights)
    ctx = batch.context()
    hidden, cache = model(batch.token_ids, kv_cache, ctx)
    assert cache is not None
    return model.logits(hidden, ctx), cache
