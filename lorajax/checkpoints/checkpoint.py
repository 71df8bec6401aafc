"""`Checkpoint`: a base model on disk, opened and checked, its tensors not yet read."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lorajax.config import ModelConfig
from lorajax.tokenizer import Tokenizer


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by their Hugging Face name, read on demand."""

    def keys(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A base model: what it is, its tensors, and how to get its tokenizer.

    load_tokenizer raises CheckpointError where the checkpoint carries none.
    """

    config: ModelConfig
    tensors: TensorSource
    load_tokenizer: Callable[[], Tokenizer]
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
