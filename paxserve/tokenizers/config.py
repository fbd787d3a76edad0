"""What stands beside a tokenizer file in a Hugging Face model directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AddedToken:
    """A token that was added to a vocabulary after it was trained."""

    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerConfig:
    """`tokenizer_config.json`, with `special_tokens_map.json` and `chat_template.jinja` where they add to it.

    add_bos, add_eos: None where the directory does not say.
    legacy: SentencePiece's dummy prefix also goes after each special token inside a text, as in the first Llama tokenizers.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: str | None = None
    added_tokens: tuple[tuple[int, AddedToken], ...] = ()
    legacy: bool = True

    @classmethod
    def read(cls, directory: Path) -> "TokenizerConfig":
        """Reads `directory`; files that are not there leave the defaults. Raises ValueError on a malformed one."""
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        template_file = directory / "chat_template.jinja"
        added = {
            int(i): AddedToken(t["content"], bool(t.get("special", False)))
            for i, t in config.get("added_tokens_decoder", {}).items()
        }
        return cls(
            bos_token=_content(config.get("bos_token")),
            eos_token=_content(config.get("eos_token")),
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
            chat_template=(
                template_file.read_text(encoding="utf-8")
                if template_file.exists()
                else _default_template(config.get("chat_template"))
            ),
            added_tokens=tuple(sorted(added.items())),
            legacy=config.get("legacy") is not False,
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}: it must be a JSON object")
    return value


def _content(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _default_template(value: str | list[dict[str, str]] | None) -> str | None:
    """The template, or the one named "default" of several."""
    if not isinstance(value, list):
        return value
    return {t["name"]: t["template"] for t in value}.get("default")
