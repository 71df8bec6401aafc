"""Writes cases.json: what transformers makes of a tokenizer's folder, in many spellings.

A case is the tokenizer.json of a tiny checkpoint with some fields replaced, and the files beside it.
Run with the `parity` extra: `python tests/golden/hf_tokenizer/write.py`.
"""

import json
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
BASE = HERE.parent / "tiny" / "llama_gqa_llama3rope" / "tokenizer.json"
NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "tokenizer_class": "PreTrainedTokenizerFast"}
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [0], "tokens": ["<|bos|>"]}},
}
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}


def token(content, special, **flags):
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, "special": special, **plain, **flags}


FURTHER = {"260": token("<|tool|>", True), "261": token("<think>", False), "262": token("Zug", False)}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = "tools: {{ tools | tojson }}"

CASES = {
    "plain": {"settings": NAMES},
    "bos_first": {"tokenizer": {"post_processor": BOS_FIRST}, "settings": NAMES},
    "truncation": {"tokenizer": {"truncation": TRUNCATION}, "settings": NAMES},
    "names_are_objects": {
        "settings": {
            **NAMES,
            "bos_token": token("<|bos|>", True, __type="AddedToken"),
            "eos_token": token("<|eos|>", True, __type="AddedToken"),
        }
    },
    "names_in_map": {
        "settings": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "files": {"special_tokens_map.json": json.dumps({"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})},
    },
    "further_tokens": {"settings": {**NAMES, "added_tokens_decoder": FURTHER}},
    "further_tokens_old": {
        "settings": NAMES,
        "files": {"added_tokens.json": json.dumps({"<|tool|>": 260, "<think>": 261})},
    },
    "special_by_name": {"settings": {**NAMES, "additional_special_tokens": ["!", "<|im_end|>"]}},
    "special_by_name_v5": {"settings": {**NAMES, "extra_special_tokens": ["<|im_end|>"]}},
    "eos_is_turn_end": {"settings": {**NAMES, "eos_token": "<|im_end|>"}},
    "template": {"settings": {**NAMES, "chat_template": TEMPLATE}},
    "template_file_wins": {
        "settings": {**NAMES, "chat_template": "not this one"},
        "files": {"chat_template.jinja": TEMPLATE},
    },
    "templates_by_name": {
        "settings": {
            **NAMES,
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": TOOLS},
            ],
        }
    },
    "template_files_by_name": {
        "settings": NAMES,
        "files": {"chat_template.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": TOOLS},
    },
    "template_without_names": {
        "settings": {
            "chat_template": "{{ 'bos' if bos_token is defined else 'none' }}{{ pad_token }}|{{ documents }}"
        },
    },
}

TEXTS = [
    "Hello world",
    "",
    "<|bos|>Hello",
    "Grüße, 世界! 👩‍👩‍👧 12345 it's\n\n  ok",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|tool|>b<think>c</think> Zug",
    "one two three four five six",
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": '1 < 2 & "x"\''}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}},
}


def described(case):
    with tempfile.TemporaryDirectory() as folder:
        write_folder(case, BASE, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = {
        "ids": ids,
        "plain_ids": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "shown": [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ids],
        "skipped": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if tokenizer.chat_template is not None:
        expected["chat"] = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        expected["chat_ids"] = tokenizer.apply_chat_template(
            MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        expected["chat_with_tools"] = tokenizer.apply_chat_template(MESSAGES, tools=[TOOL], tokenize=False)
    return expected


def write_folder(case, base, folder):
    """Lay out one case; `test_hf_tokenizer.py` does the same."""
    tokenizer = {**json.loads(base.read_text()), **case.get("tokenizer", {})}
    files = {
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps(case["settings"]),
        **case.get("files", {}),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def main():
    document = {
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "messages": MESSAGES,
        "tools": [TOOL],
        "cases": {name: {**case, "expected": described(case)} for name, case in CASES.items()},
    }
    (HERE / "cases.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(CASES)} cases, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
