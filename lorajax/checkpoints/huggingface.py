"""Hugging Face folders: config.json, tensors (safetensors or Orbax), tokenizer; Hub ids become such."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub

from lorajax.checkpoints.checkpoint import Checkpoint
from lorajax.checkpoints.hf_tokenizer import load_hf_tokenizer
from lorajax.checkpoints.orbax import OrbaxTensors, has_orbax_tensors
from lorajax.checkpoints.safetensors_folder import SafetensorsFolder, read_json_file
from lorajax.config import ModelConfig
from lorajax.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
# other forms of the same weights, which some repositories carry beside those that are read
_NEVER = ("original/*", "consolidated*", "onnx/*", "gguf/*", "coreml/*")


def open_huggingface(folder: Path, *, name: str | None = None) -> Checkpoint:
    """Open a folder. name: of the model, its folder's by default.

    Raises CheckpointError or ConfigError for whatever cannot be read or served.
    """
    generation_path = folder / "generation_config.json"
    generation = read_json_file(generation_path) if generation_path.exists() else {}
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder.name}: no config.json in the folder")
    config = ModelConfig.from_hf(read_json_file(folder / "config.json"), generation)
    config = dataclasses.replace(config, name=name or folder.resolve().name)
    return Checkpoint(
        config=config,
        tensors=OrbaxTensors(folder) if has_orbax_tensors(folder) else SafetensorsFolder(folder),
        load_tokenizer=lambda: load_hf_tokenizer(folder, config.eos_token_ids),
        generation_config=generation,
    )


def is_hub_id(source: str) -> bool:
    """Whether a text has the form owner/name."""
    return bool(_HUB_ID.match(source))


def fetch_from_hub(hub_id: str, revision: str | None, *, patterns: Sequence[str] = _MODEL_FILES) -> Path:
    """Download a repository's files (never pickles) into huggingface_hub's cache; returns their folder.

    Raises CheckpointError with the cause in one line: no such repository, no access, or no network
    and nothing in the cache.
    """
    if not is_hub_id(hub_id):
        raise CheckpointError(f"{hub_id!r} is no existing folder or *.gguf file, and no Hub id (owner/name)")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_NEVER)
            )
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{hub_id!r} is no local folder and cannot be fetched from the Hub: {cause}"
        ) from error
