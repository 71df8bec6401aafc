"""Base models on disk, in every form that is read."""

import os
from pathlib import Path

from lorajax.checkpoints.checkpoint import Checkpoint, TensorSource
from lorajax.checkpoints.gguf import open_gguf
from lorajax.checkpoints.huggingface import fetch_from_hub, is_hub_id, open_huggingface
from lorajax.errors import CheckpointError, ConfigError

__all__ = ["Checkpoint", "TensorSource", "open_checkpoint"]


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a Hugging Face or Orbax folder, a `*.gguf` file or a Hub id; tensors are read later, on demand.

    What exists on disk is taken from there; a text of the form owner/name that does not is a Hub id.
    revision: branch, tag or commit of a Hub id.

    Raises CheckpointError or ConfigError, naming what is at fault, never with the machine's folders.
    """
    text, path = os.fspath(source), Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}; allowed: None, since {path.name} is not a Hub id")
        if path.is_dir():
            return open_huggingface(path)
        if path.suffix == ".gguf":
            return open_gguf(path)
        raise CheckpointError(f"{path.name}: neither a checkpoint folder nor a *.gguf file")
    if isinstance(source, Path) or not is_hub_id(text) or path.suffix == ".gguf":
        raise CheckpointError(
            f"{path.name[:200]!r}: no such folder or *.gguf file, and no Hub id (owner/name)"
        )
    return open_huggingface(fetch_from_hub(text, revision), name=text)
