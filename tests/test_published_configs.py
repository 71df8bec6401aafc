"""config.json as well-known models publish it, whole: nothing is refused, and the sizes come out right."""

import pytest

from lorajax.config import ModelConfig, MoEConfig, RopeConfig
from lorajax.errors import ConfigError

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
LLAMA_31_8B = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.42.3",
    "vocab_size": 128256,
}
LLAMA_2_70B = {
    **COMMON,
    "_name_or_path": "meta-llama/Llama-2-70b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "max_sequence_length": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pad_token_id": -1,
    "pretraining_tp": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.31.0",
    "vocab_size": 32000,
}
SMOLLM2_135M = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "vocab_size": 49152,
}
MISTRAL_7B_V01 = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "transformers_version": "4.34.0.dev0",
    "vocab_size": 32000,
}
MISTRAL_NEMO = {
    **MISTRAL_7B_V01,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN25_7B = {
    **COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "transformers_version": "4.43.1",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
# sizes: query heads, kv heads, head_dim, layers, longest sequence
PUBLISHED = {
    "llama_31_8b": (LLAMA_31_8B, (32, 8, 128, 32, 131072)),
    "llama_2_70b": (LLAMA_2_70B, (64, 8, 128, 80, 4096)),
    "smollm2_135m": (SMOLLM2_135M, (9, 3, 64, 30, 8192)),
    "mistral_7b_v01": (MISTRAL_7B_V01, (32, 8, 128, 32, 32768)),
    "mistral_nemo": (MISTRAL_NEMO, (32, 8, 128, 40, 131072)),
    "qwen25_7b": (QWEN25_7B, (28, 4, 128, 28, 32768)),
    "qwen3_8b": (QWEN3_8B, (32, 8, 128, 36, 40960)),
    "qwen3_30b_a3b": (QWEN3_30B_A3B, (32, 4, 128, 48, 40960)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_is_read_whole(name):
    published, sizes = PUBLISHED[name]
    config = ModelConfig.from_hf(published)
    heads = (config.num_attention_heads, config.num_kv_heads, config.head_dim)
    assert (*heads, config.num_layers, config.max_position_embeddings) == sizes
    assert (config.hidden_size, config.vocab_size) == (published["hidden_size"], published["vocab_size"])
    assert config.tie_word_embeddings is published["tie_word_embeddings"]
    assert config.qk_norm is (config.architecture in ("qwen3", "qwen3_moe"))
    assert config.qkv_bias is (config.architecture == "qwen2")
    assert not config.attention_output_bias
    assert not config.mlp_bias


def test_what_sets_them_apart():
    rope = RopeConfig(
        theta=500_000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert ModelConfig.from_hf(LLAMA_31_8B).rope == rope
    assert ModelConfig.from_hf(LLAMA_31_8B).eos_token_ids == (128001, 128008, 128009)
    assert ModelConfig.from_hf(MISTRAL_7B_V01).sliding_window == (4096,) * 32
    for full in (MISTRAL_NEMO, QWEN25_7B, QWEN3_8B, QWEN3_30B_A3B):
        assert ModelConfig.from_hf(full).sliding_window == ()
    assert ModelConfig.from_hf(QWEN3_30B_A3B).moe == MoEConfig(
        num_experts=128,
        num_experts_per_token=8,
        intermediate_size=768,
        norm_topk_prob=True,
        sparse_layers=tuple(range(48)),
    )


def test_yarn_as_qwens_model_cards_ask_to_add_it():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    for config, spelling in ((QWEN25_7B, "type"), (QWEN3_8B, "rope_type")):
        found = ModelConfig.from_hf({**config, "rope_scaling": {**yarn, spelling: "yarn"}})
        assert (found.rope.rope_type, found.max_position_embeddings) == ("yarn", 131072)


def test_quantised_editions_are_refused_by_their_method():
    awq = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
    with pytest.raises(ConfigError, match="quantised by 'awq'"):
        ModelConfig.from_hf({**QWEN25_7B, "quantization_config": awq})


def test_an_attention_that_is_not_served_is_refused_by_name():
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    with pytest.raises(ConfigError, match="dual_chunk_attention_config"):
        ModelConfig.from_hf({**QWEN25_7B, "dual_chunk_attention_config": chunks})
