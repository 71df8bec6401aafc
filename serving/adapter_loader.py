"""Loading, replacing, blending and unloading adapters while the engine serves.

Reading, validating and packing happen on the caller's thread; the registry is told last, so a failed
load leaves no trace. The engine's thread only ever sees whole adapters that are ready to be written
to a slot.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from lorajax.config import ModelConfig
from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterFormatError,
    ConfigError,
    RequestRejected,
)
from lorajax.lora.blend import blend_adapters
from lorajax.lora.source import AdapterSource, read_adapter
from lorajax.lora.weights import AdapterWeights
from serving.adapter_registry import AdapterRegistry, RegisteredAdapter
from serving.config import EngineConfig
from serving.host_tier import HostAdapter, HostTier
from serving.model_runner import ModelRunner
from serving.outputs import AdapterStatus
from serving.scheduler import Scheduler

logger = logging.getLogger("lorajax.adapters")


class _NameLock:
    """Lives as long as a load of its name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class AdapterLoader:
    """The adapters of one engine. `load`, `blend` and `unload` may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        registry: AdapterRegistry,
        runner: ModelRunner,
        scheduler: Scheduler,
        dtype: jnp.dtype,
        chat_template: str | None = None,
    ):
        self._config, self._model, self.registry = config, model, registry
        self._runner, self._scheduler, self._dtype = runner, scheduler, dtype
        self._chat_template = chat_template
        self._host = HostTier(config.max_cpu_loras)
        self._names = threading.Lock()  # guards _loading
        self._loading: weakref.WeakValueDictionary[str, _NameLock] = weakref.WeakValueDictionary()

    @property
    def model_name(self) -> str:
        """The base model's."""
        return self._model.name

    def load(
        self,
        name: str,
        source: AdapterSource,
        *,
        pinned: bool = False,
        replace: bool = False,
        roots: Collection[str | Path] | None = None,
    ) -> AdapterStatus:
        """See `LLM.load_adapter`."""
        self.registry.check_name(name)
        if pinned:
            self._check_pins()
        source = _canonical(source)
        with self._one_at_a_time(name):
            old = self.registry.find(name)
            if old is not None and not replace and _same(old.payload.source, source):
                return self._status(old)
            if old is not None and not replace:
                raise AdapterExists(
                    f"adapter {name!r} is loaded from another source; unload it, or use replace=True"
                )
            reread = None if isinstance(source, AdapterWeights) else lambda: self._read(name, source, roots)
            self._host.check_room(can_be_reread=reread is not None)
            weights, packed = self._read(name, source, roots)
            host = HostAdapter(name, weights, packed, source=source, pinned=pinned, reread=reread)
            return self._register(name, host, replace=replace)

    def acquire(self, name: str, request_id: str) -> RegisteredAdapter:
        """Resolve a name for a request, which then counts as a user, and make sure of the host copy.

        Raises AdapterNotFound; AdapterFormatError if the copy was dropped and cannot be read again.
        """
        entry = self.registry.acquire(name, request_id)
        try:
            self._host.hold(entry.adapter_id, entry.payload, lambda: bool(entry.users))
        except BaseException:
            self.registry.release(entry.adapter_id, request_id)
            raise
        return entry

    def release(self, adapter_id: int, request_id: str) -> None:
        """The request has ended; its adapter's copy may now go. Safe to call twice."""
        self.registry.release(adapter_id, request_id)
        self._host.trim()

    def blend(self, name: str, weights: Mapping[str, int | float]) -> AdapterStatus:
        """See `LLM.blend_adapters`."""
        self.registry.check_name(name)
        with self._one_at_a_time(name), contextlib.ExitStack() as held:
            parts = []
            for part, weight in weights.items():
                user = f"blend of {name} {len(parts)}"
                entry = self.acquire(part, user)
                held.callback(self.release, entry.adapter_id, user)
                parts.append((entry.payload.weights, float(weight)))
            self._host.check_room(can_be_reread=False)
            blended = blend_adapters(parts)
            self._check_capacity(blended)
            source = "blend of " + ", ".join(f"{weight:g} · {part}" for part, weight in weights.items())
            packed = self._runner.pack(blended)
            host = HostAdapter(name, blended, packed, source=source, pinned=False, reread=None)
            return self._register(name, host, replace=False)

    def unload(
        self, name: str, on_engine: Callable[[Callable[[], Any]], Any], *, timeout: int | float | None
    ) -> int:
        """See `LLM.unload_adapter`. on_engine: runs a function on the engine's thread."""
        _check_timeout(timeout)
        entry = self.registry.start_draining(name)
        num_users = len(entry.users)
        try:
            self.registry.wait_drained(entry, timeout)
        except AdapterBusy:
            self.registry.undo_draining(entry)
            raise
        on_engine(self.collect_drained)
        return num_users

    def packed(self, adapter_id: int) -> nnx.State:
        """An adapter in use, as a slot's content."""
        packed = self.registry.payload(adapter_id).packed
        assert packed is not None, f"adapter {adapter_id} is scheduled without a host copy"
        return packed

    # ---- the engine's thread ----

    def collect_drained(self) -> None:
        """Free slot, cached pages and host copy of every version that is gone and has no users."""
        for entry in self.registry.drained():
            self._scheduler.slots.drop(entry.adapter_id)
            self._scheduler.cache.drop_adapter(entry.adapter_id)
            self._host.drop(entry.adapter_id)
            self.registry.remove(entry)

    def statuses(self) -> list[AdapterStatus]:
        return [self._status(entry) for entry in self.registry]

    # ---- reading ----

    def _read(
        self, name: str, source: AdapterSource, roots: Collection[str | Path] | None
    ) -> tuple[AdapterWeights, nnx.State]:
        """Read, check and pack: all host work of a load."""
        if not self._config.max_loras:
            raise ConfigError(
                "max_loras is 0, which switches LoRA off; allowed: 1 or more, to load an adapter"
            )
        try:
            weights = read_adapter(
                source,
                self._model,
                dtype=self._dtype,
                max_rank=self._config.max_lora_rank,
                target_modules=self._config.lora_target_modules,
                experts=False,
                base_weight=self._runner.base_weight,
                base_chat_template=self._chat_template,
                roots=roots,
                warn=lambda text: logger.warning("adapter %r: %s", name, text),
            )
        except (AdapterFormatError, AdapterCapacityError) as error:
            raise type(error)(f"adapter {name!r}: {error}") from error
        return weights, self._runner.pack(weights)

    def _check_pins(self) -> None:
        """One slot at least must be left for the adapters that are not pinned."""
        pinned = sum(entry.payload.pinned for entry in self.registry if not entry.draining)
        if pinned >= self._config.max_loras - 1:
            raise AdapterCapacityError(
                f"{pinned} adapters are pinned; allowed: max_loras - 1 = {self._config.max_loras - 1}"
            )

    def _check_capacity(self, weights: AdapterWeights) -> None:
        if weights.rank > self._config.max_lora_rank:
            raise AdapterCapacityError(
                f"rank {weights.rank}; allowed: max_lora_rank = {self._config.max_lora_rank}"
            )

    def _register(self, name: str, host: HostAdapter, *, replace: bool) -> AdapterStatus:
        entry = self.registry.register(name, host, replace=replace)
        if host.pinned:
            self._scheduler.slots.keep(entry.adapter_id)
        self._host.add(entry.adapter_id, host, lambda: bool(entry.users))
        return self._status(entry)

    @contextlib.contextmanager
    def _one_at_a_time(self, name: str) -> Iterator[None]:
        """Loads of one name follow one another; those of other names do not wait."""
        with self._names:
            lock = self._loading.setdefault(name, _NameLock())
        with lock.lock:
            yield

    def _status(self, entry: RegisteredAdapter) -> AdapterStatus:
        host, slots = entry.payload, self._scheduler.slots
        resident = slots.is_resident(entry.adapter_id)
        running = {r.group_id for r in list(self._scheduler.running) if r.adapter_id == entry.adapter_id}
        return AdapterStatus(
            name=entry.name,
            adapter_id=entry.adapter_id,
            rank=host.rank,
            target_modules=host.target_modules,
            num_parameters=host.num_parameters,
            state="draining" if entry.draining else "resident" if resident else "host",
            num_running=len(running),
            num_waiting=len(entry.users - running),
            pinned=host.pinned,
            source=host.source if isinstance(host.source, str) else "memory",
        )


def _canonical(source: AdapterSource) -> AdapterSource:
    """Paths by what they resolve to, so that two spellings are the same source."""
    if not isinstance(source, (str, Path)):
        return source
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else str(source)


def _same(old: object, new: object) -> bool:
    return old is new or (isinstance(old, str) and old == new)


def _check_timeout(timeout: int | float | None) -> None:
    if timeout is not None and not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise RequestRejected(f"timeout is {timeout:g}; allowed: seconds from 0 on, or None")
