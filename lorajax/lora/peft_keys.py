"""The spellings of tensor keys in PEFT files, and what each key stands for.

Invariant: a key means one factor of one module, or one named part that is no LoRA factor, or it is
an error. Only known prefixes are taken off; nothing is matched by resemblance.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight           saved by PEFT
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight   state dict in memory
    model.layers.0.self_attn.q_proj.lora_A.weight                            without PEFT's wrapper
    base_model.model.layers.0.self_attn.q_proj.lora_A.weight                 model without its head
    base_model.model.model.embed_tokens.lora_embedding_A                     embeddings, no .weight
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from lorajax.errors import AdapterFormatError
from lorajax.lora.weights import sample_names

PEFT_PREFIX = "base_model.model."
MAX_KEY_LENGTH = 512

_FACTOR = re.compile(
    r"(?P<name>.+)\.(?:"
    r"lora_(?P<linear>[AB])(?:\.(?P<of>[^.]+))?\.weight|"
    r"lora_embedding_(?P<embedding>[AB])(?:\.(?P<of_embedding>[^.]+))?)"
)
_BASE_COPY = re.compile(r"(?P<name>.+?)(?P<wrapped>\.base_layer)?\.weight")

# What makes an adapter more than LoRA, by how its tensors are called.
_OTHER_PARTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.lora_magnitude_vector(\.|$)"), "a DoRA magnitude (use_dora)"),
    (re.compile(r"\.modules_to_save\.|\.original_module\."), "a fully trained module (modules_to_save)"),
    (re.compile(r"\.trainable_tokens_|\.token_adapter\."), "trained token rows (trainable_token_indices)"),
    (re.compile(r"\.lora_B(\.[^.]+)?\.bias$"), "a bias of the update (lora_bias)"),
    (re.compile(r"\.bias$"), "a trained bias (bias)"),
    (re.compile(r"(?<!\.lora_[AB])\.weight$"), "a full weight of the base (modules_to_save)"),
)


class FactorKey(NamedTuple):
    """A key that holds factor A or B of a module.

    path: canonical path of the module. factor: "A" or "B".
    name: the module's name as the key spells it, without PEFT's wrapper: what PEFT matched its patterns
        against when the adapter was made.
    """

    key: str
    path: str
    name: str
    factor: str
    is_embedding: bool


class BaseCopyKey(NamedTuple):
    """A key that holds a copy of a base weight, which PEFT saves beside an adapted embedding."""

    key: str
    path: str
    wrapped: bool


class ParsedKeys(NamedTuple):
    factors: list[FactorKey]
    base_copies: list[BaseCopyKey]


def parse_keys(keys: Iterable[str]) -> ParsedKeys:
    """Read every key of an adapter file.

    Raises:
        AdapterFormatError: a part that is no LoRA factor, an unknown spelling, or the factors of two
            adapters in one file. All keys at fault are counted; the first few are named.
    """
    factors: list[FactorKey] = []
    copies: list[BaseCopyKey] = []
    unknown: list[str] = []
    adapter_names: set[str] = set()
    for key in keys:
        if len(key) > MAX_KEY_LENGTH:
            raise AdapterFormatError(f"tensor {key[:80]!r}…: a name of {len(key)} characters")
        if match := _FACTOR.fullmatch(key):
            name = match["name"].removeprefix(PEFT_PREFIX)
            factor, is_embedding = match["linear"] or match["embedding"], match["embedding"] is not None
            adapter_names.add(match["of"] or match["of_embedding"] or "")
            factors.append(FactorKey(key, canonical_path(name), name, factor, is_embedding))
        elif copy := _base_copy(key):
            copies.append(copy)
        elif part := _other_part(key):
            raise AdapterFormatError(f"tensor {key!r} is {part}, which cannot be served")
        else:
            unknown.append(key)
    if unknown:
        raise AdapterFormatError(
            f"{len(unknown)} tensors are no LoRA factors: {sample_names(unknown)}; "
            "expected …lora_A.weight, …lora_B.weight, …lora_embedding_A or …lora_embedding_B"
        )
    if len(adapter_names) > 1:
        found = f"{len(adapter_names)} adapters, expected one: {sample_names(adapter_names)}"
        raise AdapterFormatError(f"the tensors belong to {found}")
    return ParsedKeys(factors, copies)


def canonical_path(name: str) -> str:
    """Module name in a Hugging Face model, with or without its head → canonical path."""
    return name.removeprefix("model.")


def _other_part(key: str) -> str | None:
    return next((part for pattern, part in _OTHER_PARTS if pattern.search(key)), None)


def _base_copy(key: str) -> BaseCopyKey | None:
    match = _BASE_COPY.fullmatch(key)
    if match is None:
        return None
    path = canonical_path(match["name"].removeprefix(PEFT_PREFIX))
    if path not in ("embed_tokens", "lm_head"):
        return None
    return BaseCopyKey(key, path, match["wrapped"] is not None)
