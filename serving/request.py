"""`Request`: one sequence on its way through the scheduler. A request with n > 1 is n of them."""

import dataclasses
import enum

import numpy as np

from serving.block_hash import NamespaceKeys
from serving.request_adjustment import RequestAdjustment
from serving.sampling_params import SamplingParams

Order = tuple[int, int]

NO_PAGES = np.empty(0, np.int32)


class RequestStatus(enum.Enum):
    """WAITING: queued, or preempted. RUNNING: holds pages and a slot. FINISHED: holds nothing."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended; the values are those of `CompletionOutput.finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence. The scheduler changes it; others read it.

    Lengths, in tokens:   [ prompt ............ | output ......... ]
                          [ cached | computed ....... | scheduled ]
        num_cached_tokens <= num_computed_tokens <= num_tokens; KV exists for the computed ones.

    request_id: unique among live requests. group_id: of the request as the user made it, shared by
    its n children. leader: the first child, with the same prompt, adapter and salt, whose prompt pages the
    others reuse; None for itself. priority: lower runs earlier. max_tokens: 0 computes the prompt and
    samples nothing. eos_token_ids: ids that end it; empty with ignore_eos. seed: 64 bits, fixed at
    creation. deadline: in the scheduler's clock, seconds.
    adjustment: what it does to its logits before a draw; None for nothing. score_from: the first prompt
    token whose log-probability is wanted, at least 1; None for none.
    page_row: page_ids as a row of a batch's page table, zeros behind them; empty when it does not run.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    group_id: str = ""
    child_index: int = 0
    leader: "Request | None" = None
    adapter_id: int = 0
    adapter_name: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    adjustment: RequestAdjustment | None = None
    score_from: int | None = None
    max_tokens: int = 16
    seed: int = 0
    deadline: float | None = None

    # from here on: the scheduler's
    arrival: int = -1
    namespace_keys: NamespaceKeys = ()
    end_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    page_ids: list[int] = dataclasses.field(default_factory=list)
    page_row: np.ndarray = dataclasses.field(default_factory=lambda: NO_PAGES)
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    slot: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prompt_computed(self) -> bool:
        """Whether the KV of the whole prompt exists."""
        return self.num_computed_tokens >= self.num_prompt_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Prompt and output tokens at positions [start, end)."""
        prompt = self.num_prompt_tokens
        if end <= prompt:
            return self.prompt_token_ids[start:end]
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt]

    def take_pages(self, page_ids: list[int], max_pages: int) -> None:
        """Begin to run on these pages; it may come to have `max_pages`."""
        self.page_ids, self.page_row = page_ids, np.zeros(max_pages, np.int32)
        self.page_row[: len(page_ids)] = page_ids

    def add_page(self, page_id: int) -> None:
        self.page_row[len(self.page_ids)] = page_id
        self.page_ids.append(page_id)

    def replace_page(self, index: int, page_id: int) -> None:
        self.page_row[index] = self.page_ids[index] = page_id

    def drop_pages(self) -> None:
        self.page_ids, self.page_row = [], NO_PAGES


def order_of(request: Request) -> Order:
    """Place among live requests: priority, then arrival. The first is never preempted."""
    return request.priority, request.arrival
