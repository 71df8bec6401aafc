"""`lorajax inspect`: what is in a folder or file, and whether it can be served."""

import math
from pathlib import Path

from lorajax.checkpoints import Checkpoint, open_checkpoint
from lorajax.lora.inspect import AdapterReport, inspect_adapter


def inspect_path(path: Path, model: str | None = None) -> AdapterReport:
    """Describe an adapter folder (against `model`, if given) or a base checkpoint.

    Raises CheckpointError or ConfigError for a checkpoint that cannot be served.
    """
    if path.is_dir() and (path / "adapter_config.json").exists():
        config = None if model is None else open_checkpoint(model).config
        return inspect_adapter(path, config, experts=False)
    return AdapterReport(_describe(open_checkpoint(path), path.name), None)


def _describe(checkpoint: Checkpoint, name: str) -> str:
    config = checkpoint.config
    parameters = sum(math.prod(checkpoint.tensors.shape(key)) for key in list(checkpoint.tensors.keys()))
    return (
        f"{config.architecture} checkpoint {name!r}\n"
        f"  {parameters:,} parameters in {len(list(checkpoint.tensors.keys()))} tensors\n"
        f"  {config.num_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads and "
        f"{config.num_kv_heads} kv heads of {config.head_dim}, vocabulary {config.vocab_size}\n"
        f"  up to {config.max_position_embeddings} tokens, rope {config.rope.rope_type} with theta "
        f"{config.rope.theta:g}, {'tied' if config.tie_word_embeddings else 'untied'} embeddings\n"
        "can be served"
    )
