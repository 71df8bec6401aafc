"""The README's example runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_answers_in_three_voices(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if " → " in line]
    assert [line.split(" → ")[0] for line in lines] == ["None", "caps", "pirate"]
    assert lines[1].split(" → ")[1].startswith("THE CAPITAL")
    assert lines[2].split(" → ")[1].startswith("Arr, matey!")
