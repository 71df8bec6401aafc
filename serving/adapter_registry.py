"""name → adapter_id: who is registered, who uses it, and when it may go.

Three identities: the name is the user's and can be reused; the adapter_id is minted at every load and
never again; the slot (see `adapter_slots`) is where an id happens to lie on the device.
Invariant: a request counts as one user of one adapter from `acquire` to its first `release`; an adapter
leaves only when it has no users. Thread-safe.
"""

import dataclasses
import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

from lorajax.errors import (
    AdapterBusy,
    AdapterCapacityError,
    AdapterExists,
    AdapterFormatError,
    AdapterNotFound,
    RequestRejected,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
MAX_ADAPTER_ID = 2**31 - 1


@dataclasses.dataclass(eq=False)
class RegisteredAdapter:
    """One version of one adapter. payload: the host copy, immutable."""

    name: str
    adapter_id: int
    payload: Any
    draining: bool = False
    users: set[str] = dataclasses.field(default_factory=set)


class AdapterRegistry:
    """Names, ids and users. max_adapters: most versions at once, draining ones included."""

    def __init__(self, *, max_adapters: int | None = None, reserved_names: frozenset[str] = frozenset()):
        self._max, self._reserved = max_adapters, reserved_names
        self._changed = threading.Condition()
        self._next_id = 1
        self._current: dict[str, RegisteredAdapter] = {}
        self._draining: dict[int, RegisteredAdapter] = {}
        self._by_id: dict[int, RegisteredAdapter] = {}  # of both

    def check_name(self, name: object) -> str:
        """The name if it may be given to an adapter; AdapterFormatError otherwise."""
        if not isinstance(name, str) or not NAME.match(name):
            shown = repr(name) if len(repr(name)) <= 60 else repr(name)[:57] + "…"
            raise AdapterFormatError(
                f"adapter name {shown}; allowed: 1 to 128 letters, digits, '.', '_' and '-', the first one a "
                "letter or digit"
            )
        if name in self._reserved:
            raise AdapterFormatError(f"adapter name {name!r} is the base model's; allowed: any other")
        return name

    def find(self, name: str) -> RegisteredAdapter | None:
        """The version that new requests would get."""
        with self._changed:
            return self._current.get(name)

    def register(self, name: str, payload: Any, *, replace: bool = False) -> RegisteredAdapter:
        """Mint an id for a loaded adapter. With `replace`, an old version drains beside the new one.

        Raises AdapterExists for a taken name, AdapterCapacityError when no more fit.
        """
        with self._changed:
            old = self._current.get(self.check_name(name))
            if old is not None and not replace:
                raise AdapterExists(
                    f"adapter {name!r} is loaded from another source; unload it, or use replace=True"
                )
            going = {*self._draining.values()} | ({old} if old is not None else set())
            num_staying = len(self._by_id) - sum(not entry.users for entry in going)
            if self._max is not None and num_staying >= self._max:
                raise AdapterCapacityError(
                    f"{num_staying} adapters are loaded; allowed: max_cpu_loras = {self._max}"
                )
            assert self._next_id <= MAX_ADAPTER_ID, "adapter ids are used up"
            entry = RegisteredAdapter(name, self._next_id, payload)
            self._next_id += 1
            if old is not None:
                self._drain(old)
            self._current[name] = self._by_id[entry.adapter_id] = entry
            return entry

    def acquire(self, name: str, request_id: str) -> RegisteredAdapter:
        """Resolve a name and count the request as a user, in one step.

        Raises AdapterNotFound, and RequestRejected for a request that is a user already: two requests
        of one id would share a single release.
        """
        with self._changed:
            entry = self._current.get(name)
            if entry is None:
                loaded = ", ".join(itertools.islice(self._current, 8)) or "none"
                raise AdapterNotFound(f"no adapter named {name!r:.80}; loaded: {loaded}")
            if request_id in entry.users:
                raise RequestRejected(f"request id {request_id!r} is in use; allowed: a new one")
            entry.users.add(request_id)
            return entry

    def release(self, adapter_id: int, request_id: str) -> None:
        """The request no longer uses the adapter. Base model, and a second call, do nothing."""
        with self._changed:
            entry = self._by_id.get(adapter_id)
            if entry is not None and request_id in entry.users:
                entry.users.remove(request_id)
                self._changed.notify_all()

    def payload(self, adapter_id: int) -> Any:
        with self._changed:
            return self._by_id[adapter_id].payload

    def start_draining(self, name: str) -> RegisteredAdapter:
        """Refuse new requests on the name from now on. Raises AdapterNotFound."""
        with self._changed:
            entry = self._current.pop(name, None)
            if entry is None:
                raise AdapterNotFound(f"no adapter named {name!r:.80}")
            self._drain(entry)
            return entry

    def _drain(self, entry: RegisteredAdapter) -> None:
        entry.draining = True
        self._draining[entry.adapter_id] = entry

    def undo_draining(self, entry: RegisteredAdapter) -> None:
        """Take new requests again, unless the name was given to another version meanwhile."""
        with self._changed:
            if entry.name not in self._current and entry.adapter_id in self._draining:
                del self._draining[entry.adapter_id]
                entry.draining = False
                self._current[entry.name] = entry

    def wait_drained(self, entry: RegisteredAdapter, timeout: int | float | None) -> None:
        """Wait until a draining adapter has no users.

        After `timeout` seconds it takes new requests again, and AdapterBusy is raised.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not entry.users, timeout):
                self.undo_draining(entry)
                raise AdapterBusy(f"{len(entry.users)} requests still run on adapter {entry.name!r}")

    def drained(self) -> list[RegisteredAdapter]:
        """Versions that were unloaded or replaced and that nobody uses any more."""
        with self._changed:
            return [entry for entry in self._draining.values() if not entry.users]

    def remove(self, entry: RegisteredAdapter) -> None:
        """Forget a drained adapter; doing so again does nothing. It must have no users."""
        with self._changed:
            assert entry.draining and not entry.users, f"adapter {entry.name!r} is removed while in use"
            self._draining.pop(entry.adapter_id, None)
            self._by_id.pop(entry.adapter_id, None)

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        with self._changed:
            return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        with self._changed:
            return len(self._by_id)

    def check_invariants(self) -> None:
        with self._changed:
            for name, entry in self._current.items():
                assert entry.name == name
                assert not entry.draining
            versions = [*self._current.values(), *self._draining.values()]
            assert {entry.adapter_id: entry for entry in versions} == self._by_id
            assert len(versions) == len(self._by_id)
            assert all(entry.draining for entry in self._draining.values())
            assert all(0 < adapter_id < self._next_id for adapter_id in self._by_id)
