"""Tokenizer folders read as transformers reads them; what is wrong with one is named."""

import json

import pytest
from golden_files import GOLDEN, TINY_LLAMA

from lorajax.checkpoints.hf_tokenizer import load_hf_tokenizer
from lorajax.errors import CheckpointError, RequestRejected

GOLD = json.loads((GOLDEN / "hf_tokenizer" / "cases.json").read_text())
CASES = GOLD["cases"]
MESSAGES = GOLD["messages"]


def write_folder(folder, case):
    tokenizer = {**json.loads((TINY_LLAMA / "tokenizer.json").read_text()), **case.get("tokenizer", {})}
    files = {
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps(case["settings"]),
        **case.get("files", {}),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_reads_what_transformers_reads(tmp_path, name):
    case, expected = CASES[name], CASES[name]["expected"]
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, case))
    assert tokenizer.bos_token_id == expected["bos_token_id"]
    eos = expected["eos_token_id"]
    assert tokenizer.eos_token_ids == (() if eos is None else (eos,))
    for i, text in enumerate(GOLD["texts"]):
        ids = expected["ids"][i]
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]  # one BOS where transformers puts a second in front
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected["plain_ids"][i]
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected["skipped"][i]
        if ids == expected["ids"][i]:
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected["shown"][i]
    if "chat" in expected:
        text = tokenizer.apply_chat_template(MESSAGES)
        assert text == expected["chat"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected["chat_ids"]
        with_tools = tokenizer.apply_chat_template(MESSAGES, tools=GOLD["tools"], add_generation_prompt=False)
        assert with_tools == expected["chat_with_tools"]
    else:
        with pytest.raises(RequestRejected, match="no chat template"):
            tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("name", ["plain", "bos_first"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_token_decides_where_it_stands(tmp_path, name, add_bos):
    case = {**CASES[name], "settings": {**CASES[name]["settings"], "add_bos_token": add_bos}}
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, case))
    assert tokenizer.encode("Hello").count(0) == add_bos
    assert tokenizer.encode("<|bos|>Hello").count(0) == 1
    assert tokenizer.encode("Hello", add_special_tokens=False).count(0) == 0


def test_eos_ids_of_all_files_are_joined(tmp_path):
    folder = write_folder(tmp_path, CASES["eos_is_turn_end"])
    assert load_hf_tokenizer(folder, (1, 9)).eos_token_ids == (1, 9, 3)
    assert load_hf_tokenizer(folder, (3,)).eos_token_ids == (3,)


def test_prompts_are_never_cut(tmp_path):
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, CASES["truncation"]))
    assert tokenizer.decode(tokenizer.encode("word " * 100)) == "word " * 100


def test_a_declared_id_that_is_not_the_next_free_one(tmp_path):
    case = {"settings": {"added_tokens_decoder": {"900": {"content": "<new>", "special": True}}}}
    with pytest.raises(CheckpointError, match=r"'<new>' the id 900, but the next free one .* is 260"):
        load_hf_tokenizer(write_folder(tmp_path, case))


def test_a_special_token_without_an_id_is_not_invented(tmp_path):
    """The model has no row for it."""
    case = {"settings": {"pad_token": "<pad>", "additional_special_tokens": ["<more>"]}}
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, case))
    assert tokenizer.vocab_size == 260
    assert max(tokenizer.encode("<pad><more>")) < 260


BROKEN = {
    "tokenizer.json": (b"{}", "tokenizer.json"),
    "tokenizer_config.json": (b"[]", "tokenizer_config.json: expected a JSON object"),
    "special_tokens_map.json": (b"{", "special_tokens_map.json: not valid JSON"),
    "added_tokens.json": (b'{"a": "b"}', "added_tokens.json: the id of 'a'"),
    "chat_template.jinja": (b"\xff\xfe", "chat_template.jinja: cannot be read as UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path, name):
    data, message = BROKEN[name]
    folder = write_folder(tmp_path, CASES["plain"])
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf_tokenizer(folder)
    assert str(tmp_path) not in str(caught.value)


def test_without_tokenizer_json(tmp_path):
    folder = write_folder(tmp_path, CASES["plain"])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.json in the folder; pass token ids"):
        load_hf_tokenizer(folder)


def test_templates_without_a_default(tmp_path):
    case = {"settings": {"chat_template": [{"name": "rag", "template": "x"}]}}
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, case))
    with pytest.raises(RequestRejected, match="'default', only rag"):
        tokenizer.apply_chat_template(MESSAGES)
