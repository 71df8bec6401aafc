"""Writes cases.json: what the models of transformers make of a config.json, spelled in many ways.

Run with the `parity` extra: `python tests/golden/hf_config/write.py`.
"""

import copy
import json
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SHARED = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA = {**SHARED, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
MISTRAL = {**SHARED, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e6}
QWEN2 = {**SHARED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6}
QWEN3 = {**SHARED, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6}
MOE = {
    **SHARED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rope_theta": 1e6,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def v5(config, **rope):
    """The spelling of transformers 5: theta inside rope_parameters."""
    settings = {"rope_theta": config["rope_theta"], "rope_type": "default", **rope}
    return {**without(config, "rope_theta", "rope_scaling"), "rope_parameters": settings}


CASES = {
    "llama": LLAMA,
    "llama_old": without(LLAMA, "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    "llama_biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_head_dim": {**LLAMA, "head_dim": 16},
    "llama_nulls": {**LLAMA, "head_dim": None, "rope_scaling": None, "num_key_value_heads": None},
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "llama_no_architectures": without(LLAMA, "architectures"),
    "llama_v5": v5({**LLAMA, "rope_theta": 5e5}),
    "llama_linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama_linear_v5": v5(LLAMA, rope_type="linear", factor=2.0),
    "llama_dynamic": {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama_llama3": {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama_llama3_both_types": {
        **LLAMA,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3},
    },
    "llama_llama3_old_type": {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama_llama3_v5": v5({**LLAMA, "rope_theta": 5e5}, **{**LLAMA3, "rope_type": "llama3"}),
    "llama_llama3_theta_outside": {
        **LLAMA,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
    "llama_yarn": {**LLAMA, "rope_scaling": YARN},
    "llama_yarn_no_original": {**LLAMA, "rope_scaling": without(YARN, "original_max_position_embeddings")},
    "llama_yarn_attention_factor": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.25}},
    "llama_yarn_mscale_1": {**LLAMA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "llama_yarn_mscale": {**LLAMA, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "llama_yarn_mscale_0": {**LLAMA, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
    "llama_yarn_betas": {**LLAMA, "rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}},
    "llama_yarn_no_truncate": {**LLAMA, "rope_scaling": {**YARN, "truncate": False}},
    "mistral": {**MISTRAL, "sliding_window": 8},
    "mistral_null": {**MISTRAL, "sliding_window": None},
    "mistral_absent": MISTRAL,
    "mistral_absent_kv": {**without(MISTRAL, "num_key_value_heads"), "num_attention_heads": 8},
    "mistral_head_dim": {**MISTRAL, "head_dim": 16, "sliding_window": None},
    "mistral_v5": v5({**MISTRAL, "sliding_window": None}),
    "qwen2": {**QWEN2, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1},
    "qwen2_no_flag": {**QWEN2, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_windows": {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_windows_above": {
        **QWEN2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 28,
    },
    "qwen2_layer_types": {
        **QWEN2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "qwen2_layer_types_full": {**QWEN2, "layer_types": ["full_attention"] * 3, "sliding_window": None},
    "qwen2_yarn": {**QWEN2, "rope_scaling": {**without(YARN, "rope_type"), "type": "yarn"}},
    "qwen2_v5": v5(QWEN2),
    "qwen3": {**QWEN3, "head_dim": 16},
    "qwen3_absent_head_dim": QWEN3,
    "qwen3_bias": {**QWEN3, "head_dim": 16, "attention_bias": True},
    "qwen3_windows": {
        **QWEN3,
        "head_dim": 16,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "qwen3_v5": v5({**QWEN3, "head_dim": 16}),
    "moe": MOE,
    "moe_head_dim": {**MOE, "head_dim": 16, "norm_topk_prob": True},
    "moe_local_experts": {**without(MOE, "num_experts"), "num_local_experts": 4},
    "moe_step": {**MOE, "decoder_sparse_step": 2},
    "moe_dense_layers": {**MOE, "mlp_only_layers": [0, 2]},
    "moe_windows": {**MOE, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "moe_no_flag": {**MOE, "sliding_window": 8, "max_window_layers": 2},
    "moe_v5": v5(MOE),
}


def described(config):
    """What transformers builds for a config.json, read off its modules."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        parsed = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(parsed))
    layers = model.model.layers
    attention, rotary = layers[0].self_attn, model.model.rotary_emb
    dense = next((layer.mlp for layer in layers if hasattr(layer.mlp, "gate_proj")), None)
    sparse = [i for i, layer in enumerate(layers) if not hasattr(layer.mlp, "gate_proj")]
    windows = [
        getattr(layer.self_attn, "sliding_window", getattr(parsed, "sliding_window", None)) or 0
        for layer in layers
    ]
    return {
        "head_dim": attention.head_dim,
        "num_kv_heads": attention.k_proj.out_features // attention.head_dim,
        "max_position_embeddings": parsed.max_position_embeddings,
        "rms_norm_eps": model.model.norm.variance_epsilon,
        "tie_word_embeddings": model.lm_head.weight is model.model.embed_tokens.weight,
        "qkv_bias": attention.q_proj.bias is not None,
        "attention_output_bias": attention.o_proj.bias is not None,
        "mlp_bias": dense is not None and dense.gate_proj.bias is not None,
        "qk_norm": hasattr(attention, "q_norm"),
        "sliding_window": windows,
        "inv_freq": rotary.inv_freq.tolist(),
        "attention_factor": float(rotary.attention_scaling),
        "moe": None
        if not sparse
        else {
            "num_experts": layers[sparse[0]].mlp.gate.num_experts,
            "num_experts_per_token": layers[sparse[0]].mlp.gate.top_k,
            "intermediate_size": parsed.moe_intermediate_size,
            "norm_topk_prob": layers[sparse[0]].mlp.gate.norm_topk_prob,
            "sparse_layers": sparse,
        },
    }


def main():
    torch.manual_seed(0)
    cases = {name: {"config": config, "expected": described(config)} for name, config in CASES.items()}
    document = {"transformers": transformers.__version__, "cases": cases}
    lines = json.dumps(document, indent=1)
    (Path(__file__).parent / "cases.json").write_text(lines + "\n")
    print(f"{len(cases)} cases, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
