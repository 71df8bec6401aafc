"""`ScheduledBatch`: what one step of the engine runs, as requests and counts."""

import dataclasses

from serving.adapter_slots import SlotWrite
from serving.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + num_tokens) of a request.

    samples: they reach its last known token, so the next one is drawn (if the request wants any).
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclasses.dataclass(kw_only=True)
class ScheduledBatch:
    """What one step runs. slot_writes come first; ended: requests whose deadline has passed."""

    decodes: list[Request] = dataclasses.field(default_factory=list)
    prefills: list[PrefillChunk] = dataclasses.field(default_factory=list)
    slot_writes: list[SlotWrite] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    ended: list[Request] = dataclasses.field(default_factory=list)
