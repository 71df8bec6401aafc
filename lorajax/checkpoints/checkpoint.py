"""`Checkpoint`: a base model on disk, opened and checked, its tensors not yet read."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lorajax.config import ModelConfig
from lorajax.tokenizer import Tokenizer


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by their Hugging Face name, read on demand; float32, float16, bfloat16 or float64.

    `read_slice` takes one slice of step 1 for each leading axis (later axes whole) and reads little
    more than that, so that a shard goes to its device without the whole tensor on the host. Reading
    raises CheckpointError if the file changed since it was opened.
    """

    def keys(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype: ...
    def read(self, name: str) -> np.ndarray: ...
    def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A base model: what it is, its tensors, and how to get its tokenizer.

    load_tokenizer: raises CheckpointError where the checkpoint carries none.
    generation_config: the parsed `generation_config.json`; empty where there is none.
    """

    config: ModelConfig
    tensors: TensorSource
    load_tokenizer: Callable[[], Tokenizer]
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
