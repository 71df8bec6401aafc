"""Owns the device: weights, adapter slots, KV cache, and the compiled programs that run on them.

Invariant: after `warm_up` every call finds its program compiled; a program is only ever called with
the shapes it was compiled for, so nothing can compile behind the engine's back.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lorajax.kv_cache import init_kv_cache
from lorajax.lora.slots import LoRASlot, pack_adapter, write_slot
from lorajax.lora.targets import adapter_targets
from lorajax.lora.weights import AdapterWeights
from lorajax.models.decoder import Decoder
from lorajax.sampler import SamplerOutput, SamplingInputs, sample
from lorajax.steps import StepBatch, decode_step, prefill_step
from serving.batch_builder import BatchBuilder, PaddedBatch, sampling_rows

COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program does, and for which shape."""

    kind: str
    size: int = 0
    draws: bool = False
    with_logprobs: bool = False


class ModelRunner:
    """Runs padded batches on one model. Used by the engine's step thread alone."""

    def __init__(self, model: Decoder, builder: BatchBuilder, *, kv_dtype: jnp.dtype):
        self._config, self._builder = model.config, builder
        self._targets = adapter_targets(model.config)
        self._graphdef, self._slots, self._weights = nnx.split(model, LoRASlot, ...)
        self._kv_cache = init_kv_cache(model.config, builder.num_pages, builder.page_size, kv_dtype)
        self._slot_shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._slots)
        self._programs: dict[Program, Callable] = {}

    # ---- running ----

    def execute(self, batch: PaddedBatch) -> SamplerOutput:
        """Run one batch and sample its rows. Returns device arrays that may still be in flight."""
        return self.sample(self.logits(batch), batch)

    def logits(self, batch: PaddedBatch) -> Float[Array, "rows vocab"]:
        """Write the KV of the batch's tokens; return the logits of its rows."""
        kind = "decode" if batch.logits_rows is None else "prefill"
        step = self._program(Program(kind, len(batch.token_ids)))
        logits, self._kv_cache = step(self._slots, self._weights, self._kv_cache, _step_batch(batch))
        return logits

    def sample(self, logits: Float[Array, "rows vocab"], batch: PaddedBatch) -> SamplerOutput:
        """Draw a token from every row of logits with the batch's settings."""
        draws = batch.sampling is not None
        inputs = SamplingInputs(**vars(batch.sampling)) if batch.sampling is not None else None
        return self._program(Program("sample", logits.shape[0], draws, batch.with_logprobs))(logits, inputs)

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
        for rows in buckets.decode_rows:
            for draws in (False, True):
                yield from (Program("sample", rows, draws, logprobs) for logprobs in (False, True))
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
        if program.kind == "sample":
            return self._lower_sample(program)
        if program.kind == "write_slot":
            adapter = jax.tree.map(
                lambda rows: jax.ShapeDtypeStruct((rows.shape[0], *rows.shape[2:]), rows.dtype), self._slots
            )
            # donated: the slots are overwritten in place
            return jax.jit(write_slot, donate_argnums=0).lower(self._slots, adapter, np.int32(0))
        if program.kind == "decode":
            step, batch = decode_step, self._builder.empty_decode(program.size)
        else:
            step, batch = prefill_step, self._builder.empty_prefill(program.size)
        # donated: the KV cache is written in place
        jitted = jax.jit(functools.partial(step, self._graphdef), donate_argnums=2)
        return jitted.lower(self._slots, self._weights, self._kv_cache, _step_batch(batch))

    def _lower_sample(self, program: Program) -> jax.stages.Lowered:
        rows = program.size
        logits = jax.ShapeDtypeStruct((rows, self._config.vocab_size), jnp.float32)

        inputs = SamplingInputs(**vars(sampling_rows([], rows))) if program.draws else None
        jitted = jax.jit(functools.partial(sample, with_logprobs=program.with_logprobs))
        return jitted.lower(logits, inputs)


def _step_batch(batch: PaddedBatch) -> StepBatch:
    return StepBatch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(StepBatch)})
