"""Base models on disk, in every form that is read."""

from pathlib import Path

from lorajax.checkpoints.checkpoint import Checkpoint
from lorajax.checkpoints.gguf import open_gguf
from lorajax.checkpoints.huggingface import fetch_from_hub, open_huggingface
from lorajax.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a Hugging Face folder, a `*.gguf` file or a Hub id; tensors are read later, on demand.

    revision: of a Hub id. Raises CheckpointError or ConfigError, naming what is at fault.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return open_huggingface(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path.name}: no such file")
        return open_gguf(path)
    if path.exists() or isinstance(source, Path):
        raise CheckpointError(f"{path.name}: not a checkpoint folder or *.gguf file")
    return open_huggingface(fetch_from_hub(source, revision))
