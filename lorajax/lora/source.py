"""From wherever an adapter comes to checked host arrays: PEFT folder, Orbax folder, Hub id, or memory."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from lorajax.checkpoints.huggingface import fetch_from_hub, is_hub_id
from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError, CheckpointError
from lorajax.lora.adapter_folder import confined
from lorajax.lora.binding import check_limits, check_weights
from lorajax.lora.host_copy import host_copy
from lorajax.lora.orbax_adapter import is_orbax_folder, load_orbax
from lorajax.lora.peft import load_peft, warn_user
from lorajax.lora.weights import AdapterWeights

AdapterSource = str | Path | AdapterWeights

_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]


def read_adapter(
    source: AdapterSource,
    config: ModelConfig | None = None,
    *,
    dtype: DTypeLike = np.float32,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
    experts: bool = True,
    base_weight: Callable[[str], np.ndarray] | None = None,
    base_chat_template: str | None = None,
    roots: Collection[str | Path] | None = None,
    warn: Callable[[str], None] = warn_user,
) -> AdapterWeights:
    """Read and check an adapter; its arrays are read-only copies on the host.

    source: a PEFT or Orbax folder, a Hub id, or arrays. A text that names no existing folder and has the
        form owner/name is a Hub id, unless `roots` confines sources to folders.
    The other arguments are those of `lorajax.lora.peft.load_peft`.
    Raises AdapterFormatError, AdapterCapacityError.
    """
    if not isinstance(source, (str, Path, AdapterWeights)):
        raise AdapterFormatError(
            f"the source is a {type(source).__name__}; allowed: a folder, a Hub id, or AdapterWeights"
        )
    if not isinstance(source, AdapterWeights):
        folder = _folder(source, roots)
        if not is_orbax_folder(folder):
            return load_peft(
                folder,
                config,
                dtype=dtype,
                max_rank=max_rank,
                target_modules=target_modules,
                experts=experts,
                base_weight=base_weight,
                base_chat_template=base_chat_template,
                roots=roots,
                warn=warn,
            )
        source = load_orbax(confined(folder, roots))
    if config is not None:
        check_weights(source, config)
    ranks = {path: module.rank for path, module in source.modules.items()}
    check_limits(ranks, max_rank=max_rank, target_modules=target_modules, experts=experts)
    return host_copy(source, dtype)


def _folder(source: str | Path, roots: Collection[str | Path] | None) -> Path:
    path = Path(source).expanduser()
    if path.exists() or isinstance(source, Path) or roots is not None:
        return path
    if not is_hub_id(source):
        raise AdapterFormatError(f"{path.name!r}: no such folder, and no Hub id (owner/name)")
    try:
        return fetch_from_hub(source, None, patterns=_ADAPTER_FILES)
    except CheckpointError as error:
        raise AdapterFormatError(str(error)) from error
