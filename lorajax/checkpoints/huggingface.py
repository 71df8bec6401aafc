"""Hugging Face folders: config.json, safetensors (one file or shards), tokenizer, chat template.

Hub ids are fetched through `huggingface_hub` into its cache, which is such a folder.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from lorajax.checkpoints.checkpoint import Checkpoint
from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError, CheckpointError
from lorajax.lora.safetensors_file import SafetensorsFile, open_regular_file
from lorajax.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_huggingface(folder: Path) -> Checkpoint:
    """Open a folder. Raises CheckpointError or ConfigError for whatever cannot be served."""
    generation = _read_json(folder / "generation_config.json", optional=True)
    config = ModelConfig.from_hf(_read_json(folder / "config.json"), generation)
    return Checkpoint(
        config=config,
        tensors=SafetensorsFolder(folder),
        load_tokenizer=lambda: load_tokenizer(folder, config),
        generation_config=generation,
    )


def fetch_from_hub(hub_id: str, revision: str | None, *, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Download a model's files (never pickles). Raises CheckpointError with the cause in one line."""
    if not _HUB_ID.match(hub_id):
        raise CheckpointError(f"{hub_id!r} is no existing folder or *.gguf file, and no Hub id (owner/name)")
    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns))
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{hub_id!r} is no local folder and cannot be fetched from the Hub: {cause}"
        ) from error


class SafetensorsFolder:
    """Tensors of a folder by name, from `model.safetensors` or the shards that an index lists."""

    def __init__(self, folder: Path):
        self._files = [_open(path) for path in _safetensors_paths(folder)]
        self._owner: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.entries:
                if name in self._owner:
                    raise CheckpointError(f"{name} stands in {self._owner[name].name} and in {file.name}")
                self._owner[name] = file

    def keys(self) -> list[str]:
        return list(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owner[name].entries[name].shape

    def read(self, name: str) -> np.ndarray:
        return self._owner[name].read(name)


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path.name, open_regular_file(path, path.name))
    except AdapterFormatError as error:
        raise CheckpointError(str(error)) from error


def _safetensors_paths(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index.name}: no weight_map")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if "/" in name or not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{index.name} lists {missing[0]}, which is not in the folder")
        return [folder / name for name in names]
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise CheckpointError("the weights are pickled, which is never read; convert them to safetensors")
    raise CheckpointError("no model.safetensors and no model.safetensors.index.json in the folder")


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a folder with its chat template. Raises CheckpointError without tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError("no tokenizer.json in the folder: pass token ids, or a tokenizer")
    try:
        fast = FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"tokenizer.json: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json", optional=True)
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_id = None if eos is None else fast.token_to_id(eos)
    declared = config.eos_token_ids + (() if eos_id is None else (eos_id,))
    return Tokenizer(
        fast,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        add_bos=bool(settings.get("add_bos_token", False)),
        eos_token_ids=tuple(dict.fromkeys(declared)),
    )


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if not path.exists():
        if optional:
            return {}
        raise CheckpointError(f"no {path.name} in the folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, found {type(value).__name__}")
    return value
