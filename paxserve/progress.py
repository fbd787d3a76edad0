"""Progress bars on the terminal (standard error), in the form of the engine's `Progress` callback."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """One bar per kind of work. Nothing is drawn unless `enabled`."""

    def __init__(self, *, enabled: bool) -> None:
        columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not enabled)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bars.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of `what` are done."""
        if not self._tasks:
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done)
