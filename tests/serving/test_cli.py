"""The command line: what it prints, and that a mistake is one line and status 2."""

import dataclasses
import shutil

import pytest
from golden_files import TINY_LLAMA, adapters_of

from serving.cli import main
from serving.config import EngineConfig, field_descriptions

QUICK = ["--no-warmup", "--compilation-cache-dir", "none", "--num-pages", "32", "--max-num-seqs", "4"]


def test_generate_answers_as_the_base_and_as_each_adapter(capsys):
    adapter = f"v={adapters_of(TINY_LLAMA)['v_only']}"
    arguments = ["generate", str(TINY_LLAMA), "--prompt", "ab", "--adapter", adapter, "--max-tokens", "3"]
    assert main([*arguments, *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("]")[0] for line in lines] == ["[base", "[v"]


def test_inspect_an_adapter_and_a_checkpoint(capsys, tmp_path):
    adapter = adapters_of(TINY_LLAMA)["all_r16"]
    assert main(["inspect", str(adapter), "--model", str(TINY_LLAMA)]) == 0
    assert "can be served" in capsys.readouterr().out
    assert main(["inspect", str(TINY_LLAMA)]) == 0
    assert "llama checkpoint" in capsys.readouterr().out
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"")
    assert main(["inspect", str(broken)]) == 2
    captured = capsys.readouterr()
    assert "cannot be served" in captured.out
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "/nowhere/at/all", "--prompt", "x"],
        ["generate", str(TINY_LLAMA), "--prompt", "x", "--adapter", "no-path", *QUICK],
        ["generate", str(TINY_LLAMA), "--prompt", "x", "--adapter", "a=/nowhere", *QUICK],
        ["generate", str(TINY_LLAMA), "--prompt", "x", "--page-size", "12"],
        ["generate", str(TINY_LLAMA), "--prompt", "x", "--temperature", "-1", *QUICK],
        ["inspect", "/nowhere"],
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments):
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("lorajax: ")


def test_every_engine_setting_is_described():
    described = field_descriptions()
    for field in dataclasses.fields(EngineConfig):
        assert len(described[field.name]) > 15, field.name


def test_help_names_every_engine_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig):
        assert "--" + field.name.replace("_", "-") in text
