"""lorajax: multi-LoRA models in JAX, usable from a notebook with no engine.

`load_model` and `load_adapter` read checkpoints, `forward` runs them, differentiably; the engine that
serves the same modules is in the package `serving`.
"""

from lorajax.config import ModelConfig
from lorajax.forward import forward
from lorajax.load import load_adapter, load_model
from lorajax.lora.add_lora import add_lora
from lorajax.lora.slots import LoRAConfig
from lorajax.lora.weights import AdapterWeights

__all__ = [
    "AdapterWeights",
    "LoRAConfig",
    "ModelConfig",
    "add_lora",
    "forward",
    "load_adapter",
    "load_model",
]
