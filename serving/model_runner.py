"""Owns the device: weights, adapter slots, KV cache, and the compiled programs that run on them.

Invariant: after `warm_up` every call finds its program compiled; a program is only ever called with
the shapes it was compiled for, so nothing can compile behind the engine's back.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from lorajax.kv_cache import init_kv_cache
from lorajax.logits_adjustment import LogitsAdjustment, adjust
from lorajax.logprobs import Logprobs, token_logprobs
from lorajax.lora.slots import LoRASlot, pack_adapter, write_slot
from lorajax.lora.targets import adapter_targets
from lorajax.lora.weights import AdapterWeights
from lorajax.models.decoder import Decoder
from lorajax.sampler import SamplingInputs, sample
from lorajax.steps import ScoreBatch, StepBatch, decode_step, prefill_step, score_step
from serving.batch_builder import BatchBuilder, PaddedBatch, ScoreRows, sampling_rows
from serving.request_adjustment import adjustment_rows

COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program does, and for which shape.

    full: with all that the kind can do: "sample" draws (else it takes the best tokens), "adjust" has bias
    and penalties (else masks and repetition alone), "score" gives the best tokens too.
    """

    kind: Literal["decode", "prefill", "sample", "adjust", "logprobs", "score", "write_slot"]
    size: int = 0
    full: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Device arrays of one batch, perhaps still in flight.

    token_ids: sampled, one per row of logits. logprobs: theirs; None if not asked for.
    prompt_logprobs: of the batch's scored rows, a few rows each.
    """

    token_ids: Int32[Array, " rows"]
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]


class ModelRunner:
    """Runs padded batches on one model. Used by the engine's step thread alone."""

    def __init__(self, model: Decoder, builder: BatchBuilder, *, kv_dtype: jnp.dtype):
        self._config, self._builder = model.config, builder
        self._targets = adapter_targets(model.config)
        self._graphdef, self._slots, self._weights = nnx.split(model, LoRASlot, ...)
        self._kv_cache = init_kv_cache(model.config, builder.num_pages, builder.page_size, kv_dtype)
        self._slot_shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._slots)
        self._dtype = model.embed_tokens.weight[...].dtype
        self._programs: dict[Program, Callable] = {}

    # ---- running ----

    def execute(self, batch: PaddedBatch) -> StepOutput:
        """Run one batch, sample its rows and score its prompt tokens. Does not wait for the device."""
        logits, hidden = self._run(batch)
        token_ids = self.sample(logits, batch)
        logprobs = None
        if batch.with_logprobs:
            logprobs = self._program(Program("logprobs", logits.shape[0]))(logits, token_ids)
        scores = [] if batch.scored is None else self._score(hidden, batch.scored)
        return StepOutput(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=scores)

    def logits(self, batch: PaddedBatch) -> Float[Array, "rows vocab"]:
        """Write the KV of the batch's tokens; return the logits of its rows."""
        return self._run(batch)[0]

    def sample(self, logits: Float[Array, "rows vocab"], batch: PaddedBatch) -> Int32[Array, " rows"]:
        """Draw a token from every row of logits with the settings of the batch's requests.

        What adjusts the logits is read here, after the step was dispatched: the host may prepare it while
        the device computes them.
        """
        rows = logits.shape[0]
        adjustments = [request.adjustment for request in batch.sampled]
        if any(adjustments):
            dense = any(a is not None and a.dense for a in adjustments)
            for request in batch.sampled:
                if request.adjustment is not None:
                    request.adjustment.advance(request.output_token_ids)
            by = adjustment_rows(adjustments, rows, self._config.vocab_size, dense=dense)
            logits = self._program(Program("adjust", rows, dense))(logits, LogitsAdjustment(**vars(by)))
        draws = batch.sampling is not None
        inputs = SamplingInputs(**vars(batch.sampling)) if batch.sampling is not None else None
        return self._program(Program("sample", rows, draws))(logits, inputs)

    def _run(self, batch: PaddedBatch) -> tuple[Array, Array | None]:
        """Logits of the batch's rows, and a prefill's hidden states."""
        size = len(batch.token_ids)
        args = self._slots, self._weights, self._kv_cache, _step_batch(batch)
        if batch.logits_rows is None:
            logits, self._kv_cache = self._program(Program("decode", size))(*args)
            return logits, None
        logits, hidden, self._kv_cache = self._program(Program("prefill", size))(*args)
        return logits, hidden

    def _score(self, hidden: Array | None, scored: ScoreRows) -> list[Logprobs]:
        assert hidden is not None  # only prefills have rows to score
        size = self._builder.buckets.score_rows_for(len(hidden))
        program = self._program(Program("score", len(hidden), scored.with_top))
        return [program(self._slots, self._weights, hidden, batch) for batch in _score_batches(scored, size)]

    def pack(self, weights: AdapterWeights) -> nnx.State:
        """Host work of a slot write, free of the device: may run on any thread."""
        return pack_adapter(weights, self._slot_shapes, self._targets)

    def base_weight(self, name: str) -> np.ndarray:
        """The base's own weight of `embed_tokens` or `lm_head`, [vocab, d_model], on the host."""
        model = nnx.merge(self._graphdef, self._slot_shapes, self._weights)
        weight = model.lm_head.weight if name == "lm_head" else None
        return np.asarray((model.embed_tokens.weight if weight is None else weight)[...])

    def write_slot(self, slot: int, packed: nnx.State) -> None:
        """Overwrite a device slot as a whole. Steps already dispatched read the old content."""
        self._slots = self._program(Program("write_slot"))(self._slots, packed, np.int32(slot))

    def close(self) -> None:
        """Drop the arrays and programs; the runner can do nothing afterwards."""
        self._slots = self._weights = self._kv_cache = None
        self._programs.clear()

    # ---- compiling ----

    def programs(self) -> Iterator[Program]:
        """Every program that serving can ask for."""
        buckets = self._builder.buckets
        yield from (Program("decode", rows) for rows in buckets.decode_rows)
        yield from (Program("prefill", tokens) for tokens in buckets.prefill_tokens)
        for full in (False, True):
            yield from (Program("sample", rows, full) for rows in buckets.decode_rows)
            yield from (Program("adjust", rows, full) for rows in buckets.decode_rows)
            yield from (Program("score", tokens, full) for tokens in buckets.prefill_tokens)
        yield from (Program("logprobs", rows) for rows in buckets.decode_rows)
        if self._builder.lora:
            yield Program("write_slot")

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile all programs. progress: called with (compiled, in all)."""
        wanted = [program for program in self.programs() if program not in self._programs]
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            compiled = pool.map(lambda lowered: lowered.compile(), map(self._lower, wanted))
            for count, (program, executable) in enumerate(zip(wanted, compiled, strict=True), start=1):
                self._programs[program] = executable
                if progress is not None:
                    progress(count, len(wanted))

    def _program(self, program: Program) -> Callable:
        if program not in self._programs:
            self._programs[program] = self._lower(program).compile()
        return self._programs[program]

    def _lower(self, program: Program) -> jax.stages.Lowered:
        match program.kind:
            case "decode" | "prefill":
                return self._lower_step(program)
            case "score":
                return self._lower_score(program)
            case "write_slot":
                adapter = jax.tree.map(
                    lambda rows: jax.ShapeDtypeStruct((rows.shape[0], *rows.shape[2:]), rows.dtype),
                    self._slots,
                )
                # donated: the slots are overwritten in place
                return jax.jit(write_slot, donate_argnums=0).lower(self._slots, adapter, np.int32(0))
        rows = program.size
        logits = jax.ShapeDtypeStruct((rows, self._config.vocab_size), jnp.float32)
        match program.kind:
            case "sample":
                inputs = SamplingInputs(**vars(sampling_rows([], rows))) if program.full else None
                return jax.jit(sample).lower(logits, inputs)
            case "adjust":
                by = adjustment_rows([], rows, self._config.vocab_size, dense=program.full)
                return jax.jit(adjust).lower(logits, LogitsAdjustment(**vars(by)))
            case "logprobs":
                token_ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
                jitted = jax.jit(functools.partial(token_logprobs, with_top=True))
                return jitted.lower(logits, token_ids)

    def _lower_step(self, program: Program) -> jax.stages.Lowered:
        if program.kind == "decode":
            step, batch = decode_step, self._builder.empty_decode(program.size)
        else:
            step, batch = prefill_step, self._builder.empty_prefill(program.size)
        # donated: the KV cache is written in place
        jitted = jax.jit(functools.partial(step, self._graphdef), donate_argnums=2)
        return jitted.lower(self._slots, self._weights, self._kv_cache, _step_batch(batch))

    def _lower_score(self, program: Program) -> jax.stages.Lowered:
        shape = (program.size, self._config.hidden_size)
        hidden = jax.ShapeDtypeStruct(shape, self._dtype)
        scored = self._builder.score_rows([], program.size)
        (batch,) = _score_batches(scored, len(scored.rows))
        jitted = jax.jit(functools.partial(score_step, self._graphdef, with_top=program.full))
        return jitted.lower(self._slots, self._weights, hidden, batch)


def _step_batch(batch: PaddedBatch) -> StepBatch:
    return StepBatch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(StepBatch)})


def _score_batches(scored: ScoreRows, size: int) -> list[ScoreBatch]:
    """Its rows, so many at a time."""
    names = [field.name for field in dataclasses.fields(ScoreBatch)]
    columns = {name: getattr(scored, name) for name in names if getattr(scored, name) is not None}
    return [
        ScoreBatch(**{name: column[start : start + size] for name, column in columns.items()})
        for start in range(0, len(scored.rows), size)
    ]
