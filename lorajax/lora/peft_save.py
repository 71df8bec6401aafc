"""`AdapterWeights` → a PEFT folder that PEFT itself loads.

Invariant: `load_peft` of the folder gives the same arrays, dtypes and scalings. The folder appears
whole or not at all: it is written beside its place and renamed.
"""

import collections
import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lorajax.checkpoints.safetensors_file import DTYPES
from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.adapter_folder import TENSORS_NAME
from lorajax.lora.peft_config import CONFIG_NAME
from lorajax.lora.peft_keys import PEFT_PREFIX
from lorajax.lora.targets import hf_name, is_adaptable
from lorajax.lora.weights import AdapterWeights, LoRAModule


def save_peft(weights: AdapterWeights, folder: str | Path, *, base_model_name: str = "") -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`.

    The commonest rank and scaling become `r` and `lora_alpha`; modules that differ are listed in
    `rank_pattern` and `alpha_pattern` by their full names. Scalings that came from one PEFT config
    are kept to the last bit; of others the nearest that alpha / r can express is taken.

    folder: must not exist, or be empty. base_model_name: what PEFT shall take for the base.

    Raises:
        ConfigError: something is in the folder already.
        AdapterFormatError: a module name or dtype that a PEFT file cannot hold, or no module.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder {folder.name!r} is not empty; an adapter is never written over another")
    config, tensors = adapter_config(weights, base_model_name), _tensors(weights)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        save_file(tensors, draft / TENSORS_NAME, metadata={"format": "pt"})
        (draft / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def adapter_config(weights: AdapterWeights, base_model_name: str = "") -> dict[str, Any]:
    """The fields of `adapter_config.json` that describe the adapter in full."""
    if not weights.modules:
        raise AdapterFormatError("the adapter holds no LoRA module")
    if unknown := [path for path in weights.modules if not is_adaptable(path)]:
        raise AdapterFormatError(f"{unknown[0]!r} is not a module that an adapter can have")
    ranks = {hf_name(path): module.rank for path, module in weights.modules.items()}
    use_rslora, alphas = _alphas(weights)
    r = _commonest(ranks.values())
    lora_alpha = _commonest(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "r": r,
        "lora_alpha": _as_json(lora_alpha),
        "use_rslora": use_rslora,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {name: _as_json(alpha) for name, alpha in alphas.items() if alpha != lora_alpha},
        "target_modules": list(ranks),
        "bias": "none",
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }


def _alphas(weights: AdapterWeights) -> tuple[bool, dict[str, float]]:
    """Module name → alpha, and whether alpha / sqrt(r) expresses the scalings better than alpha / r."""
    candidates = []
    for use_rslora in (False, True):
        found = {hf_name(path): _alpha(module, use_rslora) for path, module in weights.modules.items()}
        inexact = sum(not exact for _, exact in found.values())
        kinds = len({alpha for alpha, _ in found.values()})
        candidates.append((inexact, kinds, use_rslora, {name: alpha for name, (alpha, _) in found.items()}))
    _, _, use_rslora, alphas = min(candidates, key=lambda candidate: candidate[:3])
    return use_rslora, alphas


def _alpha(module: LoRAModule, use_rslora: bool) -> tuple[float, bool]:
    """The alpha that gives a module's scaling after rounding, and whether it does so exactly."""
    divisor = math.sqrt(module.rank) if use_rslora else module.rank
    near = module.scaling * divisor
    tries = [float(round(near)), near]
    for direction in (-math.inf, math.inf):
        alpha = near
        for _ in range(4):
            alpha = math.nextafter(alpha, direction)
            tries.append(alpha)
    return next(((alpha, True) for alpha in tries if alpha / divisor == module.scaling), (near, False))


def _commonest(values: Any) -> Any:
    return collections.Counter(values).most_common(1)[0][0]


def _as_json(alpha: float) -> int | float:
    return int(alpha) if alpha.is_integer() else alpha


def _tensors(weights: AdapterWeights) -> dict[str, np.ndarray]:
    tensors = {}
    for path, module in weights.modules.items():
        for factor, value in (("A", module.a), ("B", module.b)):
            array = np.ascontiguousarray(value)
            if array.dtype not in DTYPES.values():
                raise AdapterFormatError(
                    f"{path}: dtype {array.dtype}; a PEFT file holds {', '.join(DTYPES)}"
                )
            suffix = f"lora_embedding_{factor}" if path == "embed_tokens" else f"lora_{factor}.weight"
            tensors[f"{PEFT_PREFIX}{hf_name(path)}.{suffix}"] = array
    return tensors
