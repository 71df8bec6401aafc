"""Bucket ladders: the few batch shapes that are compiled, and which of them a batch takes."""

import bisect
import dataclasses

from serving.config import PREFILL_BLOCK

SCORE_ROWS = 128
"""Most rows of logits that exist at once when prompt tokens are scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes that padded batches may have, ascending.

    decode_rows: sequences of a decode batch, and rows of logits to sample from.
    prefill_tokens: tokens of a packed prefill batch, multiples of PREFILL_BLOCK.
    """

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]

    def rows_for(self, num_rows: int) -> int:
        return _smallest(self.decode_rows, num_rows)

    def tokens_for(self, num_tokens: int) -> int:
        return _smallest(self.prefill_tokens, num_tokens)

    def logits_rows_for(self, num_tokens: int) -> int:
        """Rows of logits that a prefill bucket returns: each of its blocks may end a prompt."""
        return self.rows_for(min(num_tokens // PREFILL_BLOCK, self.decode_rows[-1]))

    def score_rows_for(self, num_tokens: int) -> int:
        """Rows that are scored at once in a prefill bucket."""
        return min(num_tokens, SCORE_ROWS)


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int, *, deterministic: bool) -> Buckets:
    """Powers of two up to the limits, which are buckets themselves; only the largest if deterministic."""
    largest_prefill = max_num_batched_tokens // PREFILL_BLOCK * PREFILL_BLOCK
    decode = _ladder(1, max_num_seqs, factor=2)
    prefill = _ladder(PREFILL_BLOCK, largest_prefill, factor=2)
    if deterministic:
        decode, prefill = decode[-1:], prefill[-1:]
    return Buckets(decode_rows=decode, prefill_tokens=prefill)


def _ladder(smallest: int, largest: int, *, factor: int) -> tuple[int, ...]:
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def _smallest(ladder: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`."""
    position = bisect.bisect_left(ladder, size)
    assert position < len(ladder), f"{size} exceeds the largest bucket {ladder[-1]}"
    return ladder[position]
