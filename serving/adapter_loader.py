"""Loading, replacing, blending and unloading adapters while the engine serves.

Reading, validating and packing happen on the caller's thread; the registry is told last, so a failed
load leaves no trace. The engine's thread only ever sees whole adapters that are ready to be written
to a slot.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from lorajax.config import ModelConfig
from lorajax.errors import AdapterFormatError, ConfigError, LoraJaxError
from lorajax.lora.blend import blend_adapters
from lorajax.lora.peft import load_peft
from lorajax.lora.source import find_adapter
from lorajax.lora.weights import AdapterWeights
from serving.adapter_registry import AdapterRegistry
from serving.config import EngineConfig
from serving.model_runner import ModelRunner
from serving.outputs import AdapterStatus
from serving.scheduler import Scheduler

AdapterSource = str | Path | AdapterWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostAdapter:
    """What the registry keeps of an adapter: immutable, and all that a slot write needs."""

    weights: AdapterWeights
    packed: nnx.State
    source: AdapterSource | Mapping[str, float]
    pinned: bool
