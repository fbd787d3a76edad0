"""Writes tokenizer_golden.json: what Hugging Face transformers makes of varied text and of chat templates.

Run by hand, with transformers and gguf installed:

    python tests/golden/make_tokenizer_golden.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

The file holds the texts, SmolLM2's ids of each, where the pre-tokenizers that transformers knows by their GGUF name cut each
text (end offsets of the words), and chat templates with what transformers renders from them.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2026; they'll say I'd NEVER've done THAT, wouldn't you?",
    "  leading and trailing   spaces  ",
    "tabs\tand\nnewlines\r\n\r\n\n  mixed \u00a0\u3000\u2009 spaces\n",
    "1 12 123 1234 12345 3.14159 1,000,000 ½ ² Ⅷ ١٢٣ 四",
    "def fib(n: int) -> int:\n    if n < 2:\n        return n  # base\n\n\treturn fib(n - 1) + fib(n-2)\n",
    'for (int i=0;i<n;++i){ a[i]^=~b[i]&0xFF; } // "quoted\\n" $HOME `x` |y|',
    "<div class='a'>&amp;</div> https://example.com/a?b=c#d user@example.org ~/x_y-z",
    "La Révolution française, l'été à Noël; Ünïcödé naïve cafe\u0301 Straße ŁÓDŹ",
    "Москва — столица России. Ёлка, подъезд, ЩИТ",
    "Η Ελλάδα είναι όμορφη χώρα. ΆΈΉ",
    "今日はとても良い天気ですね。カタカナ、ひらがな、漢字。",
    "中文分词测试，包括标点！“引号”和数字123。",
    "한국어 문장도 토큰으로 나눕니다. ㄱㄴㄷ",
    "العربية لغة جميلة، مَرْحَبًا بِكَ",
    "עברית נכתבת מימין לשמאל",
    "हिन्दी में नमस्ते, क्षत्रिय",
    "ภาษาไทยไม่มีช่องว่าง",
    "emoji 🎉🍕 👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ☃️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀",
    "fooBarBaz HTTPServer XMLHttpRequest snake_case SCREAMING_CASE iPhone's",
    "=======>>> !!!??? ... --- *** \\\\\\ ///\n///\n",
    "zero\u200bwidth \ufeffbom \u202eright\x00\x07\x1b[0m\x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start| >",
]

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Größe? \"quoted\" 'single' 🎉"},
    {"role": "assistant", "content": "  Yes.\n"},
    {"role": "user", "content": "And?"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "llama-like": (
        "{{- bos_token }}\n{%- for message in messages %}\n"
        "    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|end|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "blocks": (
        "{% if tools %}\n{{ tools | tojson }}\n{{ tools | tojson(indent=2) }}\n{% endif %}\n"
        "{% for message in messages %}\n    {% if message.role == 'system' %}{% continue %}{% endif %}\n"
        "  {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "{% generation %}{{ message | tojson }}{% endgeneration %}\n{% endfor %}\n"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{% if never is defined %}never{% endif %}"
    ),
}


def words(regex: str, text: str) -> list[int]:
    return [end for _, (_, end) in pre_tokenizers.Split(Regex(regex), "isolated").pre_tokenize_str(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    path: Path = parser.parse_args().gguf
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers does not know the name "smollm"; SmolLM2's published tokenizer.json splits digits apart.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    templates = {"smollm2": tokenizer.chat_template, **TEMPLATES}
    golden = {
        "made_with": {name: version(name) for name in ("transformers", "tokenizers")},
        "texts": TEXTS,
        "smollm2_ids": [tokenizer.encode(text) for text in TEXTS],
        "words": {
            name: [words(regex, text) for text in TEXTS] for name, regex in sorted(GGUF_PRE_TOKENIZER_SPLITS.items())
        },
        "messages": MESSAGES,
        "tools": TOOLS,
        "chats": [
            {
                "name": name,
                "source": source,
                "tools": tools,
                "add_generation_prompt": prompt,
                "rendered": tokenizer.apply_chat_template(
                    MESSAGES, chat_template=source, tools=tools, add_generation_prompt=prompt, tokenize=False
                ),
            }
            for name, source in templates.items()
            for tools, prompt in ((None, True), (TOOLS, False))
        ],
    }
    out = Path(__file__).with_name("tokenizer_golden.json")
    out.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
