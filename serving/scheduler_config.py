"""`SchedulerConfig`: the limits under which requests are scheduled."""

import dataclasses

from lorajax.errors import ConfigError
from serving.adapter_turns import PATIENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits; see `EngineConfig`.

    max_loras: most distinct adapters that run at once; 0 sets no cap but the number of slots.
    prefill_block: tokens to which each prefill chunk is padded; a block belongs to one request.
    adapter_patience: steps for which a request is passed over for want of an adapter's place before a
    running adapter must leave for it.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_queue: int
    prefill_block: int
    enable_prefix_caching: bool = True
    adapter_patience: int = PATIENCE

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs + self.prefill_block:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs + "
                f"{self.prefill_block} = {self.max_num_seqs + self.prefill_block}, so that a full decode "
                "batch leaves room for a prompt"
            )

    @property
    def max_steps_to_end(self) -> int:
        """Steps in which all running requests end: R of `adapter_turns`."""
        blocks = (self.max_num_batched_tokens - self.max_num_seqs) // self.prefill_block
        return self.max_model_len + -(-self.max_model_len // (blocks * self.prefill_block))

    @property
    def max_request_len(self) -> int:
        """Most tokens that one request can have, prompt and output. The last one needs no KV."""
        return min(self.max_model_len, self.num_pages * self.page_size + 1)
