"""Read a base model or an adapter from wherever it is stored."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from lorajax.checkpoints import open_checkpoint
from lorajax.config import ModelConfig
from lorajax.errors import ConfigError
from lorajax.lora.source import AdapterSource, read_adapter
from lorajax.lora.weights import AdapterWeights
from lorajax.models.decoder import Decoder
from lorajax.models.loading import load_weights


def load_model(
    path: str | Path,
    *,
    dtype: jnp.dtype | str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Decoder, ModelConfig]:
    """The decoder and its config from a Hugging Face folder, a `.gguf` file or a Hub id.

    dtype: of the weights; "auto" is float32 on CPU and bfloat16 on GPU.
    mesh: not served yet; must be None.
    progress: called with (tensors read, tensors in all).
    Raises CheckpointError or ConfigError.
    """
    if mesh is not None:
        raise ConfigError("mesh is given; allowed: None (one device)")
    checkpoint = open_checkpoint(path)
    model = load_weights(checkpoint.config, checkpoint.tensors, dtype=resolve_dtype(dtype), progress=progress)
    return model, checkpoint.config


def load_adapter(path: AdapterSource, *, config: ModelConfig | None = None) -> AdapterWeights:
    """An adapter from a PEFT or Orbax folder or a Hub id. With `config`, it must fit that base model.

    Raises AdapterFormatError if any part of it cannot be applied.
    """
    return read_adapter(path, config)


def resolve_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """ "auto" → float32 on CPU, bfloat16 elsewhere; otherwise float32 or bfloat16 as named."""
    if isinstance(dtype, str) and dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    with contextlib.suppress(TypeError):
        resolved = jnp.dtype(dtype)
        if resolved in (jnp.float32, jnp.bfloat16):
            return resolved
    raise ConfigError(f"dtype is {dtype!r}; allowed: 'auto', 'float32', 'bfloat16'")
