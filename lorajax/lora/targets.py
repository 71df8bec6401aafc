"""What can be adapted in a model, and where each piece sits in the (fused) linears that run.

Invariant: one `AdapterTarget` per linear that the checkpoint names, so that a path of an adapter
binds to exactly one member of exactly one linear, or to none.
"""

import dataclasses
import re

from lorajax.config import ModelConfig

_ADAPTABLE = re.compile(
    r"embed_tokens|lm_head|layers\.(0|[1-9]\d*)\."
    r"(self_attn\.[qkvo]_proj|mlp\.(experts\.(0|[1-9]\d*)\.)?(gate|up|down)_proj)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """One adaptable linear.

    path: canonical path, "layers.0.self_attn.q_proj".
    layer: index of its decoder layer; None for `embed_tokens` and `lm_head`.
    module: where it runs, as a path inside a decoder layer: "self_attn.qkv_proj"; or "lm_head".
    member: its position in a fused linear: 0, 1, 2 for q, k, v; 0, 1 for gate, up; otherwise 0.
    d_in, d_out: input and output width in elements. For `embed_tokens` these are vocabulary and width.
    expert: index of the expert in a mixture-of-experts layer, else None.
    """

    path: str
    layer: int | None
    module: str
    member: int
    d_in: int
    d_out: int
    expert: int | None = None

    @property
    def hf_name(self) -> str:
        """The name in a Hugging Face causal language model, which patterns of an adapter match."""
        return hf_name(self.path)


def hf_name(path: str) -> str:
    """Canonical path → module name in a Hugging Face causal language model."""
    return path if path == "lm_head" else f"model.{path}"


def is_adaptable(path: str) -> bool:
    """Whether some model of the supported families has an adaptable linear of this canonical path."""
    return _ADAPTABLE.fullmatch(path) is not None


def adapter_targets(config: ModelConfig) -> dict[str, AdapterTarget]:
    """Every adaptable linear of the model, keyed by canonical path, in the order of the layers."""
    hidden, vocab = config.hidden_size, config.vocab_size
    d_q, d_kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_kv_heads))
    attention = [
        ("q_proj", "self_attn.qkv_proj", 0, hidden, d_q),
        ("k_proj", "self_attn.qkv_proj", 1, hidden, d_kv),
        ("v_proj", "self_attn.qkv_proj", 2, hidden, d_kv),
        ("o_proj", "self_attn.o_proj", 0, d_q, hidden),
    ]
    targets = [_whole_model_target("embed_tokens", vocab, hidden)]
    sparse_layers = config.moe.sparse_layers if config.moe else ()
    for layer in range(config.num_layers):
        targets += [
            AdapterTarget(
                path=f"layers.{layer}.self_attn.{name}",
                layer=layer,
                module=module,
                member=member,
                d_in=d_in,
                d_out=d_out,
            )
            for name, module, member, d_in, d_out in attention
        ]
        if config.moe and layer in sparse_layers:
            for expert in range(config.moe.num_experts):
                targets += _mlp_targets(layer, hidden, config.moe.intermediate_size, expert)
        else:
            targets += _mlp_targets(layer, hidden, config.intermediate_size, None)
    targets.append(_whole_model_target("lm_head", hidden, vocab))
    return {target.path: target for target in targets}


def _whole_model_target(name: str, d_in: int, d_out: int) -> AdapterTarget:
    return AdapterTarget(path=name, layer=None, module=name, member=0, d_in=d_in, d_out=d_out)


def _mlp_targets(layer: int, hidden: int, width: int, expert: int | None) -> list[AdapterTarget]:
    owner = "mlp" if expert is None else f"mlp.experts.{expert}"
    runs_in = "mlp" if expert is None else "mlp.experts"
    projections = [
        ("gate_proj", "gate_up_proj", 0, hidden, width),
        ("up_proj", "gate_up_proj", 1, hidden, width),
        ("down_proj", "down_proj", 0, width, hidden),
    ]
    return [
        AdapterTarget(
            path=f"layers.{layer}.{owner}.{name}",
            layer=layer,
            module=f"{runs_in}.{fused}",
            member=member,
            d_in=d_in,
            d_out=d_out,
            expert=expert,
        )
        for name, fused, member, d_in, d_out in projections
    ]
