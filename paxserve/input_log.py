"""The input log: all that came into an engine, step by step, from which the run can be repeated.

A file of JSON lines: a header, then an entry for every step of the engine, written before the step, and between them the
tokens of requests as they ended.

    {"format_version": 1, "model": "smollm2", "fingerprint": "…", "config": {…}, "limits": {…}, "jax": "0.10.2"}
    {"now": 81.2, "check": 0, "inputs": [{"add": "0", "prompt": [5, 9], "params": {"max_tokens": 2, "seed": 7}, "priority": 0}]}
    {"now": 81.3, "check": 0, "inputs": []}
    {"ended": "0", "token_ids": [[11, 12]], "reasons": ["length"]}
    {"now": 81.4, "check": 2774512, "inputs": [{"abort": "1"}]}
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxserve.outputs import RequestOutput
from paxserve.sampling_params import SamplingParams

FORMAT_VERSION = 1

_DEFAULTS = SamplingParams()


@dataclass(frozen=True)
class Arrival:
    """A request, with the seed that it was given or got."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class Entry:
    """What precedes one step.

    now: the engine's clock, in seconds.
    check: a checksum of all tokens given out so far.
    """

    now: float
    check: int
    inputs: tuple[Arrival | Abort, ...]

    def to_json(self) -> dict[str, Any]:
        return {"now": self.now, "check": self.check, "inputs": [_input_to_json(each) for each in self.inputs]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Entry":
        return cls(fields["now"], fields["check"], tuple(_input_from_json(each) for each in fields["inputs"]))


@dataclass(frozen=True)
class Ended:
    """The tokens of a request's samples, and why each of them ended."""

    request_id: str
    token_ids: list[list[int]]
    reasons: list[str | None]

    @classmethod
    def of(cls, output: RequestOutput) -> "Ended":
        samples = output.outputs
        return cls(output.request_id, [each.token_ids for each in samples], [each.finish_reason for each in samples])

    def to_json(self) -> dict[str, Any]:
        return {"ended": self.request_id, "token_ids": self.token_ids, "reasons": self.reasons}


@dataclass(frozen=True)
class InputLog:
    """A log as it was read. The last lines of a run that broke off may be missing."""

    header: Mapping[str, Any]
    entries: tuple[Entry, ...]
    ended: Mapping[str, Ended]


class InputRecorder:
    """Gathers an engine's inputs into one entry per step.

    publish: is given every entry before its step.
    file: is written the header, the entries and the requests that ended.
    """

    def __init__(
        self,
        header: Mapping[str, Any],
        publish: Callable[[Entry], object] | None = None,
        file: str | Path | None = None,
    ) -> None:
        self.check = 0
        self.publish = publish
        self._inputs: list[Arrival | Abort] = []
        # Line by line, so that the log of a run that breaks off reaches as far as the run.
        self._file = None if file is None else open(file, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 (see close)
        self._write(header)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, each: Arrival | Abort) -> None:
        self._inputs.append(each)

    def step(self, now: float) -> None:
        """To be called before each step."""
        entry = Entry(now, self.check, tuple(self._inputs))
        self._inputs.clear()
        if self.publish is not None:
            self.publish(entry)
        if self._file is not None:
            self._write(entry.to_json())

    def give_out(self, outputs: Iterable[RequestOutput]) -> None:
        """To be called after each step, with what it gave out."""
        for output in outputs:
            for sample in output.outputs:
                seen = f"{output.request_id} {sample.index} {len(sample.token_ids)} {sample.token_ids[-1:]}"
                self.check = zlib.crc32(seen.encode(), self.check)
            if output.finished and self._file is not None:
                self._write(Ended.of(output).to_json())

    def _write(self, fields: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields, allow_nan=False) + "\n")


def read_log(path: str | Path) -> InputLog:
    """Raises ValueError for a file that is not an input log, or is one of another format."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        header, *records = [json.loads(line) for line in lines]
        version = header["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version}; supported is {FORMAT_VERSION}")
        entries = tuple(Entry.from_json(record) for record in records if "now" in record)
        ended = [Ended(r["ended"], r["token_ids"], r["reasons"]) for r in records if "ended" in r]
        return InputLog(header, entries, {each.request_id: each for each in ended})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an input log as --record writes it: {error!r}") from error


def differences(old: Ended, new: Ended) -> list[str]:
    """Where a request's tokens are not those recorded: one line per sample that differs.

    An aborted sample has as many tokens as there was time for, so only those that both have are compared.
    """
    found = []
    for index, (before, after) in enumerate(zip(old.token_ids, new.token_ids, strict=True)):
        same = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        if same is None and "abort" not in (old.reasons[index], new.reasons[index]) and len(before) != len(after):
            same = min(len(before), len(after))
        if same is not None:
            found.append(f"request {old.request_id}, sample {index}: other tokens after the first {same}")
    return found


def _input_to_json(each: Arrival | Abort) -> dict[str, Any]:
    if isinstance(each, Abort):
        return {"abort": each.request_id}
    params = {
        name: value for name, value in dataclasses.asdict(each.params).items() if value != getattr(_DEFAULTS, name)
    }
    if "logit_bias" in params:  # JSON has no infinity, which bars a token; SamplingParams reads the word
        bias = params["logit_bias"]
        params["logit_bias"] = {token: value if math.isfinite(value) else str(value) for token, value in bias.items()}
    return {"add": each.request_id, "prompt": each.prompt_token_ids, "params": params, "priority": each.priority}


def _input_from_json(fields: Mapping[str, Any]) -> Arrival | Abort:
    if "abort" in fields:
        return Abort(fields["abort"])
    return Arrival(fields["add"], fields["prompt"], SamplingParams(**fields["params"]), fields["priority"])
