"""Writes cases.json: what transformers makes of conversations with templates that use all that it offers.

Run with the `parity` extra: `python tests/golden/chat/write.py`.
"""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").iterdir())}
GENERAL = ("chatml", "tools", "alternates", "reasoning", "blocks", "filters")
USER = {"role": "user", "content": "Grüße, 世界 <b>&amp;</b>\n 'q' \"r\" "}
SYSTEM = {"role": "system", "content": "  Be brief. "}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"], "c": None}}}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "No?"}],
    "two_turns": [USER, {"role": "assistant", "content": "Yes."}, USER],
    "same_role": [USER, USER],
    "tool_call": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": {"sum": 3, "unit": None}},
        {"role": "tool", "content": "4"},
    ],
    "two_calls": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}],
    "null_calls": [USER, {"role": "assistant", "content": "Yes.", "tool_calls": None}],
    "thought": [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}],
    "thought_old_name": [USER, {"role": "assistant", "content": "Yes.", "thinking": "Hm."}],
    "thought_short_name": [USER, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}],
    "thought_twice": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "A", "thinking": "B", "reasoning": "C"},
    ],
    "thought_null": [
        USER,
        {"role": "assistant", "content": "Yes.", "reasoning_content": None, "reasoning": "C"},
    ],
    "thought_in_text": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, USER],
    "blocks": [
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "image", "url": "x"}]},
        {"role": "note", "content": "left out"},
        {"role": "user", "content": "this?"},
    ],
    "no_content": [{"role": "user"}],
    "numbers": [{"role": "user", "content": 3}],
    "empty": [],
}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds é & <two>.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "number"}, "a": {"enum": [1, 2.5, None]}},
        },
    },
}


def settings_of(template):
    """Keyword arguments to try a template with."""
    yield {"add_generation_prompt": True}
    if template == "chatml":
        yield {"add_generation_prompt": False}
        yield {"add_generation_prompt": True, "enable_thinking": False}
    if template in ("tools", "filters"):
        yield {"tools": [FUNCTION, FUNCTION], "add_generation_prompt": False}
        yield {"tools": [], "bos_token": "<other>"}
    if template == "documents":
        yield {"documents": [{"title": "One", "text": "1"}, {"title": "Two", "text": "2"}]}


def main():
    fast = Tokenizer(
        models.WordLevel({text: i for i, text in enumerate(SPECIAL.values())}, unk_token="<unk>")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **SPECIAL)
    cases = []
    for template, source in TEMPLATES.items():
        for conversation in CONVERSATIONS if template in GENERAL else ["user"]:
            for settings in settings_of(template):
                case = {"template": template, "conversation": conversation, "settings": settings}
                try:
                    case["text"] = tokenizer.apply_chat_template(
                        CONVERSATIONS[conversation], chat_template=source, tokenize=False, **settings
                    )
                except Exception as error:  # whatever a template raises
                    case["error"] = type(error).__name__
                cases.append(case)
    document = {
        "transformers": transformers.__version__,
        "special_tokens": SPECIAL,
        "conversations": CONVERSATIONS,
        "cases": cases,
    }
    text = json.dumps({**document, "cases": []}, ensure_ascii=False, indent=1)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)  # a case to a line
    text = text.replace('"cases": []', f'"cases": [\n{lines}\n]')
    (Path(__file__).parent / "cases.json").write_text(text + "\n", encoding="utf-8")
    failed = sum("error" in case for case in cases)
    print(f"{len(cases)} cases, {failed} of them errors, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
