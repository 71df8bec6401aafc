"""Live comparison with PEFT: its rules, and that it loads what is saved here."""

import numpy as np
import pytest
from adapter_files import tiny_config
from golden_files import TINY_LLAMA, adapters_of
from peft_rules import BASE, CASES, ask_peft, golden_rules

from lorajax.lora.peft import load_peft
from lorajax.lora.weights import AdapterWeights

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _parity_packages(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("torch", reason="needs the extra `parity`")
    pytest.importorskip("peft", reason="needs the extra `parity`")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_golden_rules_are_those_of_the_installed_peft(case):
    assert ask_peft(CASES[case]) == golden_rules()[case]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", adapters_of(TINY_LLAMA))
def test_peft_loads_what_is_saved_here(tmp_path, name):
    """PEFT's logits with the saved folder are, bit for bit, those with the original one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    original = adapters_of(TINY_LLAMA)[name]
    load_peft(original, warn=lambda _: None).save_peft(tmp_path / "saved", base_model_name=str(BASE))
    token_ids = torch.arange(3, 27)[None]

    def logits(folder) -> np.ndarray:
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        with torch.no_grad():
            return PeftModel.from_pretrained(base, folder)(token_ids).logits.numpy()

    found, expected = logits(tmp_path / "saved"), logits(original)
    np.testing.assert_array_equal(found, expected)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)(token_ids).logits.numpy()
    assert np.abs(found - plain).max() > 1e-2


MADE_BY_PEFT = {
    "tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "tied_from_the_head": {"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True},
    "untied": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "embedding_only": {"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 3}},
    "all_linear": {"target_modules": "all-linear", "use_rslora": True, "alpha_pattern": {"v_proj": 5}},
    "regex": {"target_modules": r".*\.layers\.[01]\..*(q|v)_proj", "rank_pattern": {".*1.*q_proj": 2}},
}
ONE_SCALING = ("tied", "tied_from_the_head", "untied")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "source"),
    [*((case, "folder") for case in MADE_BY_PEFT), *((case, "memory") for case in ONE_SCALING)],
)
def test_updates_are_those_that_peft_computes(tmp_path, case, source):
    """Every layer's `get_delta_weight`, from a folder that PEFT saved and from its state dict."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    arguments = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = get_peft_model(base, LoraConfig(**arguments, **MADE_BY_PEFT[case]))
    with torch.no_grad():
        expected = {
            name.removeprefix("base_model.model.").removeprefix("model."): layer.get_delta_weight(
                "default"
            ).numpy()
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
        }
    model.save_pretrained(tmp_path)
    if source == "folder":
        weights = load_peft(tmp_path, tiny_config(BASE), warn=lambda _: None)
    else:
        state = {key: value.numpy() for key, value in model.state_dict().items() if ".lora_" in key}
        weights = AdapterWeights.from_pytree(state, 4, 8, config=tiny_config(BASE))
    assert weights.modules.keys() == expected.keys()
    for path, module in weights.modules.items():
        delta = module.delta().T if path == "embed_tokens" else module.delta()
        np.testing.assert_allclose(delta, expected[path], rtol=1e-4, atol=1e-5)
