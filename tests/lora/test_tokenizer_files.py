import json

import pytest
from adapter_files import TOY, write_adapter
from golden_files import TINY_LLAMA

from lorajax.errors import AdapterFormatError
from lorajax.lora.adapter_folder import AdapterFolder
from lorajax.lora.peft import load_peft
from lorajax.lora.tokenizer_files import check_tokenizer_files
from lorajax.lora.weights import AdapterWarning


def with_files(tmp_path, **files):
    folder = write_adapter(tmp_path / "a")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_copy_of_the_base_tokenizer(tmp_path):
    files = {name: (TINY_LLAMA / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    folder = with_files(tmp_path, **files)
    check_tokenizer_files(AdapterFolder(folder), 320, None, pytest.fail)  # the tiny checkpoints' vocabulary
    with pytest.raises(AdapterFormatError, match="the base has ids below 200"):
        check_tokenizer_files(AdapterFolder(folder), 200, None, pytest.fail)


HELD = {
    "added_tokens": {"added_tokens__json": {"<pad>": 39, "<a>": 0}},
    "tokenizer_bpe": {
        "tokenizer__json": {
            "added_tokens": [{"id": 39, "content": "x"}],
            "model": {"vocab": {"a": 0, "b": 39}},
        }
    },
    "tokenizer_unigram": {"tokenizer__json": {"model": {"vocab": [["a", 0.0]] * 40}}},
    "decoder": {"tokenizer_config__json": {"added_tokens_decoder": {"39": {"content": "x"}}}},
    "none_of_it": {"tokenizer__json": {}, "tokenizer_config__json": {}, "added_tokens__json": {}},
}


@pytest.mark.parametrize("case", HELD)
def test_ids_below_the_vocabulary_are_not_added(tmp_path, case):
    assert load_peft(with_files(tmp_path, **HELD[case]), TOY).rank == 4


NEW = {
    "added_tokens": {"added_tokens__json": {"<pad>": 3, "<new>": 40}},
    "tokenizer_added": {"tokenizer__json": {"added_tokens": [{"id": 40, "content": "<new>"}]}},
    "tokenizer_bpe": {"tokenizer__json": {"model": {"vocab": {"a": 0, "<new>": 40}}}},
    "tokenizer_unigram": {"tokenizer__json": {"model": {"vocab": [["a", 0.0]] * 40 + [["<new>", 0.0]]}}},
    "decoder": {"tokenizer_config__json": {"added_tokens_decoder": {"40": {"content": "<new>"}}}},
}


@pytest.mark.parametrize("case", NEW)
def test_truly_new_tokens_are_refused_by_name(tmp_path, case):
    with pytest.raises(AdapterFormatError, match="'<new>' with id 40; the base has ids below 40"):
        load_peft(with_files(tmp_path, **NEW[case]), TOY)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens__json": {"x": "40"}}, "'x' has no id"),
        ({"added_tokens__json": {"x": -1}}, "'x' has no id"),
        ({"tokenizer__json": {"added_tokens": ["x"]}}, "'x' has no id"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"one": {"content": "x"}}}}, "'x' has no id"),
        ({"tokenizer__json": "version https://git-lfs.github.com/spec/v1"}, "tokenizer.json: not valid JSON"),
        ({"added_tokens__json": []}, "added_tokens.json: expected a JSON object"),
    ],
)
def test_files_that_are_no_tokenizers(tmp_path, files, message):
    with pytest.raises(AdapterFormatError, match=message):
        load_peft(with_files(tmp_path, **files), TOY)


TEMPLATES = {
    "file": {"chat_template__jinja": "{{ mine }}"},
    "field": {"tokenizer_config__json": {"chat_template": "{{ mine }}"}},
    "named": {
        "tokenizer_config__json": {
            "chat_template": [
                {"name": "rag", "template": "base"},
                {"name": "default", "template": "{{ mine }}"},
            ]
        }
    },
    "file_before_field": {
        "chat_template__jinja": "{{ mine }}",
        "tokenizer_config__json": {"chat_template": "base"},
    },
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_another_chat_template_is_warned_of(tmp_path, case):
    folder = with_files(tmp_path, **TEMPLATES[case])
    load_peft(folder, TOY)  # unknown template of the base
    load_peft(folder, TOY, base_chat_template="{{ mine }}\n")
    with pytest.warns(AdapterWarning, match="chat template of its own"):
        load_peft(folder, TOY, base_chat_template="base")


def test_templates_are_text(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(AdapterFormatError, match="not UTF-8"):
        load_peft(folder, TOY)
    (folder / "chat_template.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(AdapterFormatError, match="longer than"):
        load_peft(folder, TOY)
