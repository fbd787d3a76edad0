"""`paxserve replay`: a recorded run, repeated."""

import argparse
import dataclasses
import json
import sys
from contextlib import closing
from typing import Any

from paxserve.cli.options import add_engine_options, engine_options, subparser
from paxserve.config import EngineConfig

DESCRIPTION = """\
Repeat a run from the input log that --record wrote: the same requests with the same seeds before the same steps. The engine's
options are those recorded, except where others are given. Tokens depend neither on limits nor on the mesh (in float32), so
they are compared with the recorded ones. Exits with 1 if they differ."""

EPILOG = """\
examples:
  paxserve generate --record run.jsonl && paxserve replay run.jsonl
  paxserve replay run.jsonl --mesh data=2 --max-num-batched-tokens 256
  paxserve replay run.jsonl --json | jq '.outputs[].outputs[].token_ids'"""


def add_parser(subparsers: Any) -> None:
    parser = subparser(subparsers, "replay", help="repeat a recorded run", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("log", metavar="FILE", help="an input log, as --record writes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, model=None)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paxserve.input_log import Ended, differences, read_log

    log = read_log(args.log)
    given = {name: value for name, value in engine_options(args).items() if value is not None}
    if given.get("record") == args.log:
        raise ValueError(f"--record {args.log} would overwrite the log that is replayed: name another file")
    config = EngineConfig(**{"model": log.header["model"], **log.header["config"], **given})

    from paxserve.engine import Engine
    from paxserve.lockstep import check_model, follow, replay
    from paxserve.model_source import resolve_model
    from paxserve.progress import Display

    check_model(log, resolve_model(config.model), config)
    with Display(enabled=True) as display, closing(Engine(config, display.update)) as engine:
        if engine.follows:
            follow(engine)
            return 0
        outputs = replay(engine, log, lambda done, total: display.update("replaying", done, total))
    ended = [Ended.of(output) for output in outputs]
    compared = [each for each in ended if each.request_id in log.ended]
    differing = [line for each in compared for line in differences(log.ended[each.request_id], each)]
    if args.json:
        json.dump({"outputs": [dataclasses.asdict(each) for each in outputs], "differences": differing}, sys.stdout)
        print()
    else:
        for each in ended:
            print(f"[{each.request_id}] {' | '.join(' '.join(map(str, tokens)) for tokens in each.token_ids)}")
        print(*differing, sep="\n", end="\n" if differing else "")
        tokens = sum(len(tokens) for each in compared for tokens in each.token_ids)
        print(f"{tokens} tokens of {len(compared)} requests: {'not ' if differing else ''}as recorded")
        if len(ended) > len(compared):
            print(f"{len(ended) - len(compared)} requests were not recorded to their end")
    return 1 if differing else 0
