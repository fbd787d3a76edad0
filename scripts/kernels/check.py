"""Compiles the attention kernels, and the whole step, for chips that need not be there, runs the simulated tests, and prints
a table of the kernels.

Of a decode on a TPU the table has the whole kernel's cycles per cached token and layer, all KV heads together, copies taken
to be there when they are waited for; of a prefill the share of the matrix units' peak; and the spills in the hot loop. Ends
with status 1 if a kernel does not compile, spills where it must not, or costs 5 % more than docs/kernels.json says it did,
or if a test fails.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import figures
import gpu
import tpu
from chips import GPUS, TPUS

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only a representative few of the shapes")
    parser.add_argument("--target", action="append", choices=[*TPUS, *GPUS], help="a chip; all of them by default")
    parser.add_argument("--without-tests", action="store_true", help="only compile")
    options = parser.parse_args()
    targets = options.target or [*TPUS, *GPUS]

    faults = [
        *_check_tpus([target for target in targets if target in TPUS], options.quick),
        *_check_gpus([target for target in targets if target in GPUS], options.quick),
    ]
    steps = {"tests/test_plan_tpu.py": TPUS, "tests/test_plan_gpu.py": GPUS}
    if wanted := [path for path, chips in steps.items() if any(target in chips for target in targets)]:
        print("\nthe whole step", flush=True)
        faults += _run_tests(wanted, os.environ | {"JAX_PLATFORMS": "cpu"})
    if not options.without_tests:
        tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_mosaic_*.py"))
        print(f"\nsimulated, with race detection: {' '.join(tests)}", flush=True)
        # The compilers are in PYTHONPATH.
        faults += _run_tests(
            ["-n", "2", *tests], {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        )
    for fault in faults:
        print(f"FAULT: {fault}")
    return bool(faults)


def _check_tpus(targets: list[str], quick: bool) -> list[str]:
    if not targets:
        return []
    names = [str(case) for case in (tpu.QUICK if quick else tpu.FULL)]
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(targets, pool.map(lambda target: tpu.run(target, names), targets), strict=True))
    head = "TPU: cycles per cached token or share of the peak, spills in the hot loop"
    print(f"{head:90}" + "".join(f"{target:>14}" for target in targets))
    for i, name in enumerate(names):
        print(f"{name:90}" + "".join(f"{_cell(results[target][i]):>14}" for target in targets))

    faults = []
    found: figures.Found = {target: {} for target in targets}
    for target in targets:
        for name, result in zip(names, results[target], strict=True):
            if isinstance(result, str):
                faults.append(f"{target}, {name}: {result}")
                continue
            found[target][name] = result
            if result["hot_spills"] and tpu.CASES[name].must_not_spill(target):
                faults.append(f"{target}, {name}: {result['hot_spills']} spills in the hot loop")
    return faults + _compare(found, dict.fromkeys(targets, tpu.compilers()))


def _cell(result: figures.Figures | str) -> str:
    if isinstance(result, str):
        return "FAILED"
    cost = f"{result['cycles']:.2f}" if "cycles" in result else f"{result['peak']:.0%}"
    return f"{cost}, {result['hot_spills']}"


def _check_gpus(targets: list[str], quick: bool) -> list[str]:
    faults = []
    for target in targets:
        rows = gpu.check(gpu.QUICK if quick else gpu.SHAPES)
        print(
            f"\n{target + ': resources of':57} {'registers':>9} {'spilled bytes':>13} {'shared bytes':>12} {'blocks/SM':>9}"
        )
        for row in rows:
            numbers = f"{row.registers:9} {row.spill_bytes:13} {row.shared_bytes:12} {row.fitting:9}"
            print(f"{row.name:57} {numbers}")
        faults += [f"{target}, {row.name}: {row.fault}" for row in rows if row.fault]
        found = {row.name: row.figures() for row in rows if row.kernel}
        faults += _compare({target: found}, {target: gpu.compilers()})
    return faults


def _compare(found: figures.Found, compilers: dict[str, dict[str, str]]) -> list[str]:
    """What rose; says what cannot be compared."""
    rises, remarks = figures.compare(figures.read(), found, compilers)
    for remark in remarks:
        print(f"not compared: {remark}")
    return rises


def _run_tests(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-rs", *arguments]
    return ["tests failed"] * bool(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    sys.exit(main())
