"""The chained hash that names the content of one full page: one lineage for cache and KV events.

Stream fed to xxh3-128, all integers little-endian:

    u32 length of the parent hash | parent hash | u32 number of tokens | tokens as int32
    and only with namespace keys:  u32 number of keys | for each: u32 length | key

Without keys the stream ends after the tokens, so a base model's chain is the same whether LoRA is on.
Every page of a chain carries the keys, not only the first: a chain may begin at any page.
"""

import functools
import struct
from collections.abc import Sequence

import xxhash

NamespaceKeys = tuple[bytes, ...]


def namespace_keys(adapter_id: int, cache_salt: str | None) -> NamespaceKeys:
    """Keys that part one tenant's pages from another's; each is tagged by its kind."""
    keys = []
    if adapter_id != 0:
        keys.append(b"adapter:" + struct.pack("<i", adapter_id))
    if cache_salt is not None:
        keys.append(b"salt:" + cache_salt.encode(errors="surrogatepass"))
    return tuple(keys)


def block_hash(parent: bytes, token_ids: Sequence[int], keys: NamespaceKeys) -> bytes:
    """The hash (16 bytes) of a full page after `parent` (empty for a sequence's first page)."""
    count = len(token_ids)
    stream = struct.pack(f"<I{len(parent)}sI{count}i", len(parent), parent, count, *token_ids)
    return xxhash.xxh3_128_digest(stream + _framed(keys))


@functools.lru_cache(maxsize=1024)
def _framed(keys: NamespaceKeys) -> bytes:
    """The end of the stream; nothing without keys. The same for all pages of a tenant."""
    if not keys:
        return b""
    return struct.pack("<I", len(keys)) + b"".join(struct.pack("<I", len(key)) + key for key in keys)


def extend_chain(hashes: list[bytes], token_ids: Sequence[int], page_size: int, keys: NamespaceKeys) -> None:
    """Append the hashes of all full pages of `token_ids` that `hashes` does not name yet."""
    for page in range(len(hashes), len(token_ids) // page_size):
        parent = hashes[-1] if hashes else b""
        hashes.append(block_hash(parent, token_ids[page * page_size : (page + 1) * page_size], keys))
