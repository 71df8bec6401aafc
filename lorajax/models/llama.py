"""Llama's key table. Mistral, Qwen2 and Qwen3 differ from it by what their `ModelConfig` says
(biases, head norms), so they share it."""

from lorajax.config import ModelConfig
from lorajax.models.key_table import ALL, KeyRule, KeyTable, Region


def key_table(config: ModelConfig) -> KeyTable:
    """Rules for every tensor of a Llama-shaped checkpoint."""
    return (*_outer_rules(config), *_attention_rules(config), *_mlp_rules(config))


def _outer_rules(config: ModelConfig) -> list[KeyRule]:
    d_model, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    head = None if config.tie_word_embeddings else "lm_head.weight"
    layer = "model.layers.{layer}."
    norms = ["input_layernorm", "post_attention_layernorm"]
    return [
        KeyRule(key="model.embed_tokens.weight", path="embed_tokens.weight", shape=table),
        KeyRule(key="lm_head.weight", path=head, shape=table),
        KeyRule(key="model.norm.weight", path="norm.weight", shape=(d_model,)),
        *(KeyRule(key=f"{layer}{n}.weight", path=f"layers.{n}.weight", shape=(d_model,)) for n in norms),
        KeyRule(key=f"{layer}self_attn.rotary_emb.inv_freq", path=None),
    ]


def _attention_rules(config: ModelConfig) -> list[KeyRule]:
    """q, k and v share one array of kv-head groups; see `QKVLinear` for the order of a group's rows."""
    d_model, head_dim, groups = config.hidden_size, config.head_dim, config.num_kv_heads
    attention, path = "model.layers.{layer}.self_attn.", "layers.self_attn."
    end_q = config.num_query_groups * head_dim
    rows = {
        "q_proj": slice(0, end_q),
        "k_proj": slice(end_q, end_q + head_dim),
        "v_proj": slice(end_q + head_dim, end_q + 2 * head_dim),
    }
    rules = []
    for name, part in rows.items():
        size = part.stop - part.start
        region: Region = (slice(None), part)
        rules.append(
            KeyRule(
                key=f"{attention}{name}.weight",
                path=f"{path}qkv_proj.weight",
                shape=(groups * size, d_model),
                view=(groups, size, d_model),
                region=region,
            )
        )
        if config.qkv_bias:
            rules.append(
                KeyRule(
                    key=f"{attention}{name}.bias",
                    path=f"{path}qkv_proj.bias",
                    shape=(groups * size,),
                    view=(groups, size),
                    region=region,
                )
            )
    rules += _linear_rules(
        f"{attention}o_proj",
        f"{path}o_proj",
        (d_model, config.num_attention_heads * head_dim),
        use_bias=config.attention_output_bias,
    )
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            rules.append(
                KeyRule(key=f"{attention}{name}.weight", path=f"{path}{name}.weight", shape=(head_dim,))
            )
    return rules


def _mlp_rules(config: ModelConfig) -> list[KeyRule]:
    d_model, d_ff, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    mlp, path = "model.layers.{layer}.mlp.", "layers.mlp."
    return [
        *_linear_rules(f"{mlp}gate_proj", f"{path}gate_up_proj", (d_ff, d_model), use_bias=bias, region=(0,)),
        *_linear_rules(f"{mlp}up_proj", f"{path}gate_up_proj", (d_ff, d_model), use_bias=bias, region=(1,)),
        *_linear_rules(f"{mlp}down_proj", f"{path}down_proj", (d_model, d_ff), use_bias=bias),
    ]


def _linear_rules(
    key: str, path: str, shape: tuple[int, int], *, use_bias: bool, region: Region = ALL
) -> list[KeyRule]:
    rules = [KeyRule(key=f"{key}.weight", path=f"{path}.weight", shape=shape, region=region)]
    if use_bias:
        rules.append(KeyRule(key=f"{key}.bias", path=f"{path}.bias", shape=shape[:1], region=region))
    return rules
