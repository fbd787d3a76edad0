"""Chat templates against transformers (golden), and what is refused."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from paxserve.checkpoints.gguf import gguf_metadata
from paxserve.tokenizers import ChatTemplate, tokenizer_from_gguf

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizer_golden.json").read_text())
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("case", GOLDEN["chats"], ids=lambda case: f"{case['name']}-{case['tools'] is not None}")
def test_equals_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["source"], bos_token="<|im_start|>", eos_token="<|im_end|>")
    prompt = template.render(
        GOLDEN["messages"], tools=case["tools"], add_generation_prompt=case["add_generation_prompt"]
    )
    assert prompt == case["rendered"]


def test_template_of_a_tokenizer(smollm2_gguf: Path) -> None:
    tokenizer = tokenizer_from_gguf(gguf_metadata(smollm2_gguf))
    prompt = ChatTemplate.of(tokenizer).render(HI)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ChatTemplate.of(tokenizer, "{{ bos_token + eos_token }}").render(HI) == "<|im_start|><|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="pass one"):
        ChatTemplate.of(tokenizer)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_further_keys_and_variables() -> None:
    template = ChatTemplate(
        "{{ messages[0].tool_calls[0].id }} {{ messages[0].content is none }} {{ enable_thinking }}"
    )
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    assert template.render([message], variables={"enable_thinking": False}) == "x True False"


def test_reserved_variables() -> None:
    with pytest.raises(ValueError, match=r"\['messages', 'tools'\]"):
        ChatTemplate("x").render(HI, variables={"tools": [], "messages": [], "other": 1})


def test_absent_tokens_are_undefined() -> None:
    assert ChatTemplate("{{ bos_token is defined }}").render(HI) == "False"


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HI) in {str(datetime.now().year + d) for d in (-1, 0)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ nothing.at.all }}", "failed: 'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "failed: .*concatenate"),
        ("{{ messages[0].content.index('x') }}", "failed: .*not found"),
        ("{{ 1 // 0 }}", "failed: .*zero"),
        ("{{ messages.append(1) }}", "failed: .*unsafe|failed: .*not safely"),
        ("{{ ''.__class__.__mro__ }}", "failed: .*unsafe"),
        ("{{ messages | tojson(indent=nothing) }}", "failed"),
    ],
)
def test_errors_in_a_template(source: str, message: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ValueError, match=f"the chat template {message}"):
        template.render(HI)


def test_invalid_template() -> None:
    with pytest.raises(ValueError, match=r"not valid Jinja \(line 2\)"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is str"),
        ([{"content": "hi"}], r"messages\[0\]\.role is None"),
        ([*HI, {"role": "", "content": "hi"}], r"messages\[1\]\.role is ''"),
        ([{"role": "user"}], r"messages\[0\]\.content is None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is .*only"),
        ([{"role": "user", "content": ["text"]}], r"content\[0\] is 'text'"),
    ],
)
def test_malformed_messages(messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate("x").render(messages)
