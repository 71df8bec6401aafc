import pytest
from adapter_files import LINEARS, TOY, lora_tensors, write_adapter

from lorajax.lora.inspect import inspect_adapter


def test_an_adapter_that_can_be_served(tmp_path):
    tensors = lora_tensors(("q_proj", "v_proj")) | lora_tensors(("q_proj",), 2)
    fields = {"rank_pattern": {"q_proj": 2}, "use_rslora": False, "lora_dropout": 0.1}
    report = inspect_adapter(write_adapter(tmp_path / "mine", tensors, **fields), TOY)
    assert report.problem is None
    lines = report.text.splitlines()
    assert lines[0] == "PEFT adapter 'mine'"
    assert lines[-1] == "can be served (on llama)"
    for part in (
        "modules     4: q_proj, v_proj",
        "layers      0-1",
        "rank        2 (×2), 4 (×2)",
        "scaling     2 (×2), 4 (×2)",
        f"parameters  {2 * (2 * 48 + 4 * 32)}",
        "tensors   8 float32",
        "lora_dropout             0.1   (harmless)",
    ):
        assert part in report.text
    assert str(tmp_path) not in report.text


def test_an_adapter_that_cannot_says_why_and_what_it_holds(tmp_path):
    report = inspect_adapter(write_adapter(tmp_path / "dora", use_dora=True, bias="none"), TOY)
    assert "use_dora" in report.problem
    assert report.text.splitlines()[-1].startswith("cannot be served: adapter_config.json: use_dora = True")
    assert "use_dora                 True   (refused)" in report.text
    assert "tensors   8 float32" in report.text
    assert "bias" not in report.text


def test_limits_and_warnings_are_reported(tmp_path):
    folder = write_adapter(tmp_path / "a", lora_tensors(LINEARS), alpha_pattern={"nope": 1})
    report = inspect_adapter(folder, TOY, max_rank=2)
    assert "rank 4" in report.problem
    report = inspect_adapter(folder, TOY)
    assert report.problem is None
    assert "warning: 1 patterns match no adapted module" in report.text
    assert "(checked without a base model)" in inspect_adapter(folder).text


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 100])
def test_broken_files_are_reported_and_not_raised(tmp_path, content):
    folder = write_adapter(tmp_path / "a", content)
    report = inspect_adapter(folder, TOY)
    assert "adapter_model.safetensors" in report.problem
    assert "lora_alpha" in report.text
    assert inspect_adapter(tmp_path / "none").problem == "adapter folder 'none': no such folder"
