"""What a compiled program consists of and communicates, read from its text (HLO)."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_END = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")


@dataclass(frozen=True)
class Collective:
    """One communication of a program. bytes: of its result on each device; group: devices that take part together."""

    kind: str
    bytes: int
    group: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends at least, and receives (as rings do: doi:10.1016/j.jpdc.2008.09.002)."""
        others = (self.group - 1) / self.group
        if self.kind == "all-reduce":
            return 2 * others * self.bytes
        if self.kind == "reduce-scatter":
            return others * self.bytes * self.group
        return self.bytes if self.kind == "collective-permute" else others * self.bytes


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(a program's computations by name, each as its lines; the name of the one that it begins with)."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
            bodies[name] = []
            if line.startswith("ENTRY"):
                entry = name
        elif name:
            bodies[name].append(line)
    return bodies, entry


def collectives(text: str) -> Counter[Collective]:
    """How often a program runs each of its collectives: those of a loop as many times as it turns, if that is known."""
    bodies, entry = computations(text)
    found: Counter[Collective] = Counter()
    stack = [(entry, 1)]
    while stack:
        name, times = stack.pop()
        for line in bodies.get(name, ()):
            if (collective := _collective(line)) is not None:
                found[collective] += times
                continue
            trips = _trips(line, bodies) if " while(" in line else 1
            stack += [(called, times * trips) for called in _called(line)]
    return found


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a loop turns, 1 if that is not known.

    Where the compiler does not say it, a condition that compares with one constant does, for a count from 0.
    """
    if match := _TRIPS.search(line):
        return int(match[1])
    condition = _CONDITION.search(line)
    assert condition is not None, "a loop has a condition"
    ends = [match[1] for each in bodies.get(condition[1], ()) if (match := _END.search(each))]
    return int(ends[0]) if len(ends) == 1 else 1


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    if match := _BRANCHES.search(line):
        yield from (branch.strip().lstrip("%") for branch in match[1].split(","))


def _collective(line: str) -> Collective | None:
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    result, kind, rest = match.groups()
    sizes = [_array_bytes(dtype, shape) for dtype, shape in _ARRAY.findall(result)]
    # An asynchronous one's result holds its operands and what comes of them.
    total = max(sizes) if "-start(" in line else sum(sizes)
    return Collective(kind, total, _group_size(rest))


def _group_size(attributes: str) -> int:
    if match := _IOTA_GROUPS.search(attributes):
        return int(match[1])
    match = _GROUPS.search(attributes)
    return match[1].count(",") + 1 if match else 2  # a permutation has pairs


def _array_bytes(dtype: str, shape: str) -> int:
    count = 1
    for size in filter(None, shape.split(",")):
        count *= int(size)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return count * bits // 8
