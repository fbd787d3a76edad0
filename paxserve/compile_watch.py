"""Counts compilations where there should be none."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_watchers = threading.local()
_registered = threading.Lock()
_listening = False


class CompileWatch:
    """Counts XLA compilations made by this thread inside `with watch.counting():`."""

    def __init__(self) -> None:
        self.count = 0
        _listen()

    @contextmanager
    def counting(self) -> Iterator[None]:
        outer = getattr(_watchers, "current", None)
        _watchers.current = self
        try:
            yield
        finally:
            _watchers.current = outer


def _listen() -> None:
    """Register the one listener of this process; JAX offers no way to take a listener back."""
    global _listening
    with _registered:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _listening = True


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    watch = getattr(_watchers, "current", None)
    if event == _EVENT and watch is not None:
        watch.count += 1
