"""`ModelConfig` as JSON, for checkpoint directories of our own."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from paxserve.models.config import ModelConfig


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings, every field of the configuration among them."""
    return dataclasses.asdict(config)


def config_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_json`. Raises ValueError for a field that is unknown or missing."""
    return _build(ModelConfig, fields)


def _build(kind: type, fields: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    if unknown := fields.keys() - hints.keys():
        raise ValueError(f"unknown {kind.__name__} fields: {', '.join(sorted(unknown))}; written by a newer version?")
    try:
        return kind(**{name: _value(hints[name], value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, value: Any) -> Any:
    """JSON knows neither tuples nor dataclasses; the field's type says what a list or an object was."""
    if isinstance(value, Mapping):
        nested = next(
            kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        )
        return _build(nested, value)
    return tuple(_value(None, item) for item in value) if isinstance(value, list) else value
