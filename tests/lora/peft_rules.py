"""What PEFT itself does with a `LoraConfig`: asked live in `make parity`, and kept as golden values."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
RULES_FILE = GOLDEN / "peft" / "lora_config_rules.json"
BASE = GOLDEN / "tiny" / "llama_gqa_llama3rope"

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

# LoraConfig arguments; each is applied to the tiny Llama with 3 layers.
CASES: dict[str, dict[str, Any]] = {
    "leaf_name": {"target_modules": ALL, "rank_pattern": {"q_proj": 4}},
    "path_in_layer": {"target_modules": ALL, "rank_pattern": {"layers.0.self_attn.q_proj": 32}},
    "regex": {"target_modules": ALL, "rank_pattern": {r".*\.layers\.1\..*(q_proj|v_proj)$": 2}},
    "anchored": {"target_modules": ALL, "rank_pattern": {"^model.layers.0.mlp.up_proj": 4}},
    "anchored_unmatched": {"target_modules": ALL, "rank_pattern": {"^q_proj": 100}},
    "no_dot_before": {"target_modules": ALL, "rank_pattern": {"_proj": 3, "attn.q_proj": 5}},
    "first_of_two": {"target_modules": ALL, "rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 2}},
    "first_of_two_reversed": {
        "target_modules": ALL,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 4},
    },
    "alpha_only": {"target_modules": ALL, "alpha_pattern": {"v_proj": 3, r"layers\.[02]\..*k_proj": 2.5}},
    "rank_and_alpha_apart": {
        "target_modules": ATTENTION,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 5, "layers.2.self_attn.q_proj": 7},
    },
    "rslora": {"target_modules": ATTENTION, "use_rslora": True},
    "rslora_patterns": {
        "target_modules": ATTENTION,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "layers.1.self_attn.o_proj": 6},
        "alpha_pattern": {"o_proj": 2.5},
    },
    "alternatives": {"target_modules": ALL, "rank_pattern": {"q_proj|up_proj": 5, "x|y|": 7}},
    "lazy_and_counted": {"target_modules": ALL, "rank_pattern": {r"layers\.\d{1,2}\..+?_attn\.[qk]_proj": 3}},
    "look_around": {"target_modules": ALL, "rank_pattern": {r"(?!.*mlp).*(?<!q)_proj": 3}},
    "head_and_embedding": {
        "target_modules": ["lm_head", "embed_tokens", "q_proj"],
        "rank_pattern": {"embed_tokens": 3, "lm_head": 5},
        "alpha_pattern": {"model.embed_tokens": 9},
    },
    "target_regex": {"target_modules": r".*\.layers\.[01]\..*(q|v)_proj"},
    "target_regex_is_whole_name": {"target_modules": r"model\.layers\.2\.mlp\.(up|gate)_proj"},
    "target_all_linear": {"target_modules": "all-linear"},
    "target_full_names": {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.2.mlp.up_proj"]},
    "excluded": {"target_modules": ALL, "exclude_modules": ["layers.1.self_attn.q_proj", "up_proj"]},
    "excluded_regex": {"target_modules": ALL, "exclude_modules": r".*\.(q|k)_proj"},
    "one_layer": {"target_modules": ALL, "layers_to_transform": 1},
    "two_layers": {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0, 2]},
    "layers_pattern": {"target_modules": ["v_proj"], "layers_to_transform": [2], "layers_pattern": "layers"},
    "layers_pattern_wrong": {
        "target_modules": ["v_proj", "model.layers.0.self_attn.q_proj"],
        "layers_to_transform": [2],
        "layers_pattern": ["h", "blocks"],
    },
    "no_layer_listed": {"target_modules": ["q_proj"], "layers_to_transform": []},
}


def golden_rules() -> dict[str, dict[str, list]]:
    """Case → module name → [rank, scaling], as PEFT 0.21 computed them."""
    return json.loads(RULES_FILE.read_text())


def ask_peft(arguments: dict[str, Any]) -> dict[str, list]:
    """Module name → [rank, scaling] of the layers that PEFT makes for these arguments."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **arguments))
    return {
        name.removeprefix("base_model.model."): [layer.r["default"], layer.scaling["default"]]
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
