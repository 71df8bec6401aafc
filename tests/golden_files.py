"""Checked-in numbers from transformers + PEFT: tiny checkpoints with adapters, and SmolLM2's first tokens.

`expected_logits.npz` holds float32 logits under "adapter/prompt", "base" for no adapter.
"""

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
TINY_LLAMA = GOLDEN / "tiny" / "llama_gqa_llama3rope"


def prompts_of(checkpoint: Path) -> list[list[int]]:
    return json.loads((checkpoint / "prompts.json").read_text())


def adapters_of(checkpoint: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((checkpoint / "adapters").iterdir())}


def expected_logits(checkpoint: Path) -> dict[str, np.ndarray]:
    with np.load(checkpoint / "expected_logits.npz") as stored:
        return dict(stored)


def smollm2_answers() -> list[dict]:
    return json.loads((GOLDEN / "smollm2" / "expected_greedy.json").read_text())
