import contextlib
import functools
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lorajax.errors import AdapterFormatError
from lorajax.lora.module_patterns import ModulePattern, module_pattern, suffix_pattern

NAMES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.experts.7.gate_proj",
    "layers.1.mlp.down_proj",
]
PATTERNS = [
    "q_proj",
    r".*\.layers\.[01]\..*(q|v)_proj",
    r"^(?!.*visual).*(?:self_attn|mlp)\.(?:experts\.\d+\.)?(?:q_proj|gate_proj)$",
    r"model\.layers\.(?:0|1|2)\.\S{2,}?.q_proj",
    r"\w+(?<=head)|\bmodel\b.*\Btokens",
    r"[^.]+\.[^.]{3,8}\.[\d]{1,2}.*",
    r"(a|b|ab)*|x?|",
    r"(?:(?:[a-z_]+|\d+)\.?)*",
    r"\A\D+\Z",
    r"(?P<kind>layers)?.*(?<!q)_proj",
    r"model.layers.0.self_attn.q_proj",
    r"(\.|l|a|y|e|r|s)+?.*\W\w+",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_are_those_of_re(pattern):
    for name in NAMES:
        assert module_pattern("f", pattern).fullmatch(name) == bool(re.fullmatch(pattern, name)), name
        assert suffix_pattern("f", pattern).fullmatch(name) == bool(
            re.match(rf"(.*\.)?({pattern})$", name)
        ), name


atoms = st.sampled_from(
    ["a", "b", r"\.", ".", r"\d", r"\w", "[ab]", "[^a.]", "1", "_", "^", "$", r"\b", r"\B"]
)


def _extend(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{1,2}", "{2}", "{0,3}?"])).map(
            lambda parts: f"(?:{parts[0]}){parts[1]}"
        ),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda parts: f"{parts[0]}{parts[1]})"),
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(atoms, _extend, max_leaves=8), st.text("ab1._", min_size=1, max_size=7))
def test_random_patterns_answer_as_re_does(pattern, name):
    try:
        expected = re.fullmatch(pattern, name) is not None
    except re.error:
        assume(False)
    assert module_pattern("f", pattern).fullmatch(name) == expected


REFUSED = {
    "(": "no regular expression",
    "a**": "no regular expression",
    "(?<=a+)b": "no regular expression",
    r"(a)\1": "not supported",
    r"(a)?(?(1)b|c)": "not supported",
    "(?>a)b": "not supported",
    "a++b": "not supported",
    "(?i)Q_PROJ": "flags",
    "(?i:Q)_proj": "flags",
    "(" * 60 + "a" + ")" * 60: "nested deeper",
    "a" * 3000: "3000 characters",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_patterns_name_the_field(pattern):
    for make in (module_pattern, suffix_pattern):
        with pytest.raises(AdapterFormatError, match=REFUSED[pattern]) as caught:
            make("rank_pattern", pattern)
        assert "rank_pattern" in str(caught.value)


HOSTILE = [
    r"(a+)+!",
    r"(([a-z_.0-9])+)+!",
    ".*" * 500 + "!",
    r"((.*)*)*!",
    r"(((((.*)*)*)*)*)*!",
    r"(?:(?:a|b|.)*(?:c|d|.)*)*" * 40 + "!",
    r"(.{0,1000}){0,1000}!",
    "(.|.." + "|.*" * 300 + ")*!",
]
TOO_LONG = functools.reduce(lambda inner, _: f"(?=(?:.{inner})*)", range(4), "")


@pytest.mark.parametrize("pattern", [*HOSTILE, TOO_LONG + "!"])
def test_hostile_patterns_end_soon(pattern):
    name = "model.layers.11.mlp.experts.7.gate_proj"
    start = time.perf_counter()
    expected = pytest.raises(AdapterFormatError, match="too long to match")
    with expected if pattern.startswith(TOO_LONG) else contextlib.nullcontext():
        assert not ModulePattern("f", pattern).fullmatch(name)
    assert time.perf_counter() - start < 2.0


def test_plain_names_are_marked_plain():
    assert suffix_pattern("f", "layers.0.q_proj").is_plain
    assert not suffix_pattern("f", "layers.*").is_plain
