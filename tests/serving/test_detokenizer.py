"""Text as it streams, against the one-shot decode of the same tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_token, toy_tokenizer

from lorajax.tokenizer import Tokenizer
from serving.detokenizer import Detokenizer

KINDS = ("byte_level", "sentencepiece")
BYTES = toy_tokenizer("byte_level")
A = BYTES.encode("a", add_special_tokens=False)
# characters of 1 to 4 bytes, joined emoji, a flag, marks that combine, controls, U+FFFD as a text's own
CHARACTERS = st.sampled_from(
    [
        "a",
        " ",
        "hello world",
        "é",
        "e\u0301",
        "世界",
        "世 ",
        "😀",
        "👩‍👩‍👧",
        "🇪🇸",
        "नमस्ते",
        "\n",
        "\0",
        "\ufffd",
    ]
)
TEXTS = st.lists(CHARACTERS | st.characters(exclude_categories=["Cs"]), max_size=8).map("".join)


def joined(runs: list[list[int]]) -> list[int]:
    return [token_id for run in runs for token_id in run]


def byte_ids(text: str | bytes, tokenizer: Tokenizer = BYTES) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    return [byte_token(tokenizer, byte) for byte in data]


def texts_so_far(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """The text after every token and after the end; each delta is what it grew by."""
    texts = [""]
    for take in [*(lambda i=token_id: detokenizer.append([i]) for token_id in token_ids), detokenizer.finish]:
        delta = take()
        assert detokenizer.text == texts[-1] + delta
        texts.append(detokenizer.text)
    return texts[1:]


def text_of(tokenizer: Tokenizer, prompt: list[int], output: list[int], **options) -> str:
    return texts_so_far(Detokenizer(tokenizer, prompt, **options), output)[-1]


@settings(deadline=None)
@given(pieces=st.lists(st.tuples(TEXTS, st.booleans()), max_size=4))
def test_any_spelling_of_a_text_streams_as_that_text(pieces):
    """Bytes one by one, or tokens as the tokenizer has them, some of which cut characters."""
    output = [
        token_id
        for text, whole in pieces
        for token_id in (BYTES.encode(text, add_special_tokens=False) if whole else byte_ids(text))
    ]
    text = "".join(text for text, _ in pieces)
    texts = texts_so_far(Detokenizer(BYTES, A), output)
    assert texts[-1] == text
    for count, so_far in enumerate(texts[:-1], start=1):  # a character comes out with its last byte
        data = b"".join(BYTES.token_bytes(token_id) for token_id in output[:count])
        assert so_far == data.decode(errors="ignore")


@settings(deadline=None)
@given(
    output=st.lists(st.integers(0, BYTES.vocab_size + 2), max_size=24),
    skip=st.booleans(),
    prompt=st.sampled_from([[], A, BYTES.encode("")]),
)
def test_any_tokens_stream_as_their_one_shot_decode(output, skip, prompt):
    """Bytes that are no UTF-8, special tokens, ids without a token; cut off anywhere."""
    found = text_of(BYTES, prompt, output, skip_special_tokens=skip)
    assert found == BYTES.decode(output, skip_special_tokens=skip)


SENTENCEPIECE = toy_tokenizer("sentencepiece")
WHOLE_TOKENS = st.sampled_from(
    [i for i in range(SENTENCEPIECE.vocab_size) if not SENTENCEPIECE.fast.id_to_token(i).startswith("<0x")]
).map(lambda token_id: [token_id])
WHOLE_CHARACTERS = TEXTS.map(lambda text: byte_ids(text, SENTENCEPIECE))


@settings(deadline=None)
@given(
    prompt=st.lists(WHOLE_TOKENS, max_size=3).map(joined),
    output=st.lists(WHOLE_TOKENS | WHOLE_CHARACTERS, max_size=10).map(joined),
    skip=st.booleans(),
)
def test_sentencepiece_streams_as_what_the_output_adds_to_the_prompt(prompt, output, skip):
    before = SENTENCEPIECE.decode(prompt, skip_special_tokens=skip)
    both = SENTENCEPIECE.decode(prompt + output, skip_special_tokens=skip)
    assert text_of(SENTENCEPIECE, prompt, output, skip_special_tokens=skip) == both[len(before) :]


def test_what_makes_no_text_does_not_begin_one():
    he, end = (SENTENCEPIECE.fast.token_to_id(token) for token in ("▁he", "<|end|>"))
    beyond = SENTENCEPIECE.vocab_size
    assert text_of(SENTENCEPIECE, [], [beyond, end, he, he]) == "he he"
    assert text_of(SENTENCEPIECE, [beyond, end], [he]) == "he"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=TEXTS, cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_prompt_and_output_may_end_inside_characters(kind, text, cuts):
    """A character that the output completes is the output's; one that it leaves open is one U+FFFD."""
    tokenizer, data = toy_tokenizer(kind), text.encode()
    start, stop = sorted(min(cut, len(data)) for cut in cuts)
    found = text_of(
        tokenizer, byte_ids(b"a" + data[:start], tokenizer), byte_ids(data[start:stop], tokenizer)
    )
    prompt, both = data[:start].decode(errors="ignore"), data[:stop].decode(errors="ignore")
    ends_open = len(both.encode()) < stop and start < stop
    assert found == both[len(prompt) :] + "\ufffd" * ends_open


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"\xe4\xb8", b"\x96!", "世!"),
        (b"\xe4\xb8", b"a", "a"),
        (b"\xe4\xb8", b"", ""),
        (b"\xe4\xb8", b"\xe4\xb8\x96", "世"),
        (b"\xe4\xb8", b"\xff", "\ufffd"),
        (b"\xe4\xb8", b"\xc3\xa9", "é"),
        (b"\xe0", b"\x9fa", "\ufffda"),
        (b"\xf0", b"\x9f\x98", "\ufffd"),
        (b"\xf0\x9f\x98", b"\x80", "😀"),
        (b"a", b"\xffb", "\ufffdb"),
        (b"a", b"\xe4\xb8b", "\ufffdb"),
        (b"a", b"\x96\x96", "\ufffd\ufffd"),
    ],
)
def test_bytes_that_do_not_fit_together(prompt, output, text):
    assert text_of(BYTES, byte_ids(prompt), byte_ids(output)) == text


