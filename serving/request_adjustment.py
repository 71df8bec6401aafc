"""What one request does to its logits, kept on the host and brought up to date token by token.

Invariant: after `advance(output)` the state is the one that a fresh start with that output gives.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lorajax.errors import RequestRejected
from serving.sampling_params import SamplingParams

WORD_BITS = 32

# Beyond these limits a bias or a repetition penalty only picks or bans its tokens, as at the limit;
# within them no float32 can overflow, not even divided by the smallest temperature.
_MAX_BIAS = 1e20
_MAX_REPETITION = 1e6


class RequestAdjustment:
    """Bias, penalties and allowed tokens of one sequence; see `lorajax.logits_adjustment`.

    token_mask: one more set of allowed tokens, [words] uint32, that holds for the next draw only (token t
    is bit t % 32 of word t // 32): whoever constrains the output sets it before each step. None allows all.
    If it leaves only tokens that `min_tokens` forbids, it has its way.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_token_ids: Iterable[int], vocab_size: int
    ):
        self._params, self._vocab_size = params, vocab_size
        self._num_output = 0
        self._counts: Counter[int] = Counter()
        self.token_mask: np.ndarray | None = None
        allowed = params.allowed_token_ids
        self._allowed = token_set(range(vocab_size) if allowed is None else allowed, vocab_size)
        ends = [token_id for token_id in end_token_ids if token_id < vocab_size]
        self._not_ends = ~token_set(ends, vocab_size)
        self.repetition = float(np.clip(params.repetition_penalty, 1 / _MAX_REPETITION, _MAX_REPETITION))
        self.seen = token_set(prompt if self.repetition != 1 else (), vocab_size)
        self.bias: np.ndarray | None = None
        if params.logit_bias:
            self.bias = np.zeros(vocab_size, np.float32)
            tokens, biases = list(params.logit_bias), list(params.logit_bias.values())
            self.bias[tokens] = np.clip(biases, -_MAX_BIAS, _MAX_BIAS)
        self.penalty: np.ndarray | None = None
        if params.presence_penalty or params.frequency_penalty:
            self.penalty = np.zeros(vocab_size, np.float32)

    def advance(self, output: Sequence[int]) -> None:
        """Take in the tokens of the output that are new since the last call."""
        params = self._params
        for token in output[self._num_output :]:
            self._counts[token] += 1
            if self.repetition != 1:
                self.seen[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
            if self.penalty is not None:
                frequency = params.frequency_penalty * self._counts[token]
                self.penalty[token] = params.presence_penalty + frequency
        self._num_output = len(output)

    @property
    def dense(self) -> bool:
        """Whether it has a number for each token, and not only sets of tokens."""
        return self.bias is not None or self.penalty is not None

    @property
    def allowed(self) -> np.ndarray:
        """Tokens that the next draw may give, [words] uint32; never none of them."""
        allowed = self._allowed if self.token_mask is None else self._allowed & self.token_mask
        if self._num_output < self._params.min_tokens:
            longer = allowed & self._not_ends
            allowed = longer if longer.any() else allowed
        return allowed


def adjustment_of(
    params: SamplingParams, prompt: Sequence[int], end_token_ids: Iterable[int], vocab_size: int
) -> RequestAdjustment | None:
    """A request's adjustment; None if it leaves its logits as they are.

    end_token_ids: EOS and stop tokens, which `min_tokens` holds back.
    Raises RequestRejected for token ids beyond the vocabulary, and if no token could be drawn.
    """
    _check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    ends = set(end_token_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if params.min_tokens and ends.issuperset(allowed):
        raise RequestRejected(
            f"min_tokens is {params.min_tokens}, but every allowed token ends the request; allowed: 0, or a "
            "token that does not"
        )
    neutral = (
        not params.logit_bias
        and params.allowed_token_ids is None
        and not params.presence_penalty
        and not params.frequency_penalty
        and params.repetition_penalty == 1
        and not (params.min_tokens and ends)
        and params.structured_output is None
    )
    return None if neutral else RequestAdjustment(params, prompt, ends, vocab_size)


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    beyond = [token_id for token_id in token_ids if token_id >= vocab_size]
    if beyond:
        raise RequestRejected(f"{name} has token id {beyond[0]}; allowed: 0 to {vocab_size - 1}")


def token_set(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Bits of a set of tokens, [words] uint32: token t is bit t % 32 of word t // 32."""
    flags = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.uint8)
    flags[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdjustmentRows:
    """Adjustments of a batch's rows; see `lorajax.logits_adjustment.LogitsAdjustment`."""

    allowed: np.ndarray
    seen: np.ndarray
    repetition: np.ndarray
    bias: np.ndarray | None
    penalty: np.ndarray | None


def adjustment_rows(
    adjustments: Sequence[RequestAdjustment | None], rows: int, vocab_size: int, *, dense: bool
) -> AdjustmentRows:
    """The rows' adjustments as arrays of `rows` rows; those without one, and padding, are neutral.

    dense: with bias and penalty, [rows, vocab] each. Needed if any row has either.
    """
    words = -(-vocab_size // WORD_BITS)
    # new arrays in every step: the device may still read those of the step before
    batch = AdjustmentRows(
        allowed=np.full((rows, words), 0xFFFFFFFF, np.uint32),
        seen=np.zeros((rows, words), np.uint32),
        repetition=np.ones(rows, np.float32),
        bias=np.zeros((rows, vocab_size), np.float32) if dense else None,
        penalty=np.zeros((rows, vocab_size), np.float32) if dense else None,
    )
    for row, adjustment in enumerate(adjustments):
        if adjustment is None:
            continue
        batch.allowed[row] = adjustment.allowed
        batch.seen[row] = adjustment.seen
        batch.repetition[row] = adjustment.repetition
        if batch.bias is not None and adjustment.bias is not None:
            batch.bias[row] = adjustment.bias
        if batch.penalty is not None and adjustment.penalty is not None:
            batch.penalty[row] = adjustment.penalty
    return batch
