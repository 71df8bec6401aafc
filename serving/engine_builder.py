"""From a checkpoint and an `EngineConfig` to a warm `LLMEngine`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from lorajax.checkpoints import open_checkpoint
from lorajax.config import ModelConfig
from lorajax.errors import CheckpointError, ConfigError
from lorajax.kv_cache import kv_cache_bytes_per_page
from lorajax.load import resolve_dtype
from lorajax.lora.add_lora import add_lora
from lorajax.lora.slots import LoRAConfig
from lorajax.lora.targets import adapter_targets
from lorajax.models.loading import load_weights
from lorajax.tokenizer import Tokenizer
from serving.adapter_loader import AdapterLoader
from serving.adapter_registry import AdapterRegistry
from serving.adapter_slots import AdapterSlots
from serving.batch_builder import BatchBuilder
from serving.buckets import make_buckets
from serving.config import PREFILL_BLOCK, EngineConfig
from serving.engine import LLMEngine
from serving.kv_events import KvEventStream
from serving.model_runner import ModelRunner
from serving.page_pool import PagePool
from serving.prefix_cache import PrefixCache
from serving.scheduler import Scheduler, SchedulerConfig

CPU_KV_CACHE_BYTES = 1 << 30
GPU_SHARE_OF_FREE_MEMORY = 0.5


def build_engine(
    source: str | Path, config: EngineConfig, *, tokenizer: Tokenizer | None = None, progress: bool = True
) -> LLMEngine:
    """Load, wrap, allocate and warm up. progress: show bars where there is a terminal or notebook."""
    _refuse_unserved(config)
    if config.compilation_cache_dir is not None:
        use_compilation_cache(config.compilation_cache_dir)
    checkpoint = open_checkpoint(source)
    dtype = resolve_dtype(config.dtype)
    with _Bar("weights", shown=progress) as bar:
        model = load_weights(checkpoint.config, checkpoint.tensors, dtype=dtype, progress=bar)
    if config.max_loras:
        targets = None if config.lora_target_modules is None else frozenset(config.lora_target_modules)
        known = {path.rpartition(".")[2] for path in adapter_targets(checkpoint.config)}
        if targets is not None and not targets <= known:
            raise ConfigError(
                f"lora_target_modules has {sorted(targets - known)}; allowed: {', '.join(sorted(known))}"
            )
        add_lora(
            model,
            LoRAConfig(num_slots=config.max_loras + 1, max_rank=config.max_lora_rank, target_modules=targets),
        )
    if tokenizer is None:
        tokenizer = _tokenizer_or_none(checkpoint.load_tokenizer)
    max_model_len = _max_model_len(config, checkpoint.config)
    num_pages = _num_pages(config, checkpoint.config, max_model_len, dtype)
    builder = BatchBuilder(
        buckets=make_buckets(
            config.max_num_seqs, config.max_num_batched_tokens, deterministic=config.deterministic
        ),
        page_size=config.page_size,
        num_pages=num_pages,
        max_pages=-(-max_model_len // config.page_size),
        lora=config.max_loras > 0,
    )
    runner = ModelRunner(model, builder, kv_dtype=dtype)
    events = KvEventStream()
    publisher = _publisher(config, events)
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, config.page_size, events, enabled=config.enable_prefix_caching)
    slots = AdapterSlots(config.max_loras)
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=config.page_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_loras=config.max_loras,
            max_queue=config.max_queue,
            prefill_block=PREFILL_BLOCK,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        pool=pool,
        cache=cache,
        slots=slots,
    )
    registry = AdapterRegistry(reserved_names=frozenset({checkpoint.config.name}))
    adapters = AdapterLoader(
        config,
        checkpoint.config,
        registry=registry,
        runner=runner,
        scheduler=scheduler,
        dtype=dtype,
        chat_template=None if tokenizer is None else tokenizer.chat_template,
    )
    declared = tokenizer.eos_token_ids if tokenizer is not None else ()
    if config.warmup:
        with _Bar("compiling", shown=progress) as bar:
            runner.warm_up(bar)
    return LLMEngine(
        config=config,
        runner=runner,
        builder=builder,
        scheduler=scheduler,
        adapters=adapters,
        events=events,
        publisher=publisher,
        tokenizer=tokenizer,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*checkpoint.config.eos_token_ids, *declared))),
        max_model_len=max_model_len,
    )


def _publisher(config: EngineConfig, events: KvEventStream) -> Any:
    """A subscriber that sends every event over ZeroMQ, if one is configured."""
    if config.kv_events_endpoint is None:
        return None
    try:
        from serving.kv_publisher import KvEventPublisher  # the extra [events]
    except ImportError as error:
        raise ConfigError(f"kv_events_endpoint needs `pip install lorajax[events]` ({error})") from error
    publisher = KvEventPublisher(config.kv_events_endpoint)
    events.subscribe(publisher.publish)
    return publisher


def use_compilation_cache(folder: str) -> None:
    """Keep compiled programs in `folder` between runs. A setting of JAX, hence of the whole process."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _refuse_unserved(config: EngineConfig) -> None:
    """Settings that are not served yet are refused, never ignored."""
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}; served so far: 1")
    if config.lora_row_parallel != "fused":
        raise ConfigError(f"lora_row_parallel is {config.lora_row_parallel!r}; served so far: 'fused'")


def _tokenizer_or_none(load_tokenizer: Callable[[], Tokenizer]) -> Tokenizer | None:
    """A checkpoint without a tokenizer is served on token ids."""
    try:
        return load_tokenizer()
    except CheckpointError as error:
        print(f"lorajax: {error}; prompts must be token ids", file=sys.stderr)
        return None


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}; allowed: the model's {longest} at most")
    return config.max_model_len or longest


def _num_pages(config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: jnp.dtype) -> int:
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = kv_cache_bytes_per_page(model, config.page_size, dtype)
    needed = config.max_num_seqs * -(-max_model_len // config.page_size)
    if config.kv_cache_bytes is not None:
        pages = config.kv_cache_bytes // page_bytes
        if pages < 1:
            raise ConfigError(
                f"kv_cache_bytes is {config.kv_cache_bytes}; allowed: at least one page, {page_bytes}"
            )
        return min(pages, needed)
    return max(1, min(_default_kv_cache_bytes() // page_bytes, needed))


def _default_kv_cache_bytes() -> int:
    memory = jax.local_devices()[0].memory_stats()
    if not memory or jax.default_backend() == "cpu":
        return CPU_KV_CACHE_BYTES
    return int((memory["bytes_limit"] - memory["bytes_in_use"]) * GPU_SHARE_OF_FREE_MEMORY)


class _Bar:
    """A progress bar, called with (done, in all); hidden where nobody watches."""

    def __init__(self, what: str, *, shown: bool):
        self._bar = tqdm(desc=what, disable=None if shown else True, leave=False)

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
