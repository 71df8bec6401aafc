"""Writes cases.json: tokenizer tables as GGUF has them, and the tokens that transformers makes of texts.

The vocabularies are trained on a few sentences here, so they are small and free.
Run with the `parity` extra: `python tests/golden/gguf_tokenizer/write.py`.
"""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 1234567 o'clock and they're HERE.",
    "Größere Übungen für Müller: ΑΒΓ αβγ, Привет мир! 世界 你好 こんにちは 😀 e\u0301 é",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(3.14))\t// end",
    "hello hello hello world world the the the there then other brother mother",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  hi",
    "hello",
    " hello  world \n",
    "I'LL we'Ve DON'T 12 123 1234 ½ ²",
    "HelloWorld helloWORLD XMLHttp\n\n \n x",
    "<s>a</s>b <think>c",
    "e\u0301 \u1e9b\u0323 ﬁ 👩‍👩‍👧 \u200b\u00a0x",
    "a/b//c.\r\n\r\n...!?\n--",
]
CONTROL, USER, BYTE, NORMAL, UNKNOWN = 3, 4, 6, 1, 2


def byte_level(pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>", "<think>"],
        "tokenizer.ggml.token_type": [*[NORMAL] * len(tokens), CONTROL, CONTROL, USER],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in trained["merges"]],
    }


def sentencepiece():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.train_from_iterator(
        CORPUS[:1] + CORPUS[3:], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    trained = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].get)
    letters = [piece for piece in pieces if len(piece) == 1]
    merged = [piece for piece in pieces if len(piece) > 1]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *data, *merged, *letters, "<think>"],
        "tokenizer.ggml.scores": [
            *[0.0] * 259,
            *[float(-i) for i in range(len(merged))],
            *[float(-len(merged) - i) for i in range(len(letters))],
            0.0,
        ],
        "tokenizer.ggml.token_type": [
            *[UNKNOWN, CONTROL, CONTROL],
            *[BYTE] * 256,
            *[NORMAL] * (len(merged) + len(letters)),
            USER,
        ],
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tokenised(metadata):
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    tables = {}
    for key, value in metadata.items():
        name = key.removeprefix("tokenizer.ggml.")
        tables[names.get(name, name)] = value
    # only for phi3 does transformers put the space in front by a normalizer, as Llama 2's tokenizer.json does
    backend, _ = convert_gguf_tokenizer("phi3", tables)
    backend.post_processor = None
    if tables["pre_tokenizer_type"] == "qwen2":  # of GGUF it forgets how Qwen2's own tokenizer normalises
        backend.normalizer = Qwen2Tokenizer().backend_tokenizer.normalizer
    return [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]


def main():
    tables = {pre: byte_level(pre) for pre in ("gpt-2", "llama-bpe", "qwen2", "tekken")}
    tables["sentencepiece"] = sentencepiece()
    document = {
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "cases": {name: {"metadata": table, "ids": tokenised(table)} for name, table in tables.items()},
    }
    (Path(__file__).parent / "cases.json").write_text(json.dumps(document) + "\n")
    print(f"{len(tables)} tokenizers, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
