"""Scheduled requests → padded numpy batches of the bucket ladder's shapes.

Every call allocates new arrays: JAX may alias a host buffer, and a step that has been dispatched may
still read it. Padding rows have position -1, slot 0, and write past the page pool's end.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.buckets import Buckets
from serving.config import PREFILL_BLOCK
from serving.request import Request
from serving.scheduler import PrefillChunk

_slot = operator.attrgetter("slot")

MAX_TEMPERATURE = 1e20
MIN_TOP_P = 1e-20
MAX_TOP_K = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Sampling settings of the rows; see `lorajax.sampler.SamplingInputs`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    child: np.ndarray
    position: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRows:
    """A prefill's tokens whose next token is known and wanted with its log-probability.

    spans: (request, position of the first scored token, how many), in the order of the rows.
    The arrays are those of `lorajax.steps.ScoreBatch`, padded to whole batches of it.
    with_top: some request wants the best tokens too.
    """

    spans: list[tuple[Request, int, int]]
    rows: np.ndarray
    token_ids: np.ndarray
    slot: np.ndarray | None
    with_top: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """One step's arrays (see `lorajax.steps.StepBatch`) and the requests behind its rows of logits.

    sampled: requests whose next token the step draws; entry i belongs to row i, later rows are padding.
    sampling: None if all of them are greedy.
    scored: None if no prompt token's log-probability is wanted.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    write_index: np.ndarray
    block_seq: np.ndarray
    page_table: np.ndarray
    slot: np.ndarray | None
    logits_rows: np.ndarray | None
    logits_slot: np.ndarray | None
    sampled: list[Request]
    sampling: SamplingRows | None
    with_logprobs: bool
    scored: ScoreRows | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """Builds batches of one engine's shapes.

    num_pages: of the pool. max_pages: of one request. lora: whether batches route to adapter slots.
    """

    buckets: Buckets
    page_size: int
    num_pages: int
    max_pages: int
    lora: bool

    def empty_decode(self, rows: int) -> PaddedBatch:
        """A decode batch of padding alone, for compiling."""
        return self._finish(self._empty(rows, block=1), [], rows, None)

    def empty_prefill(self, tokens: int) -> PaddedBatch:
        """A prefill batch of padding alone, for compiling."""
        rows = self.buckets.logits_rows_for(tokens)
        return self._finish(self._empty(tokens, block=PREFILL_BLOCK), [], rows, [])

    def build_decode(self, requests: list[Request]) -> PaddedBatch:
        """One token per request: the last known one, whose KV is not yet computed.

        Rows are sorted by slot: the adapter matmuls then read each adapter once.
        """
        requests = sorted(requests, key=_slot)
        count, rows = len(requests), self.buckets.rows_for(len(requests))
        batch = self._empty(rows, block=1)
        # columns at once: row by row, numpy would cost more than the whole of scheduling
        positions = np.array([request.num_computed_tokens for request in requests], np.int32)
        pages = batch["page_table"][:count]
        np.concatenate([request.page_row for request in requests], out=pages.reshape(-1))
        current = pages[np.arange(count), positions // self.page_size]
        batch["token_ids"][:count] = [request.output_token_ids[-1] for request in requests]
        batch["positions"][:count] = positions
        batch["write_index"][:count] = current * self.page_size + positions % self.page_size
        batch["slot"][:count] = [request.slot for request in requests]
        return self._finish(batch, requests, rows, None)

    def build_prefill(self, chunks: list[PrefillChunk]) -> PaddedBatch:
        """Chunks one after another, each from the start of a block:  [aaaa|aa..|bbbb|b...|....]."""
        num_blocks = sum(-(-chunk.num_tokens // PREFILL_BLOCK) for chunk in chunks)
        tokens = self.buckets.tokens_for(num_blocks * PREFILL_BLOCK)
        batch = self._empty(tokens, block=PREFILL_BLOCK)
        sampled, logits_rows, first_block = [], [], 0
        scored: list[_ScoredSpan] = []
        for seq, chunk in enumerate(chunks):
            request, count = chunk.request, chunk.num_tokens
            begin = first_block * PREFILL_BLOCK
            last_block = first_block + -(-count // PREFILL_BLOCK)
            positions = np.arange(chunk.start, chunk.start + count, dtype=np.int32)
            pages = request.page_row
            rows = slice(begin, begin + count)
            batch["token_ids"][rows] = request.token_ids(chunk.start, chunk.start + count)
            batch["positions"][rows] = positions
            cells = pages[positions // self.page_size] * self.page_size + positions % self.page_size
            batch["write_index"][rows] = cells
            batch["block_seq"][first_block:last_block] = seq
            batch["page_table"][seq] = pages
            batch["slot"][first_block:last_block] = request.slot
            first, end = _scored_tokens(chunk)
            if first < end:  # a token is scored in the row of the token before it
                scored.append((request, first, end - first, begin + first - 1 - chunk.start))
            if chunk.samples:
                sampled.append(request)
                logits_rows.append(begin + count - 1)
            first_block = last_block
        padded = self._finish(batch, sampled, self.buckets.logits_rows_for(tokens), logits_rows)
        return dataclasses.replace(padded, scored=self.score_rows(scored, tokens)) if scored else padded

    def score_rows(self, scored: "list[_ScoredSpan]", tokens: int) -> ScoreRows:
        """Rows to score in a prefill bucket of so many tokens."""
        size = self.buckets.score_rows_for(tokens)
        padded = -(-sum(count for _, _, count, _ in scored) // size) * size
        rows, token_ids, slot = np.zeros((3, max(padded, size)), np.int32)
        begin = 0
        for request, first, count, row in scored:
            span = slice(begin, begin + count)
            rows[span] = np.arange(row, row + count)
            token_ids[span] = request.token_ids(first, first + count)
            slot[span] = request.slot
            begin += count
        return ScoreRows(
            spans=[(request, first, count) for request, first, count, _ in scored],
            rows=rows,
            token_ids=token_ids,
            slot=slot if self.lora else None,
            with_top=any(request.params.prompt_logprobs for request, _, _, _ in scored),
        )

    def _empty(self, tokens: int, *, block: int) -> dict[str, Any]:
        blocks = tokens // block
        return {
            "token_ids": np.zeros(tokens, np.int32),
            "positions": np.full(tokens, -1, np.int32),
            "write_index": np.full(tokens, self.num_pages * self.page_size, np.int32),
            "block_seq": np.arange(blocks, dtype=np.int32),
            "page_table": np.zeros((blocks, self.max_pages), np.int32),
            "slot": np.zeros(blocks, np.int32),
        }

    def _finish(
        self, batch: dict[str, Any], sampled: list[Request], rows: int, logits_rows: list[int] | None
    ) -> PaddedBatch:
        if not self.lora:
            batch["slot"] = None
        padded_rows = padded_slot = None
        if logits_rows is not None:
            padded_rows = np.zeros(rows, np.int32)
            padded_rows[: len(logits_rows)] = logits_rows
            padded_slot = np.zeros(rows, np.int32) if self.lora else None
            if padded_slot is not None:
                padded_slot[: len(sampled)] = [request.slot for request in sampled]
        return PaddedBatch(
            **batch,
            logits_rows=padded_rows,
            logits_slot=padded_slot,
            sampled=sampled,
            sampling=_sampling_if_any_draws(sampled, rows),
            with_logprobs=any(request.params.logprobs is not None for request in sampled),
        )


_ScoredSpan = tuple[Request, int, int, int]  # request, first scored token, how many, row of the first


def _scored_tokens(chunk: PrefillChunk) -> tuple[int, int]:
    """[first, end) of the prompt tokens that this chunk scores.

    A chunk of tokens 4 to 7 knows the distributions of tokens 5 to 8:    4 5 6 7|
                                                                            5 6 7 8
    """
    request = chunk.request
    if request.score_from is None:
        return 0, 0
    first = max(chunk.start + 1, request.score_from)
    return first, min(chunk.start + chunk.num_tokens + 1, request.num_prompt_tokens)


def _sampling_if_any_draws(requests: list[Request], rows: int) -> SamplingRows | None:
    return None if all(request.params.greedy for request in requests) else sampling_rows(requests, rows)


def sampling_rows(requests: list[Request], rows: int) -> SamplingRows:
    """The requests' settings as arrays of `rows` rows; those without a request are greedy."""
    count, params = len(requests), [request.params for request in requests]

    def column(values: Sequence, fill: int, dtype: type) -> np.ndarray:
        padded = np.full(rows, fill, dtype)
        padded[:count] = values
        return padded

    seeds = np.zeros((rows, 2), np.uint32)
    words = np.array([request.seed for request in requests], np.uint64)
    seeds[:count, 0], seeds[:count, 1] = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
    # clipped so that in float32 none becomes inf or 0: beyond, they mean what the limit means
    return SamplingRows(
        temperature=column(
            [0 if p.greedy else min(p.temperature, MAX_TEMPERATURE) for p in params], 0, np.float32
        ),
        top_k=column([min(max(p.top_k, 0), MAX_TOP_K) for p in params], 0, np.int32),
        top_p=column([max(p.top_p, MIN_TOP_P) for p in params], 1, np.float32),
        min_p=column([p.min_p for p in params], 0, np.float32),
        seed=seeds,
        child=column([request.child_index for request in requests], 0, np.int32),
        position=column([request.num_tokens for request in requests], 0, np.int32),
    )
