"""`EngineConfig`: every setting of the engine, validated once, before any memory is taken."""

import dataclasses
import typing
from typing import Literal

from lorajax.errors import ConfigError

MAX_PAGE_SIZE = 128
MIN_PAGE_SIZE = 8
PREFILL_BLOCK = 16
"""Tokens per block of a packed prefill batch: each block belongs to one request. Also the smallest
tile of a tensor core, so a larger unit would only pad more."""


@typing.no_type_check  # it checks its own fields, with errors for its users
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine; the command line has a flag of the same name for each.

    dtype: of weights, KV cache and adapters: "float32", "bfloat16", or "auto" (float32 on CPU,
        bfloat16 on GPU).
    max_model_len: longest request, prompt and output together, in tokens; None takes the model's.
    page_size: tokens per KV page, a power of two from 8 to 128.
    num_pages: KV pages; None derives them from kv_cache_bytes.
    kv_cache_bytes: memory for the KV cache; None takes 1 GiB on CPU, half of the free memory on GPU,
        and never more than max_num_seqs requests of max_model_len need.
    max_num_seqs: most requests that decode in one step.
    max_num_batched_tokens: most tokens in one step, prefill and decode together.
    enable_prefix_caching: reuse the KV of prompts that begin alike.
    max_loras: adapters on the device at once, which is also the most in one step. 0 switches LoRA off:
        no slot memory, no LoRA work, and loading an adapter is refused.
    max_lora_rank: largest rank of an adapter.
    max_cpu_loras: most adapters with a copy in host memory; the least recently used ones are read again
        from their source when a request needs them. None sets no limit.
    lora_target_modules: linears that adapters may touch ("q_proj", "lm_head", …); None allows all.
    tensor_parallel_size: devices that share the model.
    lora_row_parallel: how row-parallel linears combine their LoRA updates across devices.
    kv_events: publish what enters and leaves the prefix cache, to subscribers in this process.
    kv_events_endpoint: ZeroMQ address on which they are published too ("tcp://127.0.0.1:5557"); needs
        kv_events and the extra [events].
    max_queue: most requests waiting; one more is refused.
    seed: 0 gives requests that bring no seed fresh entropy; another number makes their draws repeat
        from run to run, in order of arrival.
    warmup: compile everything at start. Without it the first use of each batch shape compiles.
    compilation_cache_dir: where compiled programs are kept between runs; None keeps none.
    deterministic: the same request gives the same bits in any company, at a cost in speed.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    max_loras: int = 4
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_target_modules: tuple[str, ...] | None = None
    tensor_parallel_size: int = 1
    lora_row_parallel: Literal["fused", "reduce_rank"] = "fused"
    kv_events: bool = False
    kv_events_endpoint: str | None = None
    max_queue: int = 4096
    seed: int = 0
    warmup: bool = True
    compilation_cache_dir: str | None = "~/.cache/lorajax/xla"
    deterministic: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _check_choice("lora_row_parallel", self.lora_row_parallel, ("fused", "reduce_rank"))
        for name in ("enable_prefix_caching", "kv_events", "warmup", "deterministic"):
            _check_choice(name, getattr(self, name), (True, False))
        _check_integer("max_model_len", self.max_model_len, at_least=2, optional=True)
        _check_integer("page_size", self.page_size, at_least=MIN_PAGE_SIZE)
        if self.page_size > MAX_PAGE_SIZE or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size is {self.page_size}; allowed: 8, 16, 32, 64, 128")
        _check_integer("num_pages", self.num_pages, at_least=1, optional=True)
        _check_integer("kv_cache_bytes", self.kv_cache_bytes, at_least=1, optional=True)
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_pages and kv_cache_bytes are both set; allowed: one of them")
        _check_integer("max_num_seqs", self.max_num_seqs, at_least=1)
        _check_integer("max_num_batched_tokens", self.max_num_batched_tokens, at_least=1)
        if self.max_num_batched_tokens < self.max_num_seqs + PREFILL_BLOCK:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs + "
                f"{PREFILL_BLOCK} = {self.max_num_seqs + PREFILL_BLOCK}, so that a full decode batch leaves "
                "room for a prompt"
            )
        _check_integer("max_loras", self.max_loras, at_least=0)
        _check_integer("max_lora_rank", self.max_lora_rank, at_least=1)
        _check_integer("max_cpu_loras", self.max_cpu_loras, at_least=1, optional=True)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}; allowed: at least max_loras = {self.max_loras}"
            )
        targets = self.lora_target_modules
        if targets is not None and (isinstance(targets, str) or not all(isinstance(t, str) for t in targets)):
            raise ConfigError(
                f"lora_target_modules is {targets!r}; allowed: a tuple of module names, or None"
            )
        if not isinstance(self.compilation_cache_dir, (str, type(None))):
            raise ConfigError(
                f"compilation_cache_dir is {self.compilation_cache_dir!r}; allowed: a folder, or None"
            )
        _check_integer("tensor_parallel_size", self.tensor_parallel_size, at_least=1)
        endpoint = self.kv_events_endpoint
        if endpoint is not None and not (isinstance(endpoint, str) and "://" in endpoint and self.kv_events):
            raise ConfigError(
                f"kv_events_endpoint is {endpoint!r}; allowed: an address like 'tcp://127.0.0.1:5557', with "
                "kv_events=True, or None"
            )
        _check_integer("max_queue", self.max_queue, at_least=1)
        _check_integer("seed", self.seed, at_least=0)


def field_descriptions() -> dict[str, str]:
    """What the docstring says of each field, in one line: for `--help`."""
    described: dict[str, str] = {}
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    current = ""
    for line in (EngineConfig.__doc__ or "").splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name in names:
            current, described[name] = name, text
        elif current:
            described[current] += " " + line.strip()
    return {name: text.strip() for name, text in described.items()}


def _check_choice(name: str, value: object, allowed: tuple) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def _check_integer(name: str, value: object, *, at_least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        none = " or None" if optional else ""
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number of at least {at_least}{none}")
