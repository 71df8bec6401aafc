import dataclasses
import json
import pickle
import re
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adapter_files import (
    CONFIG,
    LINEARS,
    PREFIX,
    TOY,
    TOY_MOE,
    hf_name,
    lora_tensors,
    tiny_config,
    write_adapter,
)
from golden_files import GOLDEN, TINY_LLAMA
from safetensors_bytes import safetensors_bytes

from lorajax.errors import AdapterCapacityError, AdapterFormatError
from lorajax.lora.peft import load_peft
from lorajax.lora.weights import AdapterWarning

DENSE = [GOLDEN / "tiny" / name for name in ("llama_gqa_llama3rope", "qwen2_bias_untied", "qwen3_head_dim")]
# adapter -> (largest rank, number of modules, scalings), from how the adapters were made
MADE_AS = {
    "all_r16": (16, 21, {2.0}),
    "attn_r8": (8, 12, {2.0}),
    "layer1_only": (8, 7, {2.0}),
    "lm_head_embed": (4, 5, {2.0}),
    "rslora_patterns": (6, 21, {3 / 2, 5 / 2, 8 / 6**0.5, 8 / 2, 8 / 2**0.5}),
    "v_only": (8, 3, {1.0}),
}


@pytest.mark.parametrize("name", MADE_AS)
@pytest.mark.parametrize("base", DENSE, ids=lambda base: base.name)
def test_adapters_that_peft_wrote(base, name):
    weights = load_peft(base / "adapters" / name, tiny_config(base))
    rank, num_modules, scalings = MADE_AS[name]
    assert weights.rank == rank
    assert len(weights.modules) == num_modules
    assert {round(module.scaling, 12) for module in weights.modules.values()} == {
        round(s, 12) for s in scalings
    }


DEMO = Path(__file__).parents[2] / "serving" / "demo_adapters"
# name -> (rank, number of modules, scalings) in SmolLM2's 30 layers
DEMO_MADE_AS = {
    "caps": (8, 30 * 4, {2.0}),
    "json": (16, 30 * 7, {2.0}),
    "pirate": (4, 30 * 3, {8 / 4, 16 / 4, 32 / 4}),
    "yesno": (32, 30 * 2, {1.0}),
}


