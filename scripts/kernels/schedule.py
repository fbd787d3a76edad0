"""Reads the schedules that libtpu writes of the TPU kernels it compiles.

libtpu's `packed-bundles-post-ra` dump has one line per issue slot, stalls included, with the targets of branches; its
`static-per-bundle-utilization` dump says which units each slot uses, the `post-delay-converter` dump what lies in which
memory. What they do not say is how long a copy takes: the cycles here are those of a kernel that never waits for memory.
"""

import glob
import re
from dataclasses import dataclass, field
from pathlib import Path

from chips import TPUS

PASSES = "(packed-bundles-post-ra|utilization|post-delay-converter)"
"""The value of `--xla_jf_dump_llo_pass_label_regex` for what is read here."""

_LINE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:\s*>*\s*\{(.*)$")
_BRANCH = re.compile(r"sbr\.(?:rel|abs)\s+(\([^)]*\))?\s*target bundleno = (\d+)")
_COMPARISON = re.compile(r"(%p\w+) = scmp\.(\w\w)\.\S+ ([^,]+), (\S+)")
_OPPOSITE = {"ne": "eq", "ge": "lt", "gt": "le"}
_COPY = re.compile(r"= dma\.(?!done)[a-z_.]+")
_ALLOCATION = re.compile(r"space=(vmem|smem), size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+), scoped")

Starts = tuple[int, int]
"""Of copies, on the way through a loop: the loops that start several per turn, and the copies outside of loops."""

Condition = tuple[str, bool]
"""What is compared, and how it turns out."""


@dataclass
class Loop:
    """A loop of the schedule: its first and last slot, and what is in it.

    walks: the fewest cycles of a turn that does as much matrix work as one can, by the copies it starts; loops within it
        are free, and of two bodies that exclude each other it goes through one. copies, spills: in its code, without the
        loops within it. matmuls: with them.
    """

    first: int
    last: int
    inner: list["Loop"] = field(default_factory=list)
    walks: dict[Starts, int] = field(default_factory=dict)
    copies: int = 0
    spills: int = 0
    matmuls: int = 0

    def within(self) -> list["Loop"]:
        return [self, *(deeper for loop in self.inner for deeper in loop.within())]

    def cost(self, loops: int, copies: int) -> int:
        """Of the cheapest turn that meets that many loops that start copies, and itself starts that many, or more."""
        return min(cost for starts, cost in self.walks.items() if starts[0] >= loops and starts[1] >= copies)

    def issue(self, tiles: int, pages: int, group: int) -> int:
        """Cycles by which a turn is longer that starts the copies of so many pages of each tile.

        Up to `group` pages of a tile are started one after the other, more of them in a loop, `group` per turn.
        """
        if pages <= group:
            return self.cost(0, tiles * pages) - self.cost(0, 0)
        turn = min(min(loop.walks.values()) for loop in self.inner if loop.copies > 1)
        return self.cost(tiles, 0) - self.cost(0, 0) + tiles * (pages // group) * turn


@dataclass
class Kernel(Loop):
    """All of a kernel as the outermost loop; what it allocates, in bytes."""

    vmem: int = 0
    smem: int = 0

    @property
    def all_spills(self) -> int:
        return sum(loop.spills for loop in self.within())


def numbers_in(name: str, prefix: str) -> dict[str, int]:
    """Those in a kernel's name by what they are of: 4 heads in `prefix_8_rows_4_heads`."""
    words = name.removeprefix(f"{prefix}_").split("_")
    return {unit: int(number) for number, unit in zip(words[::2], words[1::2], strict=True)}


def read_kernels(folder: Path, target: str, name: str) -> dict[str, Kernel]:
    """The Pallas kernels in a dump whose name begins with `name`."""
    kernels = {}
    for path in folder.glob(f"*-{glob.escape(name)}*-packed-bundles-post-ra.txt"):
        match = re.fullmatch(rf"\d+-({re.escape(name)}[^.]*)\.\d+-\d+-packed-bundles-post-ra\.txt", path.name)
        if match:
            prefix = path.name[: match.end(1)]
            usage, memory = (
                next(folder.glob(f"{glob.escape(prefix)}.*-{dump}.txt")).read_text(errors="replace")
                for dump in ("pre-delay_hlo-static-per-bundle-utilization", "post-delay-converter")
            )
            kernels[match[1]] = read_kernel(path.read_text(errors="replace"), usage, memory, TPUS[target].delay)
    return kernels


def read_kernel(schedule: str, usage: str, memory: str, delay: int) -> Kernel:
    """A kernel from the texts of its three dumps."""
    labels, slots = [], []
    for line in schedule.splitlines():
        if match := _LINE.match(line):
            labels.append(match[2])
            slots.append(match[3])
        elif slots:
            slots[-1] += line
    rows = [line.split() for line in usage.splitlines()[4:] if line.strip()]  # MXU first, spills in the ninth column
    matmuls, spills = ([int(row[column]) for row in rows] for column in (0, 8))
    matmuls += [0] * (len(slots) - len(matmuls))
    spills += [0] * (len(slots) - len(spills))
    copies = [len(_COPY.findall(slot)) for slot in slots]
    comparisons = {predicate: what for slot in slots for predicate, *what in _COMPARISON.findall(slot)}
    branches = {
        i: (_condition(m[1], comparisons), int(m[2])) for i, slot in enumerate(slots) if (m := _BRANCH.search(slot))
    }

    ends = {"vmem": 0, "smem": 0}
    for space, size, offset in _ALLOCATION.findall(memory):
        ends[space] = max(ends[space], int(size, 0) + int(offset, 0))
    root = Kernel(0, len(slots) - 1, **ends)
    open_loops: list[Loop] = [root]
    for i, label in enumerate(labels):
        back = [source for source, (_, to) in branches.items() if to == i and source >= i] if label == "LB" else []
        if back:
            while i > open_loops[-1].last:
                open_loops.pop()
            loop = Loop(i, min(max(back) + delay, len(slots) - 1))
            open_loops[-1].inner.append(loop)
            open_loops.append(loop)
    for loop in reversed(root.within()):
        own = set(range(loop.first, loop.last + 1))
        loop.matmuls = sum(matmuls[i] for i in own)
        for inner in loop.inner:
            own -= set(range(inner.first, inner.last + 1))
        loop.copies, loop.spills = sum(copies[i] for i in own), sum(spills[i] for i in own)
        loop.walks = _walk(loop, branches, delay, matmuls, copies)
    return root


def _condition(predicate: str | None, comparisons: dict[str, list[str]]) -> Condition | None:
    """Under which a branch is taken; None if always."""
    if not predicate:
        return None
    name = predicate.strip("()!")
    how, *operands = comparisons.get(name, [name])
    return " ".join([_OPPOSITE.get(how, how), *operands]), (how in _OPPOSITE) == ("!" in predicate)


def _walk(
    loop: Loop,
    branches: dict[int, tuple[Condition | None, int]],
    delay: int,
    matmuls: list[int],
    copies: list[int],
) -> dict[Starts, int]:
    inner = {x.first: x for x in loop.inner}
    size = loop.last - loop.first + 1
    own = {
        slot: branches[slot]
        for slot in range(loop.first, loop.last + 1)
        if slot in branches and not any(x.first <= slot <= x.last for x in loop.inner)
    }
    asked = [condition[0] for condition, _ in own.values() if condition]
    asked_again = {what for what in asked if asked.count(what) > 1}
    # By copies, and by what is known of what is asked again: - matrix work, cycles.
    ways: list[dict[tuple[Starts, frozenset[Condition]], tuple[int, int]]] = [{} for _ in range(size + 1)]
    ways[0] = {((0, 0), frozenset()): (0, 0)}

    def go(start: int, end: int, cycles: int, work: int, starts: Starts, when: Condition | None = None) -> None:
        to = ways[min(end - loop.first, size)]
        for (before, known), (less_work, cost) in ways[start - loop.first].items():
            if when and (when[0], not when[1]) in known:
                continue
            now_known = known | {when} if when and when[0] in asked_again else known
            key = (before[0] + starts[0], before[1] + starts[1]), now_known
            new = (less_work - work, cost + cycles)
            to[key] = min(to.get(key, new), new)

    for slot in range(loop.first, loop.last + 1):
        if slot in inner and slot > loop.first:
            within = inner[slot]
            go(slot, within.last + 1, 0, within.matmuls, (int(within.copies > 1), 0))
            continue
        does = 1, matmuls[slot], (0, copies[slot])
        if slot - delay not in own:  # a branch is taken only now
            go(slot, slot + 1, *does)
            continue
        condition, target = own[slot - delay]
        if target > slot:
            go(slot, target, *does, condition)
        if condition:
            go(slot, slot + 1, *does, (condition[0], not condition[1]) if target > slot else None)
    most = min((work for work, _ in ways[size].values()), default=0)
    ends = [(starts, cost) for (starts, _), (work, cost) in ways[size].items() if work == most]
    return {starts: min(cost for other, cost in ends if other == starts) for starts, _ in ends}
