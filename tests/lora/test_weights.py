import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_files import LINEARS, TOY, TOY_MOE, WIDTHS, lora_tensors, write_adapter

from lorajax.errors import AdapterCapacityError, AdapterFormatError
from lorajax.lora.binding import check_limits, check_weights
from lorajax.lora.host_copy import host_copy
from lorajax.lora.peft import load_peft
from lorajax.lora.targets import adapter_targets, is_adaptable
from lorajax.lora.weights import AdapterWeights, LoRAModule


def module(rank=2, d_in=16, d_out=32, scaling=2.0, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rank, d_in)), rng.standard_normal((d_out, rank))
    return LoRAModule(a=a.astype(np.float32), b=b.astype(np.float32), scaling=scaling)


def test_properties():
    weights = AdapterWeights(
        modules={
            "layers.0.self_attn.q_proj": module(2),
            "layers.1.self_attn.q_proj": module(5),
            "lm_head": module(1, 16, 40),
        }
    )
    assert weights.rank == 5
    assert weights.num_parameters == 2 * 48 + 5 * 48 + 56
    assert weights.target_modules == ("lm_head", "q_proj")
    assert AdapterWeights(modules={}).rank == 0


def test_a_pytree_with_float_leaves_and_static_scalings(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a"), TOY)
    leaves, structure = jax.tree.flatten(weights)
    assert len(leaves) == 8
    assert all(leaf.dtype == np.float32 for leaf in leaves)
    assert jax.tree.unflatten(structure, leaves).modules.keys() == weights.modules.keys()


def test_gradients_are_adapters():
    weights = AdapterWeights(modules={"lm_head": module(2, 16, 40, scaling=0.5)})
    x = jnp.ones((1, 16))

    @jax.jit
    def loss(weights):
        head = weights.modules["lm_head"]
        return (head.scaling * (x @ head.a.T @ head.b.T)).sum()

    gradient = jax.grad(loss)(weights)
    assert isinstance(gradient, AdapterWeights)
    expected = 0.5 * np.outer(np.ones(40), weights.modules["lm_head"].a.sum(axis=1))
    np.testing.assert_allclose(gradient.modules["lm_head"].b, expected, rtol=1e-5)
    assert gradient.modules["lm_head"].scaling == 0.5


@pytest.mark.parametrize("config", [TOY, TOY_MOE], ids=["dense", "moe"])
def test_targets(config):
    targets = adapter_targets(config)
    assert all(is_adaptable(path) and target.path == path for path, target in targets.items())
    dense_layers = [0] if config.moe else [0, 1]
    for layer in (0, 1):
        for member, leaf in enumerate(("q_proj", "k_proj", "v_proj")):
            target = targets[f"layers.{layer}.self_attn.{leaf}"]
            assert (target.layer, target.module, target.member) == (layer, "self_attn.qkv_proj", member)
    for layer in dense_layers:
        assert targets[f"layers.{layer}.mlp.up_proj"].module == "mlp.gate_up_proj"
        assert targets[f"layers.{layer}.mlp.up_proj"].member == 1
    for path, target in targets.items():
        if target.expert is None:
            assert (target.d_in, target.d_out) == WIDTHS[path.rpartition(".")[2]]
    places = {(target.layer, target.module, target.member, target.expert) for target in targets.values()}
    assert len(places) == len(targets) == 2 + (2 * 7 if config.moe is None else 7 + 4 + 3 * 3)
    if config.moe:
        expert = targets["layers.1.mlp.experts.2.down_proj"]
        assert (expert.module, expert.expert, expert.d_in, expert.d_out) == (
            "mlp.experts.down_proj",
            2,
            12,
            16,
        )
        assert "layers.1.mlp.up_proj" not in targets


@pytest.mark.parametrize(
    "path", ["layers.01.mlp.up_proj", "layers.0.self_attn.qkv_proj", "model.lm_head", "", "layers.0.mlp"]
)
def test_paths_that_no_model_has(path):
    assert not is_adaptable(path)


def test_arrays_from_memory_are_held_against_the_base():
    good = AdapterWeights(modules={"layers.1.self_attn.q_proj": module()})
    check_weights(good, TOY)
    for modules, message in (
        ({}, "no LoRA module"),
        ({"layers.2.self_attn.q_proj": module()}, "layers 0 to 1"),
        ({"q_proj": module()}, "not in the base"),
        ({"layers.0.self_attn.k_proj": module()}, r"expected A \[2, 16\] and B \[16, 2\]"),
    ):
        with pytest.raises(AdapterFormatError, match=message):
            check_weights(AdapterWeights(modules=modules), TOY)


def test_limits():
    ranks = {"layers.0.self_attn.q_proj": 4, "layers.1.mlp.experts.0.up_proj": 8}
    check_limits(ranks, max_rank=8, target_modules=None, experts=True)
    with pytest.raises(AdapterCapacityError, match=r"rank 8 of 'layers.1.mlp.experts.0.up_proj'"):
        check_limits(ranks, max_rank=7, target_modules=None, experts=True)
    with pytest.raises(AdapterFormatError, match="adapts none"):
        check_limits(ranks, max_rank=8, target_modules=[], experts=True)


def test_host_copies_share_nothing_and_never_change():
    source = np.ones((2, 16), np.float32)
    weights = AdapterWeights(modules={"lm_head": LoRAModule(a=source, b=jnp.ones((40, 2)), scaling=1.0)})
    copy = host_copy(weights, np.float32)
    source[:] = 7
    assert (copy.modules["lm_head"].a == 1).all()
    for array in (copy.modules["lm_head"].a, copy.modules["lm_head"].b):
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
        assert not np.shares_memory(array, source)


def test_host_copies_are_finite():
    weights = AdapterWeights(
        modules={"lm_head": LoRAModule(a=jnp.full((2, 16), 1e5), b=jnp.ones((40, 2)), scaling=1.0)}
    )
    host_copy(weights, jnp.bfloat16)
    with pytest.raises(AdapterFormatError, match="lm_head: A holds values that are not finite in float16"):
        host_copy(weights, np.float16)


def test_the_toy_widths_are_complete():
    assert set(WIDTHS) == {*LINEARS, "embed_tokens", "lm_head"}
    assert len(lora_tensors(tuple(WIDTHS))) == 2 * (2 * 7 + 2)
