"""The KV trace: every page event as one line of JSON."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from paxserve.pages import PageEvent


def open_trace(path: str | Path | None) -> tuple[Callable[[PageEvent], None] | None, Callable[[], None]]:
    """(what the page pool calls with each event, what closes the file). Without a path nothing is traced."""
    if path is None:
        return None, lambda: None
    file = open(path, "w")  # noqa: SIM115 (closed by the caller)

    def write(event: PageEvent) -> None:
        fields = {name: value for name, value in dataclasses.asdict(event).items() if value is not None}
        file.write(json.dumps(fields) + "\n")

    return write, file.close
