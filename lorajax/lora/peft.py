"""A PEFT folder → `AdapterWeights`.

Invariant: either every field of the config and every tensor is accounted for and all of the adapter
is returned, or an error is raised and nothing is. Names, shapes, ranks and limits are settled on the
file's header alone; tensors are read last.
"""

import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from lorajax.checkpoints.safetensors_file import SafetensorsFile
from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError
from lorajax.lora.adapter_folder import AdapterFolder
from lorajax.lora.binding import BoundModule, bind, check_limits, unmatched_patterns
from lorajax.lora.host_copy import cast, finite_cast
from lorajax.lora.peft_config import PeftLoraConfig, read_config
from lorajax.lora.peft_keys import BaseCopyKey, parse_keys
from lorajax.lora.tokenizer_files import check_tokenizer_files
from lorajax.lora.weights import AdapterWarning, AdapterWeights, LoRAModule, sample_names


def warn_user(message: str) -> None:
    warnings.warn(message, AdapterWarning, stacklevel=4)  # the caller of load_peft


def load_peft(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: DTypeLike = np.float32,
    max_rank: int | None = None,
    target_modules: Collection[str] | None = None,
    experts: bool = True,
    base_weight: Callable[[str], np.ndarray] | None = None,
    base_name: str | None = None,
    base_chat_template: str | None = None,
    roots: Collection[str | Path] | None = None,
    warn: Callable[[str], None] = warn_user,
) -> AdapterWeights:
    """Read a PEFT LoRA adapter (`adapter_config.json` and `adapter_model.safetensors`).

    path: the adapter's folder. Never a network address.
    config: the base model. None reads the adapter without a base: names are checked, shapes only
        against the adapter's own ranks.
    dtype: of the returned factors. F64, F32, F16 and BF16 tensors, also mixed, are cast once.
    max_rank, target_modules, experts: what the engine has memory for: the largest rank, the names of
        the linears that it adapts ("q_proj"; None: all), whether it adapts experts.
    base_weight: gives the base's own `embed_tokens` or `lm_head` weight, [vocab, hidden], in the
        dtype in which it is served. PEFT saves a copy beside an adapted embedding; it must be equal.
    base_name: the served model's name; another one in the adapter's config is a warning.
    base_chat_template: the base's own; see `lorajax.lora.tokenizer_files` for the rule.
    roots: folders in which the adapter must lie, symlinks followed; None: anywhere.
    warn: called with each warning's text; by default an `AdapterWarning`.

    Raises:
        AdapterFormatError: the adapter cannot be applied in full, with the reason.
        AdapterCapacityError: a rank above `max_rank`.
    """
    folder = AdapterFolder(path, roots)
    peft_config = read_config(folder.read_config())
    check_tokenizer_files(folder, config.vocab_size if config else None, base_chat_template, warn)
    with folder.open_tensors() as file:
        keys = parse_keys(file.entries)
        shapes = {key: entry.shape for key, entry in file.entries.items()}
        modules = bind(keys.factors, shapes, peft_config, config)
        ranks = {path: module.rank for path, module in modules.items()}
        check_limits(ranks, max_rank=max_rank, target_modules=target_modules, experts=experts)
        _report(modules, peft_config, base_name, warn)
        for copy in keys.base_copies:
            _check_base_copy(copy, file, config, base_weight, warn)
        factors = {path: _read_module(module, file, np.dtype(dtype)) for path, module in modules.items()}
    return AdapterWeights(modules=factors)


def _report(
    modules: dict[str, BoundModule],
    peft_config: PeftLoraConfig,
    base_name: str | None,
    warn: Callable[[str], None],
) -> None:
    if unmatched := unmatched_patterns(modules, peft_config):
        warn(f"{len(unmatched)} patterns match no adapted module: {', '.join(unmatched[:3])}")
    if idle := [path for path, module in modules.items() if module.scaling <= 0]:
        warn(f"lora_alpha is not above zero, and applied as it is, in {sample_names(idle)}")
    made_for = peft_config.base_model_name
    if base_name and made_for and _last_part(made_for) != _last_part(base_name):
        warn(f"the adapter was made for {_last_part(made_for)!r}, and is loaded on {_last_part(base_name)!r}")


def _last_part(name: str) -> str:
    """A model's name without its owner or folder: the same model is found under many of both."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def _check_base_copy(
    copy: BaseCopyKey,
    file: SafetensorsFile,
    config: ModelConfig | None,
    base_weight: Callable[[str], np.ndarray] | None,
    warn: Callable[[str], None],
) -> None:
    """A saved copy of a base weight is harmless if it is the base's own, and a full fine-tune if not."""
    shape = file.entries[copy.key].shape
    if config and shape != (config.vocab_size, config.hidden_size):
        raise AdapterFormatError(
            f"tensor {copy.key!r} is a weight of the base of shape {list(shape)}; "
            f"the served base has {[config.vocab_size, config.hidden_size]}"
        )
    if base_weight is None:
        if not copy.wrapped:
            raise AdapterFormatError(f"tensor {copy.key!r} is a full weight of the base (modules_to_save)")
        warn(f"tensor {copy.key!r} is a copy of the base's weight; it is taken to be unchanged")
        return
    ours = base_weight(copy.path)
    if not np.array_equal(cast(file.read(copy.key), ours.dtype), ours):
        raise AdapterFormatError(
            f"tensor {copy.key!r} differs from the base's own weight and cannot be served"
        )


def _read_module(module: BoundModule, file: SafetensorsFile, dtype: np.dtype) -> LoRAModule:
    a, b = (_read_factor(key, file, dtype) for key in (module.key_a, module.key_b))
    if module.transposed:
        a, b = a.T, b.T
    for key, factor in zip(module.copies, (a, b), strict=False):
        if not np.array_equal(_read_factor(key, file, dtype), factor):
            raise AdapterFormatError(
                f"tensor {key!r} differs from the factor of embed_tokens that it is tied to"
            )
    return LoRAModule(a=a, b=b, scaling=module.scaling)


def _read_factor(key: str, file: SafetensorsFile, dtype: np.dtype) -> np.ndarray:
    return finite_cast(file.read(key), dtype, f"tensor {key!r}")
