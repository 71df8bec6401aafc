"""Decode batches, against rows written one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.batch_builder import BatchBuilder
from serving.buckets import make_buckets
from serving.request import Request
from serving.sampling_params import SamplingParams

PAGE_SIZE, NUM_PAGES, MAX_PAGES = 8, 50, 4
BUILDER = BatchBuilder(
    buckets=make_buckets(16, 64, deterministic=False),
    page_size=PAGE_SIZE,
    num_pages=NUM_PAGES,
    max_pages=MAX_PAGES,
    lora=True,
)


@st.composite
def sequences(draw) -> dict:
    """Fields of a request that decodes, and its pages."""
    num_tokens = draw(st.integers(2, MAX_PAGES * PAGE_SIZE))
    pages = -(-num_tokens // PAGE_SIZE)
    return {
        "tokens": draw(st.lists(st.integers(0, 999), min_size=num_tokens, max_size=num_tokens)),
        "num_prompt_tokens": draw(st.integers(1, num_tokens - 1)),
        "page_ids": draw(st.lists(st.integers(0, 47), min_size=pages, max_size=pages, unique=True)),
        "temperature": draw(st.sampled_from([0.0, 0.5])),
        "top_k": draw(st.integers(-1, 5)),
        "top_p": draw(st.sampled_from([0.25, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.125])),
        "slot": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "child_index": draw(st.integers(0, 3)),
    }


def request_of(sequence: dict) -> Request:
    tokens, prompt = sequence["tokens"], sequence["num_prompt_tokens"]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens[:prompt],
        output_token_ids=tokens[prompt:],
        num_computed_tokens=len(tokens) - 1,
        params=SamplingParams(
            **{name: sequence[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        ),
        **{name: sequence[name] for name in ("slot", "seed", "child_index")},
    )
    request.take_pages(list(sequence["page_ids"]), MAX_PAGES)
    return request


SEVERAL = st.lists(sequences(), min_size=1, max_size=9)


@given(sequences=SEVERAL)
def test_a_decode_batch_is_its_requests_row_by_row_by_slot(sequences):
    requests = [request_of(sequence) for sequence in sequences]
    batch = BUILDER.build_decode(requests)
    assert len(batch.token_ids) == BUILDER.buckets.rows_for(len(requests))
    assert batch.sampled == sorted(requests, key=lambda request: request.slot)
    for row, request in enumerate(batch.sampled):
        tokens = request.prompt_token_ids + request.output_token_ids
        position = len(tokens) - 1
        assert batch.token_ids[row] == tokens[-1]
        assert batch.positions[row] == position
        page = request.page_ids[position // PAGE_SIZE]
        assert batch.write_index[row] == page * PAGE_SIZE + position % PAGE_SIZE
        unused = [0] * (MAX_PAGES - len(request.page_ids))
        assert batch.page_table[row].tolist() == request.page_ids + unused
        assert batch.slot[row] == request.slot
    padding = slice(len(requests), None)
    assert (batch.positions[padding] == -1).all() and not batch.slot[padding].any()
    assert (batch.write_index[padding] == NUM_PAGES * PAGE_SIZE).all() and not batch.page_table[padding].any()


@given(sequences=SEVERAL)
def test_sampling_settings_are_those_of_each_row(sequences):
    requests = [request_of(sequence) for sequence in sequences]
    batch = BUILDER.build_decode(requests)
    assert (batch.sampling is None) == all(request.params.temperature == 0 for request in requests)
    if batch.sampling is None:
        return
    for row, request in enumerate(batch.sampled):
        params, rows = request.params, batch.sampling
        assert rows.temperature[row] == np.float32(params.temperature)
        assert rows.top_k[row] == max(params.top_k, 0)
        assert (rows.top_p[row], rows.min_p[row]) == (params.top_p, params.min_p)
        assert int(rows.seed[row, 0]) + (int(rows.seed[row, 1]) << 32) == request.seed
        assert rows.child[row] == request.child_index
        assert rows.position[row] == request.num_tokens
    assert not batch.sampling.temperature[len(requests) :].any()


@given(sequence=sequences(), data=st.data())
def test_the_row_of_pages_follows_the_pages(sequence, data):
    request = request_of(sequence)
    index = data.draw(st.integers(0, len(request.page_ids) - 1))
    request.replace_page(index, 49)
    if len(request.page_ids) < MAX_PAGES:
        request.add_page(48)
    unused = [0] * (MAX_PAGES - len(request.page_ids))
    assert request.page_row.tolist() == request.page_ids + unused
    request.drop_pages()
    assert not request.page_ids and not request.page_row.size
