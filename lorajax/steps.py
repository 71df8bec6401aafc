"""The functions that the engine jits: pure, on padded batches, with all that varies as data.

`prefill_step` runs packed prompt tokens and returns logits of the rows asked for; `decode_step` runs
one token per sequence and returns logits of every row; `score_step` takes a prefill's hidden states to
the log-probabilities of tokens that are known already.
"""

from flax import nnx
from jaxtyping import Float, Int32

from lorajax.arrays import AnyArray
from lorajax.forward_context import AttentionMetadata, ForwardContext, LoRAContext
from lorajax.kv_cache import PagedKVCache
from lorajax.logprobs import Logprobs, token_logprobs
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


@pytree_dataclass
class ScoreBatch:
    """Rows of a prefill's hidden states, the token that follows each, and its adapter slot.

    Padding repeats row 0 with token 0 and slot 0. slot: None in an engine without LoRA.
    """

    rows: Int32[AnyArray, " rows"]
    token_ids: Int32[AnyArray, " rows"]
    slot: Int32[AnyArray, " rows"] | None = None


def prefill_step(
    graphdef: nnx.GraphDef, slots: nnx.State, weights: nnx.State, kv_cache: PagedKVCache, batch: StepBatch
) -> tuple[Float[AnyArray, "rows vocab"], Float[AnyArray, "tokens d_model"], PagedKVCache]:
    """Write the KV of the batch's tokens; return the logits of `batch.logits_rows`.

    Also returns the hidden state of every token, for `score_step`.
    """
    model = nnx.merge(graphdef, slots, weights)
    ctx = batch.context()
    hidden, cache = model(batch.token_ids, kv_cache, ctx)
    assert batch.logits_rows is not None and cache is not None
    lora = None if batch.logits_slot is None else LoRAContext(slot=batch.logits_slot)
    return model.logits(hidden[batch.logits_rows], ctx.replace(lora=lora)), hidden, cache


def decode_step(
    graphdef: nnx.GraphDef, slots: nnx.State, weights: nnx.State, kv_cache: PagedKVCache, batch: StepBatch
) -> tuple[Float[AnyArray, "seqs vocab"], PagedKVCache]:
    """Write the KV of one token per sequence; return the logits that follow each."""
    model = nnx.merge(graphdef, slots, weights)
    ctx = batch.context()
    hidden, cache = model(batch.token_ids, kv_cache, ctx)
    assert cache is not None
    return model.logits(hidden, ctx), cache


def score_step(
    graphdef: nnx.GraphDef,
    slots: nnx.State,
    weights: nnx.State,
    hidden: Float[AnyArray, "tokens d_model"],
    batch: ScoreBatch,
    *,
    with_top: bool,
) -> Logprobs:
    """Log-probability of the token that is known to follow each row of a prefill.

    The logits of a few rows at a time are all that it holds of the vocabulary's size: the caller cuts a
    long prompt into several batches.
    """
    model = nnx.merge(graphdef, slots, weights)
    lora = None if batch.slot is None else LoRAContext(slot=batch.slot)
    ctx = ForwardContext(positions=batch.rows, lora=lora)
    return token_logprobs(model.logits(hidden[batch.rows], ctx), batch.token_ids, with_top=with_top)
