"""Writes docs/kernels.json, the figures of all kernels on all chips, and docs/kernels.md, a page that shows them."""

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import figures
import gpu
import peers
import tpu
from chips import GPUS, TPUS
from figures import CONTEXT, SEQS, Figures

PAGE = figures.PATH.with_suffix(".md")
HEAD = """# What the attention kernels cost

Written by `scripts/kernel_report`; the figures are in [kernels.json](kernels.json), and `scripts/check_kernels` fails if a
kernel comes to cost 5 % more than they say.

**No TPU or GPU ran any of this.** Every kernel, ours and others', is compiled by the same compiler for a chip that is only
described to it; what it costs is read from the schedule that the compiler wrote, stalls included. That says nothing of how
long a copy takes, so a kernel's time has two bounds: the larger of its schedule and of reading the pages at the memory's full
rate, if all copying hides behind computing; and the sum of both, if none does.

## TPU: decode

{seqs} sequences of {context} cached tokens, one query token each, one layer. *Cycles* are per cached token, of all KV heads
together: those of the loop with the matrix products, those that issue copies of pages, and the whole kernel's. *Spills* are
of registers, in that loop and in the whole kernel. *Bytes* are what is read per cached token, and the least it could be. *Time*
is the batch's, its lower and upper bound; *of HBM* the least bytes' share of the memory's rate at the lower.
A v5p has two cores; ours use both, the others one. The kernels beside ours are those of
{peers}, with the block sizes they choose; where one leaves the choice to its caller, blocks of 512 tokens.
"""
PREFILL = """
## TPU: prefill

The share of a core's peak in bfloat16 products that the hot loop reaches, on blocks of keys that all rows see; its spills.

"""
WRITE = """
## TPU: writes

Cycles per token whose K and V are written into its page, in a tile of its own; the pages are not copied.

"""
GPU = """
## GPU: {target}

What a kernel takes of a multiprocessor, compiled by {compilers}.

| batch: kernel | registers | spilled bytes | shared memory | thread blocks per multiprocessor |
|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=[*TPUS, *GPUS], help="a chip; all of them by default")
    parser.add_argument("--quick", action="store_true", help="only a representative few of our shapes")
    parser.add_argument("--page-only", action="store_true", help="from the stored figures")
    options = parser.parse_args()
    stored = figures.read()
    if not options.page_only:
        targets = options.target or [*TPUS, *GPUS]
        faults = [
            *_measure_tpus([target for target in targets if target in TPUS], options.quick, stored),
            *_measure_gpus([target for target in targets if target in GPUS], options.quick, stored),
        ]
        figures.write(stored)  # whatever is wrong: the rest took long to measure
    else:
        faults = []
    PAGE.write_text("".join(_page(stored)))
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return bool(faults)


def _measure_tpus(targets: list[str], quick: bool, stored: dict[str, Any]) -> Iterator[str]:
    """Puts figures into `stored`; yields what is wrong."""
    ours = [str(case) for case in (tpu.QUICK if quick else tpu.FULL)]
    others = [] if quick else [str(peer) for peer in peers.CASES]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda target: tpu.run(target, ours + others), targets)
        for target, found in zip(targets, results, strict=True):
            by_name = dict(zip(ours + others, found, strict=True))
            yield from (f"{target}, {name}: {result}" for name, result in by_name.items() if isinstance(result, str))
            good = {name: result for name, result in by_name.items() if not isinstance(result, str)}
            _put(stored, target, tpu.compilers(), {n: good[n] for n in ours if n in good}, whole=not quick)
            if others:
                stored["peers"][target] = {name: good[name] for name in others if name in good}
    if targets and not quick:
        stored["peer_versions"] = {package: version(package) for package in ("jax", "tpu-inference")}


def _measure_gpus(targets: list[str], quick: bool, stored: dict[str, Any]) -> Iterator[str]:
    for target in targets:
        rows = gpu.check(gpu.QUICK if quick else gpu.SHAPES)
        yield from (f"{target}, {row.name}: {row.fault}" for row in rows if row.fault)
        _put(stored, target, gpu.compilers(), {row.name: row.figures() for row in rows if row.kernel}, whole=not quick)


def _put(
    stored: dict[str, Any], target: str, compilers: dict[str, str], found: dict[str, Figures], whole: bool
) -> None:
    """In place of all figures of the target, or of those of the same cases if the compilers are the same."""
    kept = {} if whole or stored["compilers"].get(target) != compilers else stored["figures"][target]
    stored["compilers"][target] = compilers
    stored["figures"][target] = kept | found


def _page(stored: dict[str, Any]) -> Iterator[str]:
    yield HEAD.format(seqs=SEQS, context=CONTEXT, peers=_versions(stored["peer_versions"]))
    for target in filter(stored["figures"].get, TPUS):
        yield from _decodes(target, stored)
    yield PREFILL
    yield from _by_target(stored, "prefill ", lambda own: f"{own['peak']:.0%}")
    yield WRITE
    yield from _by_target(stored, "write ", lambda own: f"{own['cycles']:.0f} cycles")
    for target in filter(stored["figures"].get, GPUS):
        yield GPU.format(target=target, compilers=_versions(stored["compilers"][target]))
        for name, row in stored["figures"][target].items():
            shared = f"{row['shared'] / 1024:.0f} KiB"
            yield f"| {name} | {row['registers']} | {row['spill_bytes']} | {shared} | {row['fitting']} |\n"


def _versions(packages: dict[str, str]) -> str:
    return ", ".join(f"{package} {number}" for package, number in packages.items())


def _decodes(target: str, stored: dict[str, Any]) -> Iterator[str]:
    chip = TPUS[target]
    compilers = _versions(stored["compilers"][target])
    yield f"\n### {target}\n\n{chip.clock / 1e9:.2f} GHz, {chip.hbm / 1e9:.0f} GB/s; {compilers}.\n\n"
    yield "| shape | kernel | hot loop | copies | whole kernel | spills | VMEM | SMEM | bytes (least) | time | of HBM |\n"
    yield "|---|---|---|---|---|---|---|---|---|---|---|\n"
    for case in tpu.FULL:
        own = stored["figures"][target].get(str(case), {})
        if "hot" not in own:
            continue
        label = str(case).removeprefix("decode ").removesuffix(", bfloat16 on bfloat16")
        yield _row(label, f"**{case.kernel}**", own, target)
        if str(case).endswith(f"{case.shape}, bfloat16 on bfloat16"):
            others = stored["peers"].get(target, {})
            for peer in (peer for peer in peers.CASES if peer.shape == case.shape and str(peer) in others):
                yield _row("", peer.kernel, others[str(peer)], target)


def _row(label: str, kernel: str, own: Figures, target: str) -> str:
    fastest, slowest = bounds(own, target)
    least = SEQS * CONTEXT * own["least_bytes"] / TPUS[target].hbm
    cells = (
        label,
        kernel,
        f"{own['hot']:.2f}",
        f"{own['copies']:.2f}",
        f"{own['cycles']:.2f}",
        f"{own['hot_spills']}, {own['spills']}",
        f"{own['vmem'] / 2**20:.1f} MiB",
        f"{own['smem'] / 2**10:.0f} KiB",
        f"{own['bytes']:.0f} ({own['least_bytes']:.0f})",
        f"{fastest * 1e6:.0f} to {slowest * 1e6:.0f} µs",
        f"{least / fastest:.0%}",
    )
    return f"| {' | '.join(cells)} |\n"


def bounds(own: Figures, target: str) -> tuple[float, float]:
    """The least and the most seconds of a decode, copies hidden behind computing altogether or not at all."""
    computing = SEQS * CONTEXT * own["cycles"] / TPUS[target].clock / own.get("cores", 1)
    reading = SEQS * CONTEXT * own["bytes"] / TPUS[target].hbm
    return max(computing, reading), computing + reading


def _by_target(stored: dict[str, Any], kind: str, shown: Callable[[Figures], str]) -> Iterator[str]:
    """A table of the cases whose names begin with `kind`."""
    targets = [*filter(stored["figures"].get, TPUS)]
    yield f"| shape | {' | '.join(targets)} |\n|---|{'---|' * len(targets)}\n"
    for name in (str(case) for case in tpu.FULL if str(case).startswith(kind)):
        found = [stored["figures"][target].get(name) for target in targets]
        if not any(found):
            continue
        cells = ("" if own is None else f"{shown(own)}, {own['hot_spills']} spills" for own in found)
        yield f"| {name.removeprefix(kind)} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
