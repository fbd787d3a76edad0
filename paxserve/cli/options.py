"""Flags made of the fields of a dataclass, and a dataclass made of the flags that were given.

A flag is the field's name with dashes, its help the field's entry in the class's docstring, and its default the field's.
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from paxserve.config import EngineConfig
from paxserve.sampling_params import SamplingParams

T = TypeVar("T")

DEFAULT_MODEL = "smollm2"

LEFT_OUT = {
    EngineConfig: (),
    # All draws of a run follow from the engine's --seed; a seed for every request would make equal prompts draw alike.
    SamplingParams: ("seed",),
}


def add_engine_options(parser: argparse.ArgumentParser, *, model: str | None = DEFAULT_MODEL) -> None:
    """A flag for every field of `EngineConfig`, with `model` as the default of that one."""
    _add_options(parser.add_argument_group("engine"), EngineConfig, {"model": model})


def add_sampling_options(parser: argparse.ArgumentParser, *, without: Sequence[str] = (), **defaults: Any) -> None:
    """A flag for every field of `SamplingParams` but those in `without`; `defaults` replace the fields' own."""
    _add_options(parser.add_argument_group("sampling"), SamplingParams, defaults, without)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options as keywords: those that were given, and the model."""
    return _given(args, EngineConfig)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises ValueError for a value that `SamplingParams` refuses."""
    return SamplingParams(**_given(args, SamplingParams))


def subparser(subparsers: Any, name: str, *, help: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """The parser of one command; what it prints keeps the line breaks of `description` and `epilog`."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_options(group: Any, cls: type, defaults: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    docs, hints = _field_docs(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in LEFT_OUT[cls] or field.name in without:
            continue
        default = defaults.get(field.name, field.default)
        text = docs.get(field.name) or next(f"see {_flag(name)}" for name, doc in docs.items() if field.name in doc)
        if default is not None:
            text = f"{text} (default: {default})"
        kind = _argument(hints[field.name], default)
        # Only what was given, or what the command itself sets, reaches the namespace.
        if field.name not in defaults:
            default = argparse.SUPPRESS
        group.add_argument(_flag(field.name), help=text.replace("%", "%%"), default=default, **kind)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)} - set(LEFT_OUT[cls])
    return {name: value for name, value in vars(args).items() if name in names}


def _argument(hint: Any, default: Any) -> dict[str, Any]:
    """What argparse needs to know of a field with this type."""
    options = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not types.NoneType]
    main = options[-1]  # `str | Sequence[str]`: a sequence covers both
    if main is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(main) is Literal:
        return {"choices": typing.get_args(main)}
    if inspect.isclass(origin := typing.get_origin(main)) and issubclass(origin, Mapping):
        return {"action": _AppendPair, "type": _pair(*typing.get_args(main)), "metavar": "ID=VALUE"}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        (item,) = typing.get_args(main)
        return {"action": "append", "type": item, "metavar": item.__name__.upper()}
    optional = types.NoneType in typing.get_args(hint) and default is not None
    return {"type": _or_none(main) if optional else main, "metavar": main.__name__.upper()}


def _or_none(kind: Callable[[str], T]) -> Callable[[str], T | None]:
    """Reads the word "none" where a field may be None and is not by default."""

    def read(text: str) -> T | None:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its message
    return read


def _pair(key: Callable[[str], Any], value: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    def pair(text: str) -> tuple[Any, Any]:
        left, _, right = text.partition("=")
        return key(left), value(right)

    return pair


class _AppendPair(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, dict([*getattr(namespace, self.dest, {}).items(), values]))


def _field_docs(cls: type) -> dict[str, str]:
    """The entries `name: text` (or `name, name: text`) of a class's docstring, as one line each."""
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if entry := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            docs.update(dict.fromkeys(names, entry[2]))
        elif line.startswith(" "):
            docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
        else:
            names = []
    return docs
