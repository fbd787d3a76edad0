"""Chat templates: a conversation rendered to the prompt text its model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paxserve.tokenizers.tokenizer import Tokenizer


class ChatTemplate:
    """A Jinja chat template in a sandbox, with the functions that Hugging Face templates rely on.

    Raises ValueError if the source is not a valid template.
    """

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
        # A template tests `bos_token is defined`: an absent token is left undefined, not empty.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> "ChatTemplate":
        """The template `source`, or else the tokenizer's own; ValueError if there is neither."""
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            raise ValueError("the model comes without a chat template: pass one, or send a plain prompt instead")
        bos, eos = (
            None if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        return cls(source, bos_token=bos, eos_token=eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; encode it with `add_special_tokens=False`.

        A message has a `role` and a `content`, a string or a list of {"type": "text", "text": ...} parts (joined by line
        breaks, as vLLM does); a message with `tool_calls` may go without content. Further keys, `tools` and `variables` are
        handed to the template.

        Raises ValueError for a malformed message or when the template fails or refuses the conversation.
        """
        if not messages:
            raise ValueError("messages is empty: a chat needs at least one message")
        conversation = {
            "messages": [_check(i, message) for i, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        variables = variables or {}
        if taken := sorted(conversation.keys() & variables.keys()):
            raise ValueError(f"template variables {taken} are given by the request itself: rename or remove them")
        try:
            return self._template.render({**self._tokens, **variables, **conversation})
        except _Refusal as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template failed: {error or type(error).__name__}") from error


class _Refusal(Exception):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, which a model would read as text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check(index: int, message: Any) -> dict[str, Any]:
    """The message with its content as one string."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{index}] is {type(message).__name__}: it must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}].role is {role!r}: it must be a non-empty string")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_of(f"messages[{index}].content[{j}]", part) for j, part in enumerate(content))
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"messages[{index}].content is {content!r}: it must be a string or a list of text parts")
    return {**message, "content": content}


def _text_of(place: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'{place} is {part!r}: only {{"type": "text", "text": "..."}} parts are supported')
    return part["text"]