@pytest.mark.parametrize("name", DEMO_MADE_AS)
def test_adapters_of_smollm2(tmp_path, name):
    with tarfile.open(DEMO / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    smollm2 = dataclasses.replace(
        TOY,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_attention_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    folder = next(tmp_path.rglob("adapter_config.json")).parent
    weights = load_peft(folder, smollm2, max_rank=32)
    found = weights.rank, len(weights.modules), {module.scaling for module in weights.modules.values()}
    assert found == DEMO_MADE_AS[name]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_those_of_the_file(tmp_path, dtype):
    tensors = lora_tensors((*LINEARS, "embed_tokens", "lm_head"), dtype=dtype)
    weights = load_peft(write_adapter(tmp_path / "a", tensors, lora_alpha=2.5), TOY)
    assert len(weights.modules) == 2 * 7 + 2
    for leaf, layer in [*((leaf, layer) for leaf in LINEARS for layer in (0, 1)), ("lm_head", 0)]:
        name = hf_name(leaf, layer)
        module = weights.modules[name.removeprefix("model.")]
        a, b = (tensors[f"{PREFIX}{name}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        np.testing.assert_allclose(module.delta(), 2.5 / 4 * b @ a, rtol=1e-5, atol=1e-5)
        assert module.a.dtype == module.b.dtype == np.float32
    embedding = weights.modules["embed_tokens"]
    assert embedding.a.shape == (4, 40)
    assert embedding.b.shape == (16, 4)


def test_dtypes_may_be_mixed_and_are_cast_once(tmp_path):
    tensors = lora_tensors(("q_proj",), layers=(0,))
    a, b = tensors
    mixed = {a: tensors[a].astype(np.float64), b: tensors[b].astype(ml_dtypes.bfloat16)}
    module = load_peft(
        write_adapter(tmp_path / "a", mixed, layers_to_transform=[0]), TOY, dtype=np.float16
    ).modules
    (module,) = module.values()
    np.testing.assert_array_equal(module.a, mixed[a].astype(np.float16))
    np.testing.assert_array_equal(module.b, mixed[b].astype(np.float16))


def test_arrays_are_read_only(tmp_path):
    weights = load_peft(write_adapter(tmp_path / "a"), TOY)
    for module in weights.modules.values():
        for array in (module.a, module.b):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1.0


def rewritten(tensors, old, new):
    return {key.replace(old, new): array for key, array in tensors.items()}


Q = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (".weight", ".default.weight"),
        (".weight", ".some_adapter.weight"),
        (PREFIX, ""),
        ("model.model.", "model."),
        ("base_model.model.model.", ""),
    ],
    ids=["saved", "in_memory", "in_memory_named", "no_wrapper", "no_head", "bare"],
)
def test_known_spellings_give_the_same_adapter(tmp_path, old, new):
    tensors = lora_tensors()
    expected = load_peft(write_adapter(tmp_path / "a", tensors), TOY)
    found = load_peft(write_adapter(tmp_path / "b", rewritten(tensors, old, new), **Q), TOY)
    assert found.modules.keys() == expected.modules.keys()
    for path, module in expected.modules.items():
        np.testing.assert_array_equal(found.modules[path].a, module.a)
        np.testing.assert_array_equal(found.modules[path].b, module.b)


def half(tensors, old, new):
    """The rewriting applied to every second pair only."""
    keys = list(tensors)
    return {key.replace(old, new) if i // 2 % 2 else key: tensors[key] for i, key in enumerate(keys)}


UNBOUND = {
    "language_model": (
        lambda t: rewritten(t, "model.layers", "model.language_model.layers"),
        "language_model",
    ),
    "half_of_the_keys": (
        lambda t: half(t, "self_attn", "attn"),
        "2 of 4 adapted modules are not in the base",
    ),
    "layer_too_high": (lambda t: rewritten(t, "layers.1.", "layers.2."), "layers 0 to 1"),
    "layer_00": (lambda t: rewritten(t, "layers.0.", "layers.00."), r"layers\.00"),
    "negative_layer": (lambda t: rewritten(t, "layers.0.", "layers.-1."), r"layers\.-1"),
    "other_model": (lambda t: rewritten(t, "self_attn.q_proj", "attention.query"), "attention.query"),
    "twice_the_prefix": (lambda t: rewritten(t, PREFIX, PREFIX * 2), "not in the base"),
    "same_module_twice": (
        lambda t: t | {k.replace("model.model", "model"): v for k, v in t.items()},
        "same factor",
    ),
    "orphan_a": (
        lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.q_proj.lora_B" not in k},
        "partner",
    ),
    "orphan_b": (
        lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.q_proj.lora_A" not in k},
        "partner",
    ),
    "no_tensors": (lambda t: {}, "no LoRA tensor"),
    "one_layer_missing": (lambda t: {k: v for k, v in t.items() if "layers.1" not in k}, "no tensors"),
    "embedding_as_linear": (
        lambda t: (
            t | {f"{PREFIX}model.embed_tokens.lora_{x}.weight": np.ones((4, 4), np.float32) for x in "AB"}
        ),
        "lora_embedding",
    ),
    "linear_as_embedding": (lambda t: rewritten(t, "_A.weight", "_embedding_A"), "lora_A/B"),
    "magnitude": (
        lambda t: t | {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.ones(32, "f")},
        "DoRA",
    ),
    "norm_weight": (lambda t: t | {f"{PREFIX}model.norm.weight": np.ones(16, "f")}, "modules_to_save"),
    "head_weight": (lambda t: t | {f"{PREFIX}lm_head.weight": np.ones((40, 16), "f")}, "modules_to_save"),
    "bias": (lambda t: t | {f"{PREFIX}model.layers.0.self_attn.q_proj.bias": np.ones(32, "f")}, "bias"),
    "token_rows": (
        lambda t: (
            t | {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((2, 16), "f")}
        ),
        "trainable_token_indices",
    ),
}


@pytest.mark.parametrize("case", UNBOUND)
def test_what_does_not_bind_in_full_is_refused(tmp_path, case):
    change, message = UNBOUND[case]
    folder = write_adapter(tmp_path / "a", change(lora_tensors()), **Q)
    with pytest.raises(AdapterFormatError, match=message) as caught:
        load_peft(folder, TOY)
    assert str(tmp_path) not in str(caught.value)


def test_an_unbound_adapter_names_keys_of_both_sides(tmp_path):
    tensors = rewritten(lora_tensors(), "self_attn", "attn")
    with pytest.raises(AdapterFormatError) as caught:
        load_peft(write_adapter(tmp_path / "a", tensors), TOY)
    assert "base_model.model.model.layers.0.attn.q_proj.lora_A.weight" in str(caught.value)
    assert "model.layers.0.mlp.down_proj" in str(caught.value)


SELECTIONS = {
    "target_too_few": ({"target_modules": ["q_proj"]}, "not among those"),
    "target_too_many": ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, "selects 2 modules"),
    "regex_too_few": ({"target_modules": r".*\.layers\.0\..*(q|v)_proj"}, "not among those"),
    "all_linear": ({"target_modules": "all-linear"}, "selects 10 modules"),
    "layer_not_transformed": ({**Q, "layers_to_transform": [1]}, "not among those"),
    "excluded": ({**Q, "exclude_modules": ["v_proj"]}, "not among those"),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_config_and_tensors_must_speak_of_the_same_modules(tmp_path, case):
    fields, message = SELECTIONS[case]
    with pytest.raises(AdapterFormatError, match=message):
        load_peft(write_adapter(tmp_path / "a", **fields), TOY)


def test_without_target_modules_the_tensors_decide(tmp_path):
    assert len(load_peft(write_adapter(tmp_path / "a", target_modules=None), TOY).modules) == 4


def changed(tensors, part, array):
    key = next(key for key in tensors if part in key)
    return {**tensors, key: array.astype(np.float32)}


SHAPES = {
    "hidden_size": ("q_proj.lora_A", np.ones((4, 17)), r"expected A \[4, 16\] and B \[32, 4\]"),
    "kv_heads": ("v_proj.lora_B", np.ones((32, 4)), r"expected A \[4, 16\] and B \[16, 4\]"),
    "rank_of_a": ("q_proj.lora_A", np.ones((8, 16)), "for rank 4"),
    "rank_of_b": ("q_proj.lora_B", np.ones((32, 8)), "for rank 4"),
    "transposed": ("q_proj.lora_A", np.ones((16, 4)), "do not fit"),
    "vector": ("q_proj.lora_A", np.ones(16), "must be matrices"),
    "experts": ("q_proj.lora_A", np.ones((2, 4, 16)), "must be matrices"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_wrong_shapes_name_module_found_and_expected(tmp_path, case):
    part, array, message = SHAPES[case]
    with pytest.raises(AdapterFormatError, match=message) as caught:
        load_peft(write_adapter(tmp_path / "a", changed(lora_tensors(), part, array)), TOY)
    assert str(list(array.shape)) in str(caught.value)


def test_rank_of_the_config_must_be_that_of_the_tensors(tmp_path):
    for rank in (64, 3, 5):
        with pytest.raises(AdapterFormatError, match=f"for rank {rank}"):
            load_peft(write_adapter(tmp_path / str(rank), r=rank), TOY)
    with pytest.raises(AdapterFormatError, match="for rank 2"):
        load_peft(write_adapter(tmp_path / "p", rank_pattern={"q_proj": 2}), TOY)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_any_rank_up_to_the_largest(tmp_path, rank):
    folder = write_adapter(tmp_path / "a", lora_tensors(rank=rank), r=rank)
    assert load_peft(folder, TOY, max_rank=16).rank == rank


def test_a_rank_above_the_largest_names_module_and_rank(tmp_path):
    tensors = lora_tensors() | lora_tensors(("down_proj",), 32, layers=(1,))
    targets = ["q_proj", "v_proj", "layers.1.mlp.down_proj"]
    folder = write_adapter(tmp_path / "a", tensors, target_modules=targets, rank_pattern={"down_proj": 32})
    assert load_peft(folder, TOY, max_rank=32).rank == 32
    with pytest.raises(AdapterCapacityError, match=r"rank 32 of 'layers.1.mlp.down_proj' .* 16"):
        load_peft(folder, TOY, max_rank=16)


def test_modules_that_the_engine_does_not_adapt(tmp_path):
    folder = write_adapter(tmp_path / "a")
    load_peft(folder, TOY, target_modules=["q_proj", "v_proj", "o_proj"])
    with pytest.raises(AdapterFormatError, match=r"2 of 4 .*'layers.0.self_attn.v_proj'.* q_proj"):
        load_peft(folder, TOY, target_modules={"q_proj"})


def test_experts(tmp_path):
    tensors = {}
    for expert in range(3):
        for leaf, d_in, d_out in (("gate_proj", 16, 12), ("up_proj", 16, 12), ("down_proj", 12, 16)):
            name = f"{PREFIX}model.layers.1.mlp.experts.{expert}.{leaf}"
            tensors[f"{name}.lora_A.weight"] = np.ones((4, d_in), np.float32)
            tensors[f"{name}.lora_B.weight"] = np.ones((d_out, 4), np.float32)
    fields = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": [1]}
    folder = write_adapter(tmp_path / "a", tensors, **fields)
    assert len(load_peft(folder, TOY_MOE).modules) == 9
    with pytest.raises(AdapterFormatError, match="experts cannot be served"):
        load_peft(folder, TOY_MOE, experts=False)
    some = {key: array for key, array in tensors.items() if "experts.2" not in key}
    with pytest.raises(AdapterFormatError, match="selects 3 modules"):
        load_peft(write_adapter(tmp_path / "b", some, **fields), TOY_MOE)
    # a library that keeps the experts in one tensor adapts none of them for the same config
    dense = lora_tensors(("q_proj",)) | lora_tensors(("gate_proj",), layers=(0,))
    load_peft(write_adapter(tmp_path / "c", dense, target_modules=["q_proj", "gate_proj"]), TOY_MOE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_values_that_are_not_finite_name_the_tensor(tmp_path, value, dtype):
    tensors = lora_tensors(dtype=dtype)
    key = f"{PREFIX}model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors[key][3, 2] = value
    with pytest.raises(AdapterFormatError, match=re.escape(key)):
        load_peft(write_adapter(tmp_path / "a", tensors), TOY)


def test_finite_is_judged_after_the_cast(tmp_path):
    tensors = lora_tensors()
    tensors[next(iter(tensors))][0, 0] = 70_000.0
    folder = write_adapter(tmp_path / "a", tensors)
    assert load_peft(folder, TOY, dtype=ml_dtypes.bfloat16).rank == 4
    with pytest.raises(AdapterFormatError, match="not finite in float16"):
        load_peft(folder, TOY, dtype=np.float16)
    tensors = {key: array.astype(np.float64) for key, array in tensors.items()}
    tensors[next(iter(tensors))][0, 0] = 1e39
    with pytest.raises(AdapterFormatError, match="not finite in float32"):
        load_peft(write_adapter(tmp_path / "b", tensors), TOY)


def test_zeros_are_legal(tmp_path):
    tensors = {key: array * ("lora_A" in key) for key, array in lora_tensors().items()}
    weights = load_peft(write_adapter(tmp_path / "a", tensors), TOY)
    assert all(not module.delta().any() for module in weights.modules.values())


@pytest.mark.parametrize("alpha", [0, -8])
def test_alphas_that_are_not_positive_are_applied_with_a_warning(tmp_path, alpha):
    with pytest.warns(AdapterWarning, match="lora_alpha is not above zero"):
        weights = load_peft(write_adapter(tmp_path / "a", lora_alpha=alpha), TOY)
    assert {module.scaling for module in weights.modules.values()} == {alpha / 4}


def test_patterns_that_match_nothing_are_warned_of(tmp_path):
    folder = write_adapter(
        tmp_path / "a", rank_pattern={"^q_proj": 100, "q_proj": 4}, alpha_pattern={"nope": 1}
    )
    with pytest.warns(
        AdapterWarning, match=r"2 patterns .*rank_pattern\['\^q_proj'\], alpha_pattern\['nope'\]"
    ):
        load_peft(folder, TOY)


def test_warnings_can_go_elsewhere(tmp_path):
    folder = write_adapter(tmp_path / "a", base_model_name_or_path="org/Other-7B", lora_alpha=0)
    heard = []
    load_peft(folder, TOY, base_name="/models/toy", warn=heard.append)
    assert len(heard) == 2
    assert "'other-7b'" in heard[1]
    heard.clear()
    load_peft(
        write_adapter(tmp_path / "b", base_model_name_or_path="C:\\m\\Toy"),
        TOY,
        base_name="x/toy",
        warn=heard.append,
    )
    assert heard == []


def tied(tensors):
    """The head's factors that PEFT saves for an embedding with `ensure_weight_tying`."""
    name = f"{PREFIX}model.embed_tokens.lora_embedding_"
    return {
        f"{PREFIX}lm_head.lora_A.weight": np.ascontiguousarray(tensors[name + "B"].T),
        f"{PREFIX}lm_head.lora_B.weight": np.ascontiguousarray(tensors[name + "A"].T),
    }


@pytest.mark.parametrize("saved", [True, False])
def test_tied_adapters_change_both_sides(tmp_path, saved):
    embedding = lora_tensors(("embed_tokens",))
    tensors = embedding | tied(embedding) if saved else embedding
    fields = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    weights = load_peft(write_adapter(tmp_path / "a", tensors, **fields), TOY)
    assert set(weights.modules) == {"embed_tokens", "lm_head"}
    np.testing.assert_array_equal(
        weights.modules["lm_head"].delta(), weights.modules["embed_tokens"].delta().T
    )


def test_tied_adapters_that_cannot_be_what_they_say(tmp_path):
    embedding = lora_tensors(("embed_tokens",))
    fields = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    other = {key: array + 1 for key, array in tied(embedding).items()}
    with pytest.raises(AdapterFormatError, match="differs from the factor of embed_tokens"):
        load_peft(write_adapter(tmp_path / "a", embedding | other, **fields), TOY)
    with pytest.raises(AdapterFormatError, match="lm_head: rank 2"):
        load_peft(write_adapter(tmp_path / "b", embedding, **fields, rank_pattern={"lm_head": 2}), TOY)
    with pytest.raises(AdapterFormatError, match="must be known"):
        load_peft(write_adapter(tmp_path / "c", embedding, **fields))
    untied = tiny_config(TINY_LLAMA, vocab_size=40, hidden_size=16, tie_word_embeddings=False)
    assert set(load_peft(tmp_path / "c", untied).modules) == {"embed_tokens"}


@pytest.mark.parametrize("leaf", ["embed_tokens", "lm_head"])
def test_without_tying_only_the_named_side_changes(tmp_path, leaf):
    weights = load_peft(write_adapter(tmp_path / "a", lora_tensors((leaf,))), TOY)
    assert set(weights.modules) == {leaf}


COPY = f"{PREFIX}model.embed_tokens.base_layer.weight"


def test_saved_copies_of_the_base_are_held_against_it(tmp_path):
    embedding = np.random.default_rng(1).standard_normal((40, 16)).astype(np.float32)
    tensors = lora_tensors(("embed_tokens",)) | {COPY: embedding}
    folder = write_adapter(tmp_path / "a", tensors, target_modules=["embed_tokens"])
    with pytest.warns(AdapterWarning, match="taken to be unchanged"):
        load_peft(folder, TOY)
    for served in (embedding, embedding.astype(ml_dtypes.bfloat16)):
        weights = load_peft(folder, TOY, base_weight={"embed_tokens": served}.__getitem__)
        assert set(weights.modules) == {"embed_tokens"}
    with pytest.raises(AdapterFormatError, match="differs from the base's own"):
        load_peft(folder, TOY, base_weight=lambda path: embedding + np.eye(40, 16, dtype=np.float32))


def test_a_resized_vocabulary_is_refused(tmp_path):
    tensors = lora_tensors(("embed_tokens",)) | {COPY: np.ones((104, 16), np.float32)}
    with pytest.raises(AdapterFormatError, match=r"\[104, 16\]; the served base has \[40, 16\]"):
        load_peft(write_adapter(tmp_path / "a", tensors, target_modules=["embed_tokens"]), TOY)


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "model.ckpt"])
def test_pickles_are_never_loaded(tmp_path, name):
    folder = write_adapter(tmp_path / "a")
    touched = tmp_path / "touched"
    (folder / name).write_bytes(pickle.dumps(Payload(touched)))
    assert load_peft(folder, TOY).rank == 4  # safetensors are preferred
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match=f"{name}.*never loaded.*safetensors"):
        load_peft(folder, TOY)
    (folder / "adapter_model.safetensors").write_bytes(pickle.dumps(Payload(touched)))
    with pytest.raises(AdapterFormatError, match="pickle"):
        load_peft(folder, TOY)
    assert not touched.exists()


FOLDERS = {
    "empty": ({}, "adapter_model.safetensors is missing"),
    "only_config": ({"adapter_config.json": b"{}"}, "holds no adapter"),
    "other_name": ({"model.safetensors": b"", "adapter_config.json": b"{}"}, "found 'model.safetensors'"),
    "shards": (
        {
            "adapter_model-00001-of-00002.safetensors": b"",
            "adapter_model-00002-of-00002.safetensors": b"",
            "adapter_model.safetensors.index.json": b"{}",
        },
        "shards",
    ),
    "no_config": ({"adapter_model.safetensors": b""}, "adapter_config.json is missing"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_hold_no_adapter(tmp_path, case):
    files, message = FOLDERS[case]
    (tmp_path / "a").mkdir()
    for name, content in files.items():
        (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(AdapterFormatError, match=message) as caught:
        load_peft(tmp_path / "a", TOY)
    assert str(tmp_path) not in str(caught.value)


CONFIG_TEXT = {
    "not_json": ("{", "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "a_list": ("[]", "expected a JSON object"),
    "nan": (json.dumps({**CONFIG, "lora_alpha": float("nan")}), "lora_alpha = nan"),
    "infinity": (json.dumps({**CONFIG, "lora_dropout": float("inf")}), "lora_dropout = inf"),
    "twice": ('{"r": 4, "r": 8}', "'r' stands there twice"),
    "huge_number": ('{"r": 1' + "0" * 5000 + "}", "not valid JSON"),
    "deep": ('{"r": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "too_large": (json.dumps({**CONFIG, "revision": "x" * (1 << 20)}), "longer than the 1048576 bytes"),
    "lfs": ("version https://git-lfs.github.com/spec/v1\n", "not valid JSON"),
}


@pytest.mark.parametrize("case", CONFIG_TEXT)
def test_configs_that_cannot_be_read(tmp_path, case):
    text, message = CONFIG_TEXT[case]
    with pytest.raises(AdapterFormatError, match=message) as caught:
        load_peft(write_adapter(tmp_path / "a", config=text), TOY)
    assert str(tmp_path) not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_paths_that_are_no_folder(tmp_path):
    folder = write_adapter(tmp_path / "a")
    for path, message in (
        (tmp_path / "none", "no such folder"),
        (folder / "adapter_model.safetensors", "give the folder"),
        (tmp_path / ("x" * 5000), "File name too long"),
        (folder / "adapter_config.json" / "x", "give the folder"),
        ("bad\0name", "null byte"),
        ("", "path of an adapter is empty"),
    ):
        with pytest.raises(AdapterFormatError, match=message) as caught:
            load_peft(path, TOY)
        assert str(tmp_path) not in str(caught.value)


def test_roots_confine_folder_and_files(tmp_path):
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside")
    inside = write_adapter(root / "inside")
    assert load_peft(inside, TOY, roots=[root]).rank == 4
    (root / "alias").symlink_to(inside)
    assert load_peft(root / "alias", TOY, roots=[tmp_path / "other", root]).rank == 4
    (root / "escape").symlink_to(outside)
    half_out = write_adapter(root / "half_out")
    (half_out / "adapter_model.safetensors").unlink()
    (half_out / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert load_peft(half_out, TOY).rank == 4  # as the Hub's cache has them
    for path in (
        outside,
        root / "escape",
        root / ".." / "outside",
        half_out,
        root / "inside" / ".." / ".." / "outside",
    ):
        with pytest.raises(AdapterFormatError, match="lies outside") as caught:
            load_peft(path, TOY, roots=[root])
        assert str(tmp_path) not in str(caught.value)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(AdapterFormatError):
        load_peft(root / "loop", TOY, roots=[root])


def test_nothing_is_read_before_all_is_checked(tmp_path):
    """A header that promises 8 GB of factors is refused on its shapes, in a sparse file."""
    folder = write_adapter(tmp_path / "a", lora_tensors())
    header = {
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": {
            "dtype": "F32", "shape": [1 << 31, 1], "data_offsets": [0, 8 << 30],
        },
    }  # fmt: skip
    with (folder / "adapter_model.safetensors").open("wb") as file:
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (8 << 30))
    with pytest.raises(AdapterFormatError, match="partner"):
        load_peft(folder, TOY)


def test_without_a_base_names_and_ranks_are_checked(tmp_path):
    assert load_peft(write_adapter(tmp_path / "a")).rank == 4
    with pytest.raises(AdapterFormatError, match="not in the base model"):
        load_peft(write_adapter(tmp_path / "b", rewritten(lora_tensors(), "self_attn", "attn")))
    with pytest.raises(AdapterFormatError, match="for rank 8"):
        load_peft(write_adapter(tmp_path / "c", r=8))


def test_a_failed_load_leaves_the_file_closed(tmp_path):
    import os

    folder = write_adapter(tmp_path / "a", r=8)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(AdapterFormatError):
            load_peft(folder, TOY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_broken_file_in_a_good_folder(tmp_path):
    raw = safetensors_bytes(lora_tensors())
    with pytest.raises(AdapterFormatError, match="truncated"):
        load_peft(
            write_adapter(tmp_path / "a", raw[: len(raw) // 2], target_modules=["q_proj", "v_proj"]), TOY
        )
