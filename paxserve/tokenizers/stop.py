"""Stop strings, matched in a stream of text."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back what may turn out to be the beginning of one.

    The match is the stop string that is complete first, whatever the increments; of several that end together, the one
    given first. `matched` names it once found. As in vLLM the text ends before the match, or right after it with
    `include_in_output`, where nothing needs to be held back.

    Raises ValueError on an empty stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty: it would match at once; remove it")
        self._stop = tuple(stop)
        self._include = include_in_output
        self._tail = ""  # the longest end of the text seen so far that begins a stop string
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next text, gives what may be shown; nothing any more after a match."""
        if self.matched is not None:
            return ""
        seen = self._tail + text
        shown = len(self._tail) if self._include else 0
        ends = [(seen.index(s) + len(s), order) for order, s in enumerate(self._stop) if s in seen]
        if ends:
            end, order = min(ends)
            self.matched = self._stop[order]
            return seen[shown : end if self._include else end - len(self.matched)]
        self._tail = self._partial_match(seen)
        return seen[shown:] if self._include else seen[: len(seen) - len(self._tail)]

    def flush(self) -> str:
        """Ends the text: what was held back, as no stop string came of it."""
        held = "" if self._include or self.matched is not None else self._tail
        self._tail = ""
        return held

    def _partial_match(self, seen: str) -> str:
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(seen)), 0, -1):
            if any(len(s) > length and s.startswith(seen[-length:]) for s in self._stop):
                return seen[-length:]
        return ""
