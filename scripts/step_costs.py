"""Shows what XLA expects each operation of a layer to cost on a TPU that is described to it.

These are the compiler's own estimates, in cycles of the core, by which it schedules. It has none ("?") for kernels, for what
goes between devices, and for gathers and scatters.
"""

import argparse
import re
from dataclasses import dataclass

from paxserve.buckets import Bucket
from paxserve.chips import describe
from paxserve.config import EngineConfig
from paxserve.hlo import computations
from paxserve.model_source import resolve_model
from paxserve.runner import make_builder
from paxserve.sharding import shape_of
from paxserve.sizing import size_limits

PAGES = 4096  # what a step costs beside its kernels does not depend on them
FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")

INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
SCOPE = re.compile(r'op_name="[^"]*/closed_call/([^"]*)"')


@dataclass(frozen=True)
class Operation:
    """One of a program's. cycles: None where the compiler has no estimate. scope: the model's names for where it stands."""

    name: str
    result: str
    cycles: int | None
    scope: str


def loops(text: str) -> dict[str, list[Operation]]:
    """The operations of each loop's body that take time, the longest body first."""
    bodies, _ = computations(text)
    found = {name: [*map(_operation, bodies[name])] for name in re.findall(r"body=%?([\w.\-]+)", text)}
    operations = {name: [each for each in body if each is not None] for name, body in found.items()}
    return dict(sorted(operations.items(), key=lambda item: -len(item[1])))


def _operation(line: str) -> Operation | None:
    match = INSTRUCTION.match(line)
    if match is None or match[3] in FREE or match[3].startswith("copy-"):
        return None
    cycles, scope = CYCLES.search(line), SCOPE.search(line)
    return Operation(match[1], match[2], int(cycles[1]) if cycles else None, scope[1] if scope else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--topology", required=True, help="as `paxserve plan` takes it")
    parser.add_argument("--tokens", type=int, default=64, help="of the step; as many as --seqs make it a decode")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--least", type=int, default=3000, metavar="CYCLES", help="show no operation that takes fewer")
    options = parser.parse_args()

    model, topology = resolve_model(options.model).config, describe(options.topology)
    config = EngineConfig(model=options.model, compilation_cache_dir=None, max_model_len=8192, num_pages=PAGES)
    builder = make_builder(model, config, topology.devices)
    memory = topology.chip.memory_bytes
    limits = size_limits(config, model, builder.kv_dtype.name, shape_of(builder.mesh), memory, builder.step_bytes)
    bucket = Bucket(options.tokens, options.seqs, decode=options.tokens == options.seqs)
    for name, operations in loops(builder.lower_step(bucket, limits).compile().as_text()).items():
        known = [each for each in operations if each.cycles is not None]
        total = sum(each.cycles or 0 for each in known)
        print(f"\n{name}: {len(operations)} operations, {total:,} cycles and {len(operations) - len(known)} unknown")
        for each in sorted(operations, key=lambda each: -(each.cycles or 10**9)):
            if each.cycles is None or each.cycles >= options.least:
                cycles = "?" if each.cycles is None else f"{each.cycles:,}"
                print(f"{cycles:>12}  {each.result.split('{')[0]:32} {each.scope:60} {each.name}")


if __name__ == "__main__":
    main()
