"""Configurations that come with the code, wherever a configuration alone is enough: sizes, plans, random weights.

Each file of `configs/` holds facts of the config.json published with the model, those that fix its shapes and numbers.
"""

import functools
import json
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).parent / "configs"


@functools.cache
def builtin_names() -> tuple[str, ...]:
    """The models there are, in alphabetical order."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _DIRECTORY.glob("*.json")))


def builtin_file(name: str) -> Path:
    """The config.json of a model by its name. Raises ValueError for a name that is not in `builtin_names()`."""
    if name not in builtin_names():
        raise ValueError(f"no built-in configuration {name!r}; there are {', '.join(builtin_names())}")
    return _DIRECTORY / f"{name}.json"


def builtin_config(name: str) -> dict[str, Any]:
    """The parsed config.json of a model by its name. Raises ValueError as `builtin_file` does."""
    return json.loads(builtin_file(name).read_bytes())
