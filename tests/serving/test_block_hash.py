"""The hash of a page: its framing, and what it tells apart."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from serving.block_hash import block_hash, extend_chain, namespace_keys

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
TENANTS = st.tuples(st.integers(0, 2**31 - 1), st.one_of(st.none(), st.text(max_size=8)))


def framed(parent: bytes, tokens: list[int], *keys: bytes) -> bytes:
    """The stream as the document draws it, one field after another."""
    stream = struct.pack("<I", len(parent)) + parent + struct.pack("<I", len(tokens))
    for token in tokens:
        stream += struct.pack("<i", token)
    if keys:
        stream += struct.pack("<I", len(keys))
        for key in keys:
            stream += struct.pack("<I", len(key)) + key
    return xxhash.xxh3_128(stream).digest()


@given(parent=st.binary(max_size=20), tokens=TOKENS)
def test_without_keys_it_is_the_plain_chain(parent, tokens):
    assert block_hash(parent, tokens, ()) == framed(parent, tokens)
    assert namespace_keys(0, None) == ()


def test_with_keys_they_follow_the_tokens():
    keys = namespace_keys(7, "tenant")
    assert keys == (b"adapter:\x07\x00\x00\x00", b"salt:tenant")
    assert block_hash(b"parent", [1, 2], keys) == framed(b"parent", [1, 2], *keys)


def test_known_digests():
    """Pinned: the digests name blocks to other processes, so they must not change by accident."""
    first = block_hash(b"", [1, 2, 3, 4], ())
    assert first.hex() == "4db948482d68d93a72213310f236ae09"
    assert block_hash(first, [5, 6, 7, 8], ()).hex() == "e1892ade6e772c24f1ddbc0eac41cf1e"
    assert block_hash(b"", [1, 2, 3, 4], namespace_keys(1, None)).hex() == "2621d3d152c2cca710e27050d662ed84"
    assert block_hash(b"", [1, 2, 3, 4], namespace_keys(0, "s")).hex() == "da05ec8ddc031038a2216b61bab6c918"


@given(tokens=TOKENS, tenants=st.lists(TENANTS, min_size=2, max_size=6, unique=True))
def test_namespaces_never_meet(tokens, tenants):
    assert len({block_hash(b"", tokens, namespace_keys(*tenant)) for tenant in tenants}) == len(tenants)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, None), (0, None)),
        ((1, None), (2, None)),
        ((0, ""), (0, None)),
        ((0, "a"), (0, "b")),
        ((1, "a"), (1, None)),
        ((0, "adapter:\x01\x00\x00\x00"), (1, None)),
        ((0x61, None), (0, "a")),
    ],
)
def test_adapters_salts_and_base_differ(one, other):
    assert namespace_keys(*one) != namespace_keys(*other)
    assert block_hash(b"", [1], namespace_keys(*one)) != block_hash(b"", [1], namespace_keys(*other))


@given(tokens=TOKENS, page_size=st.integers(1, 5), tenant=TENANTS, data=st.data())
def test_incremental_and_one_shot_chains_are_equal(tokens, page_size, tenant, data):
    keys = namespace_keys(*tenant)
    at_once: list[bytes] = []
    extend_chain(at_once, tokens, page_size, keys)
    assert len(at_once) == len(tokens) // page_size
    grown: list[bytes] = []
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        extend_chain(grown, tokens[:end], page_size, keys)
        assert grown == at_once[: end // page_size]
    extend_chain(grown, tokens, page_size, keys)
    assert grown == at_once


@given(tokens=st.lists(st.integers(0, 1), min_size=6, max_size=6), tenant=TENANTS)
def test_a_page_depends_on_all_before_it(tokens, tenant):
    keys = namespace_keys(*tenant)
    chain: list[bytes] = []
    extend_chain(chain, tokens, 2, keys)
    for position in range(4):
        changed = [*tokens]
        changed[position] += 2
        other: list[bytes] = []
        extend_chain(other, changed, 2, keys)
        assert [a == b for a, b in zip(chain, other, strict=True)] == [
            page < position // 2 for page in range(3)
        ]
