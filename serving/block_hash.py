"""The chained hash that names the content of one full page: one lineage for cache and KV events.

Stream fed to xxh3-128, all integers little-endian:

    u32 length of the parent hash | parent hash | u32 number of tokens | tokens as int32
    and only with namespace keys:  u32 number of keys | for each: u32 length | key

Without keys the stream ends after the tokens, so a base model's chain is the same whether LoRA is on.
Every page of a chain carries the keys, not only the first: a chain may begin at any page.
"""

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

NamespaceKeys = tuple[bytes, ...]


def namespace_keys(adapter_id: int, cache_salt: str | None) -> NamespaceKeys:
    """Keys that part one tenant's pages from another's; each is tagged by its kind."""
    keys = []
    if adapter_id != 0:
        keys.append(b"adapter:" + struct.pack("<i", adapter_id))
    if cache_salt is not None:
        keys.append(b"salt:" + cache_salt.encode())
    return tuple(keys)


def block_hash(parent: bytes, token_ids: Sequence[int], keys: NamespaceKeys) -> bytes:
    """The hash (16 bytes) of a full page after `parent` (empty for a sequence's first page)."""
    tokens = np.asarray(token_ids, "<i4")
    stream = [struct.pack("<I", len(parent)), parent, struct.pack("<I", len(tokens)), tokens.tobytes()]
    if keys:
        stream.append(struct.pack("<I", len(keys)))
        for key in keys:
            stream += [struct.pack("<I", len(key)), key]
    return xxhash.xxh3_128_digest(b"".join(stream))


def extend_chain(hashes: list[bytes], token_ids: Sequence[int], page_size: int, keys: NamespaceKeys) -> None:
    """Append the hashes of all full pages of `token_ids` that `hashes` does not name yet."""
    for page in range(len(hashes), len(token_ids) // page_size):
        parent = hashes[-1] if hashes else b""
        hashes.append(block_hash(parent, token_ids[page * page_size : (page + 1) * page_size], keys))