def test_a_skipped_token_between_the_bytes_of_a_character_does_not_break_it():
    end = BYTES.fast.token_to_id("<|end|>")
    output = [*byte_ids(b"\xe4\xb8"), end, *byte_ids(b"\x96")]
    assert text_of(BYTES, A, output) == "世"
    assert text_of(BYTES, [*byte_ids(b"\xe4\xb8"), end], byte_ids(b"\x96")) == "世"
    assert text_of(BYTES, A, output, skip_special_tokens=False) == "\ufffd<|end|>\ufffd"


# stop strings


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if stop and text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return (text[:end] if include else text[: end - len(found)]), found
    return text, None


def open_length(text: str, stops: list[str]) -> int:
    """How much of a text's end may still become a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


ABC = st.text(alphabet="aab世", max_size=14)


@settings(deadline=None)
@given(
    pieces=st.lists(ABC, max_size=5),
    stops=st.lists(st.text(alphabet="aab世", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_cut_the_text_and_hold_back_no_more_than_may_match(pieces, stops, include):
    text, output = "".join(pieces), byte_ids("".join(pieces))
    expected, reason = cut(text, stops, include)
    detokenizer = Detokenizer(BYTES, byte_ids("a"), stop=stops, include_stop_str_in_output=include)
    texts = texts_so_far(detokenizer, output)
    assert (texts[-1], detokenizer.stop_reason) == (expected, reason)
    for count, so_far in enumerate(texts[:-1], start=1):
        whole = text.encode()[:count].decode(errors="ignore")
        if cut(whole, stops, include)[1] is None:
            assert so_far == whole[: len(whole) - open_length(whole, stops)]
        else:
            assert so_far == expected


@settings(deadline=None)
@given(text=ABC, stops=st.lists(ABC, max_size=3), sizes=st.lists(st.integers(1, 5)), include=st.booleans())
def test_how_tokens_arrive_changes_nothing(text, stops, sizes, include):
    options = {"stop": stops, "include_stop_str_in_output": include}
    output = byte_ids(text)
    together = Detokenizer(BYTES, A, **options)
    rest, deltas = output, []
    for size in sizes:
        deltas.append(together.append(rest[:size]))
        rest = rest[size:]
    deltas += [together.append(rest), together.finish()]
    assert "".join(deltas) == together.text == text_of(BYTES, A, output, **options)


@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("ABC DEF G HI JKL", ["DEF G HI J"], "ABC ", "DEF G HI J"),
        ("ABC DEF G HI JKL", ["EF"], "ABC D", "EF"),
        ("xabcd", ["ab", "abc"], "x", "ab"),
        ("xabcd", ["abc", "ab"], "x", "ab"),
        ("xabcd", ["bc", "abc"], "x", "abc"),
        ("xabcd", ["abc", "bc"], "x", "abc"),
        ("aabaaabaaac", ["aabaaac"], "aaba", "aabaaac"),
        ("xabcd", ["cd", "abc", "bcd"], "x", "abc"),
        ("xabcd", ["abcde", "bc"], "xa", "bc"),
        ("xabab", ["ababc"], "xabab", None),
        ("aaab", ["aab"], "a", "aab"),
        ("abacabad", ["abad"], "abac", "abad"),
        ("one 👩‍👩‍👧 two", ["👩‍👧"], "one 👩‍", "👩‍👧"),
        ("stop", ["stop"], "", "stop"),
        ("text", [], "text", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_known_cases(text, stops, expected, reason, include):
    detokenizer = Detokenizer(BYTES, A, stop=stops, include_stop_str_in_output=include)
    assert texts_so_far(detokenizer, byte_ids(text))[-1] == expected + (reason or "") * include
    assert detokenizer.stop_reason == reason


def test_nothing_follows_a_stop():
    detokenizer = Detokenizer(BYTES, A, stop=["b"])
    assert detokenizer.append(byte_ids("abcabc")) == "a"
    assert (detokenizer.append(byte_ids("c")), detokenizer.finish(), detokenizer.text) == ("", "", "a")


def test_a_stop_string_does_not_begin_in_the_prompt():
    assert text_of(BYTES, byte_ids("ab"), byte_ids("cd"), stop=["abc", "bc"]) == "cd"
    # but a character that the output completes is its own
    assert text_of(BYTES, byte_ids(b"a\xe4\xb8"), byte_ids(b"\x96b"), stop=["世"]) == ""


def test_special_tokens_match_only_where_they_make_text():
    output = [*byte_ids("a"), BYTES.fast.token_to_id("<|end|>"), *byte_ids("b")]
    assert text_of(BYTES, A, output, stop=["<|end|>"]) == "ab"
    assert text_of(BYTES, A, output, stop=["<|end|>"], skip_special_tokens=False) == "a"
    assert text_of(BYTES, A, output, stop=["ab"]) == ""  # what is skipped does not part its neighbours


def test_a_held_end_and_an_open_character_are_flushed_together():
    detokenizer = Detokenizer(BYTES, A, stop=["abc"])
    assert detokenizer.append(byte_ids(b"xab\xe4")) == "x"
    assert detokenizer.finish() == "ab\ufffd"


def test_the_flush_itself_can_complete_a_stop_string():
    detokenizer = Detokenizer(BYTES, A, stop=["b\ufffd"])
    assert detokenizer.append(byte_ids(b"ab\xe4")) == "a"
    assert (detokenizer.finish(), detokenizer.stop_reason) == ("", "b\ufffd")


@pytest.mark.parametrize(
    ("text", "min_tokens", "expected"),
    [
        ("abcabc", 0, ""),
        ("abcabc", 2, ""),
        ("abcabc", 3, "abc"),
        ("abcabc", 5, "abc"),
        ("abcabc", 6, "abcabc"),
        ("abcab", 3, "abcab"),
        ("ababcd", 4, "ab"),
    ],
)
def test_a_stop_string_counts_if_it_ends_after_min_tokens(text, min_tokens, expected):
    assert text_of(BYTES, A, byte_ids(text), stop=["abc"], min_tokens=min_tokens) == expected


@settings(deadline=None)
@given(text=ABC, stops=st.lists(ABC, max_size=3), min_tokens=st.integers(0, 20))
def test_min_tokens_by_the_definition(text, stops, min_tokens):
    first = text.encode()[:min_tokens].decode(errors="ignore")
    ends = [
        (end, len(stop))
        for end in range(len(first) + 1, len(text) + 1)
        for stop in stops
        if stop and text[:end].endswith(stop)
    ]
    end, length = min(ends, key=lambda match: (match[0], -match[1]), default=(len(text), 0))
    assert text_of(BYTES, A, byte_ids(text), stop=stops, min_tokens=min_tokens) == text[: end - length]


def test_each_token_costs_one_look_up(monkeypatch):
    calls = []
    look_up = Tokenizer.token_bytes

    def counted(self, token_id, **options):
        calls.append(token_id)
        return look_up(self, token_id, **options)

    monkeypatch.setattr(Tokenizer, "token_bytes", counted)
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("decodes again what it knows"))
    detokenizer = Detokenizer(BYTES, A * 5000)
    assert len(calls) <= 3  # of the prompt, only its last bytes
    calls.clear()
    detokenizer.append(A * 500)
    assert len(calls) <= 501
