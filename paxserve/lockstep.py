"""One engine on several hosts: process 0 takes the requests, and the others do in every step what it does.

All processes run the same engine with the same options. An engine's steps follow from its inputs alone, so process 0 sends
them ahead of every step, as an entry of the input log. The same entries, from a file, repeat a run.
"""

import dataclasses
import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jax

from paxserve.config import EngineConfig
from paxserve.fingerprint import fingerprint
from paxserve.input_log import FORMAT_VERSION, Abort, Arrival, Entry, InputLog, InputRecorder
from paxserve.model_source import ModelSource
from paxserve.outputs import RequestOutput
from paxserve.sharding import Link, find_place, join

if TYPE_CHECKING:
    from paxserve.engine import Engine

# Options that say where a run is, not what it does.
_LOCAL = (
    "model",
    "compilation_cache_dir",
    "kv_trace",
    "record",
    "num_processes",
    "process_id",
    "coordinator_address",
    "start_timeout",
    "peer_timeout",
)


def connect(config: EngineConfig) -> Link | None:
    """Meet the other processes of the run and start JAX with them; None if there are none.

    Raises ValueError, naming them, if processes are missing.
    """
    place = find_place(config.coordinator_address, config.num_processes, config.process_id, config.start_timeout)
    if place is None:
        return None
    return join(place, start_timeout=config.start_timeout, peer_timeout=config.peer_timeout)


def make_recorder(config: EngineConfig, source: ModelSource, limits: Any, link: Link | None) -> InputRecorder:
    """What takes in an engine's inputs: in process 0 they go to the others and to the file of the option `record`."""
    header = {
        "format_version": FORMAT_VERSION,
        "model": config.model,
        "fingerprint": fingerprint(source, config),
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name not in _LOCAL},
        "limits": dataclasses.asdict(limits),
        "jax": jax.__version__,
    }
    header = json.loads(json.dumps(header))  # as the others get it: JSON knows no tuples
    if link is None:
        return InputRecorder(header, file=config.record)
    if link.process_id == 0:
        link.send(header)
        return InputRecorder(header, lambda entry: link.send(entry.to_json()), config.record)
    check_header(link.receive(), header)
    return InputRecorder(header, _refuse)


def follow(engine: "Engine") -> None:
    """In every process but 0: do what process 0 does, until its engine is closed. An error here ends all processes."""
    link = engine.link
    assert link is not None
    engine.inputs.publish = None
    try:
        while (fields := link.receive()) is not None:
            entry = Entry.from_json(fields)
            if entry.check != engine.inputs.check:
                raise RuntimeError("its tokens are not those of process 0")
            _apply(engine, entry)
    except BaseException as error:
        traceback.print_exc()
        link.fail(f"{type(error).__name__}: {error}")
    engine.close()


def replay(engine: "Engine", log: InputLog, progress: Callable[[int, int], object]) -> list[RequestOutput]:
    """Repeat a recorded run on an engine; the outputs of its requests, as they ended.

    The engine may have other limits than the recorded one, and so end some requests earlier or later: an abort of one that
    has ended does nothing, and what is unfinished after the last entry goes on to its end.
    Raises ValueError for a request that this engine refuses.
    """
    outputs = []
    for number, entry in enumerate(log.entries, 1):
        outputs += _apply(engine, entry)
        progress(number, len(log.entries))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return [output for output in outputs if output.finished]


def check_model(log: InputLog, source: ModelSource, config: EngineConfig) -> None:
    """Raises ValueError if a log was recorded with another model."""
    recorded = log.header["fingerprint"]
    if (found := fingerprint(source, config)) != recorded:
        raise ValueError(
            f"the log was recorded with another model ({log.header['model']}, {recorded}) than {config.model} ({found}); "
            "give that one with --model"
        )


def _apply(engine: "Engine", entry: Entry) -> list[RequestOutput]:
    for each in entry.inputs:
        match each:
            case Arrival(request_id, prompt_token_ids, params, priority):
                engine.add_request(request_id, {"prompt_token_ids": prompt_token_ids}, params, priority)
            case Abort(request_id):
                with suppress(KeyError):
                    engine.abort_request(request_id)
    return engine.step(entry.now)


def _refuse(entry: Entry) -> None:
    raise RuntimeError(
        "this process follows process 0, which takes the requests: call paxserve.lockstep.follow(engine)"
    )


def check_header(expected: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raises ValueError if this process was started otherwise than process 0."""
    expected, found = ({**each, **each["config"], **each["limits"]} for each in (expected, header))
    for name in found.keys() - {"model", "config", "limits"}:
        if found[name] != expected.get(name):
            raise ValueError(
                f"{name} is {found[name]!r} in this process and {expected.get(name)!r} in process 0: start all of them alike"
            )
