import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_files import TOY, lora_tensors, write_adapter
from flax import linen, nnx

from lorajax.errors import AdapterFormatError, ConfigError
from lorajax.lora.orbax_adapter import is_orbax_folder
from lorajax.lora.peft import load_peft
from lorajax.lora.weights import AdapterWeights

Q, V = "layers.{}.self_attn.q_proj", "layers.{}.self_attn.v_proj"
X = np.random.default_rng(3).standard_normal((5, 16)).astype(np.float32)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.LoRALinear(16, 32, lora_rank=2, b_initializer=nnx.initializers.normal(), rngs=rngs)
        base = nnx.Linear(16, 16, rngs=rngs)
        self.v_proj = nnx.LoRA(
            16, 3, 16, base_module=base, b_initializer=nnx.initializers.normal(), rngs=rngs
        )


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn = Attention(rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


def spellings(model):
    state = nnx.state(model, nnx.LoRAParam)
    pure = nnx.to_pure_dict(state)
    flat = nnx.to_flat_state(state)
    return {
        "state": state,
        "pure": pure,
        "params": {"params": {"model": pure}},
        "tuples": dict(flat),
        "dotted": {".".join(map(str, path)): value[...] for path, value in flat},
        "slashes": {"/".join(map(str, path)): value[...] for path, value in flat},
        "numpy": jax.tree.map(np.asarray, pure),
    }


def applied(module, x=X):
    return module.scaling * (x @ np.asarray(module.a).T @ np.asarray(module.b).T)


@pytest.mark.parametrize("spelling", ["state", "pure", "params", "tuples", "dotted", "slashes", "numpy"])
def test_nnx_states_compute_what_the_layers_compute(model, spelling):
    weights = AdapterWeights.from_pytree(spellings(model)[spelling], config=TOY)
    assert set(weights.modules) == {name.format(layer) for name in (Q, V) for layer in (0, 1)}
    for i, layer in enumerate(model.layers):
        np.testing.assert_allclose(
            applied(weights.modules[Q.format(i)]), layer.self_attn.q_proj.lora(X), rtol=1e-4, atol=1e-5
        )
        base = layer.self_attn.v_proj.base_module(X)
        np.testing.assert_allclose(
            applied(weights.modules[V.format(i)]), layer.self_attn.v_proj(X) - base, rtol=1e-4, atol=1e-5
        )


def test_alpha_scales_by_each_modules_rank(model):
    weights = AdapterWeights.from_pytree(nnx.state(model, nnx.LoRAParam), alpha=6)
    assert weights.modules[Q.format(0)].scaling == 3.0
    assert weights.modules[V.format(0)].scaling == 2.0
    weights = AdapterWeights.from_pytree(nnx.state(model, nnx.LoRAParam), alpha=6, use_rslora=True)
    assert weights.modules[V.format(0)].scaling == pytest.approx(6 / 3**0.5)


def test_gradients_flow_through(model):
    def loss(state):
        module = AdapterWeights.from_pytree(state).modules[Q.format(1)]
        return ((X @ module.a.T) @ module.b.T).sum()

    gradient = nnx.to_pure_dict(jax.jit(jax.grad(loss))(nnx.state(model, nnx.LoRAParam)))
    found = gradient["layers"][1]["self_attn"]["q_proj"]["lora"]["lora_b"]
    expected = (X @ model.layers[1].self_attn.q_proj.lora.lora_a[...]).sum(axis=0)[:, None] * np.ones((1, 32))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not gradient["layers"][0]["self_attn"]["q_proj"]["lora"]["lora_b"].any()


class Low(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.normal(), (None, "x"))
        x = linen.Dense(2, use_bias=False, name="lora_a", kernel_init=init)(x)
        return linen.Dense(32, use_bias=False, name="lora_b")(x)


def test_linen_dense_factors():
    variables = Low().init(jax.random.key(0), X)
    tree = {"params": {"layers_0": {"self_attn": {"q_proj": variables["params"]}}}}
    (module,) = AdapterWeights.from_pytree(tree, config=TOY).modules.values()
    np.testing.assert_allclose(applied(module), Low().apply(variables, X), rtol=1e-4, atol=1e-5)


def qwix_leaves(shape_a, shape_b, name="kernel"):
    rng = np.random.default_rng(5)
    return {
        f"{name}_lora_a": rng.standard_normal(shape_a).astype(np.float32),
        f"{name}_lora_b": rng.standard_normal(shape_b).astype(np.float32),
    }


def test_qwix_matrices():
    leaves = qwix_leaves((16, 4), (4, 32))
    tree = {"layers": {0: {"self_attn": {"q_proj": leaves}}}}
    (module,) = AdapterWeights.from_pytree(tree, 4, 8.0).modules.values()
    np.testing.assert_allclose(
        applied(module), 2 * X @ leaves["kernel_lora_a"] @ leaves["kernel_lora_b"], rtol=1e-4
    )


def test_qwix_einsum_axes_are_flattened_in_row_order():
    """Heads and head_dim: 'BTD,DNH->BTNH' for q, 'BTNH,NHD->BTD' for o."""
    q, o = qwix_leaves((16, 4), (4, 4, 8), "w"), qwix_leaves((4, 8, 4), (4, 16), "w")
    tree = {"layers": [{"self_attn": {"q_proj": q, "o_proj": o}}]}
    weights = AdapterWeights.from_pytree(tree, alpha=4.0, config=TOY)
    expected = np.einsum("td,dr,rnh->tnh", X, q["w_lora_a"], q["w_lora_b"])
    np.testing.assert_allclose(
        applied(weights.modules[Q.format(0)]).reshape(5, 4, 8), expected, rtol=1e-4, atol=1e-4
    )
    heads = np.random.default_rng(6).standard_normal((5, 4, 8)).astype(np.float32)
    expected = np.einsum("tnh,nhr,rd->td", heads, o["w_lora_a"], o["w_lora_b"])
    found = applied(weights.modules["layers.0.self_attn.o_proj"], heads.reshape(5, 32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(AdapterFormatError, match="both must be matrices"):
        AdapterWeights.from_pytree(tree, alpha=4.0)


def test_stacked_layers():
    leaves = qwix_leaves((2, 16, 4), (2, 4, 32))
    weights = AdapterWeights.from_pytree({"layers": {"self_attn": {"q_proj": leaves}}}, alpha=4, config=TOY)
    for layer in (0, 1):
        expected = X @ leaves["kernel_lora_a"][layer] @ leaves["kernel_lora_b"][layer]
        np.testing.assert_allclose(applied(weights.modules[Q.format(layer)]), expected, rtol=1e-4, atol=1e-4)


def test_embeddings_and_heads():
    tree = {"embed_tokens": {"lora_a": np.ones((40, 2), "f"), "lora_b": np.ones((2, 16), "f")},
            "lm_head": {"lora_a": np.ones((16, 2), "f"), "lora_b": np.ones((2, 40), "f")}}  # fmt: skip
    weights = AdapterWeights.from_pytree(tree, config=TOY)
    assert weights.modules["embed_tokens"].a.shape == (2, 40)
    assert weights.modules["lm_head"].b.shape == (40, 2)


def test_state_dicts_of_peft(tmp_path):
    tensors = lora_tensors(("q_proj", "embed_tokens"))
    expected = load_peft(write_adapter(tmp_path / "a", tensors), TOY)
    in_memory = {
        key.replace(".weight", ".default.weight") if ".weight" in key else f"{key}.default": array
        for key, array in tensors.items()
    }
    for tree in (tensors, in_memory):
        found = AdapterWeights.from_pytree(tree, 4, 8, config=TOY)
        assert found.modules.keys() == expected.modules.keys()
        for path, module in expected.modules.items():
            np.testing.assert_array_equal(found.modules[path].a, module.a)
            np.testing.assert_array_equal(found.modules[path].b, module.b)
            assert found.modules[path].scaling == module.scaling


def test_an_adapter_is_its_own_source(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a"), TOY)
    assert AdapterWeights.from_pytree(weights, 4, config=TOY) is weights
    with pytest.raises(AdapterFormatError, match="alpha"):
        AdapterWeights.from_pytree(weights, 4, 8)
    with pytest.raises(AdapterFormatError, match="rank 4; expected 8"):
        AdapterWeights.from_pytree(weights, 8)


def test_names_can_be_translated():
    tree = {"blocks": {"0": {"attn": {"q": qwix_leaves((16, 4), (4, 32))}}}}
    table = {"blocks": "layers", "attn": "self_attn", "q": "q_proj"}
    for rename in (table, lambda path: ".".join(table.get(part, part) for part in path.split("."))):
        weights = AdapterWeights.from_pytree(tree, alpha=4, rename=rename, config=TOY)
        assert list(weights.modules) == [Q.format(0)]


GOOD = {"lora_a": np.ones((16, 2), np.float32), "lora_b": np.ones((2, 32), np.float32)}
q = Q.format(0)
REFUSED = {
    "empty": ({}, "no array"),
    "no_array": ({q: {"lora_a": 3, "lora_b": 4}}, "is int"),
    "integers": ({q: {**GOOD, "lora_a": np.ones((16, 2), np.int32)}}, "is int32"),
    "base_weights_too": ({q: {**GOOD, "kernel": np.ones((16, 32), "f")}}, "only the adapter's"),
    "trained_bias": ({q: {**GOOD, "bias": np.ones(32, "f")}}, "a trained bias"),
    "one_factor": ({q: {"lora_a": GOOD["lora_a"]}}, "only one factor"),
    "ranks_differ": ({q: {**GOOD, "lora_b": np.ones((3, 32), "f")}}, "no pair"),
    "vector": ({q: {**GOOD, "lora_b": np.ones(2, "f")}}, "must be matrices"),
    "rank_zero": (
        {q: {"lora_a": np.ones((16, 0), "f"), "lora_b": np.ones((0, 32), "f")}},
        "must be matrices",
    ),
    "fused": ({"layers.0.self_attn.qkv_proj": GOOD}, "not a module that an adapter can have"),
    "unknown": ({"blocks.0.attn.q": GOOD}, "see `rename`"),
    "no_module": (GOOD, "not a module"),
    "stack_of_matrices": ({"layers.self_attn.q_proj": GOOD}, "first axis of 16 layers"),
    "same_name_twice": ({q: GOOD, "layers": {"0.self_attn": {"q_proj": GOOD}}}, "two leaves are called"),
    "two_spellings": ({q: GOOD, "model." + q: GOOD}, "two leaves are factor"),
    "mixed_layouts": ({q: GOOD, V.format(0): qwix_leaves((16, 2), (2, 16))}, "mixes the layouts Flax, qwix"),
    "base_copy": (
        {q: GOOD, "model.embed_tokens.base_layer.weight": np.ones((40, 16), "f")},
        "weight of the base",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_wholly_an_adapter_is_refused(case):
    tree, message = REFUSED[case]
    with pytest.raises(AdapterFormatError, match=message):
        AdapterWeights.from_pytree(tree)


def test_alpha_where_it_is_needed():
    with pytest.raises(AdapterFormatError, match="qwix layout scales"):
        AdapterWeights.from_pytree({q: qwix_leaves((16, 2), (2, 32))})
    with pytest.raises(AdapterFormatError, match="PEFT layout scales"):
        AdapterWeights.from_pytree(lora_tensors())
    with pytest.raises(AdapterFormatError, match="alpha is missing"):
        AdapterWeights.from_pytree({q: GOOD}, use_rslora=True)
    for alpha in (float("nan"), float("inf"), 1e39):
        with pytest.raises(AdapterFormatError, match="finite number"):
            AdapterWeights.from_pytree({q: GOOD}, alpha=alpha)


def test_the_base_decides_about_shapes():
    with pytest.raises(AdapterFormatError, match=r"expected A \[2, 16\] and B \[16, 2\]"):
        AdapterWeights.from_pytree({"layers.0.self_attn.k_proj": GOOD}, config=TOY)
    three = {
        "layers.self_attn.q_proj": {"lora_a": np.ones((3, 16, 2), "f"), "lora_b": np.ones((3, 2, 32), "f")}
    }
    with pytest.raises(AdapterFormatError, match="first axis of 2 layers"):
        AdapterWeights.from_pytree(three, config=TOY)


def test_orbax_round_trip(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a", alpha_pattern={"q_proj": 2.5}), TOY, dtype=jnp.bfloat16)
    weights.save_orbax(tmp_path / "o")
    assert is_orbax_folder(tmp_path / "o")
    assert not is_orbax_folder(tmp_path / "a")
    found = AdapterWeights.load_orbax(tmp_path / "o", config=TOY)
    assert found.modules.keys() == weights.modules.keys()
    for path, module in weights.modules.items():
        assert found.modules[path].scaling == module.scaling
        assert found.modules[path].a.dtype == module.a.dtype
        np.testing.assert_array_equal(found.modules[path].a, module.a)
        np.testing.assert_array_equal(found.modules[path].b, module.b)
    with pytest.raises(ConfigError, match="exists"):
        weights.save_orbax(tmp_path / "o")


def test_orbax_checkpoints_of_a_training_state(tmp_path, model):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model, nnx.LoRAParam))
        checkpointer.wait_until_finished()
    weights = AdapterWeights.load_orbax(tmp_path / "state", config=TOY)
    expected = model.layers[1].self_attn.q_proj.lora.lora_a[...]
    np.testing.assert_array_equal(weights.modules[Q.format(1)].a, np.asarray(expected).T)


def test_folders_that_orbax_cannot_read(tmp_path):
    with pytest.raises(AdapterFormatError, match="no Orbax checkpoint"):
        AdapterWeights.load_orbax(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "_METADATA").write_text("{")
    with pytest.raises(AdapterFormatError, match="cannot be read by Orbax") as caught:
        AdapterWeights.load_orbax(tmp_path / "bad")
    assert str(tmp_path) not in str(caught.value)
