"""The reader of libtpu's schedules, on one written by hand whose cycles can be counted, in the form of libtpu's dumps."""

from pathlib import Path

import pytest
from schedule import Kernel, Loop, numbers_in, read_kernel, read_kernels

COPY = "%7 = dma.hbm_to_vmem /*hbm=*/%s1, /*dst_syncflagno=*/[#allocation4]"
WAIT = "%9 = dma.done.wait [#allocation4], 64"
SLOTS = [
    (" ", COPY),
    ("LB", "%s2 = sadd.s32 1, %s2"),
    (" ", "%3 = sbr.rel (%p1_p0) target bundleno = 10 (0xa), region = 3"),  # taken four slots on, over two copies
    (" ", ""),
    (" ", "%4 = vst [vmem:[#allocation5_spill]] %v4"),
    (" ", ""),
    (" ", ""),
    (" ", COPY),
    (" ", f"%s6 = smov 1  ;;  {COPY}"),
    (" ", WAIT),
    ("LB", "%v1 = vmatmul.mubr.bf16.gmra.mxu0 %v0"),
    (" ", "%v2 = vpop.f32.mrf.mxu0"),
    (" ", "%5 = sbr.rel (!%p2_p0) target bundleno = 10 (0xa), region = 4"),
    (" ", "%6 = vst [vmem:[#allocation5_spill]] %v2"),
    (" ", ""),
    (" ", ""),
    (" ", ""),
    (" ", ""),
    (" ", "%8 = sbr.rel (!%p3_p0) target bundleno = 1 (0x1), region = 5"),
    (" ", ""),
    (" ", ""),
    (" ", ""),
    (" ", ""),
    (" ", ""),
]
MATMULS, SPILLS = {10: 2}, {4: 1, 13: 3}
SCHEDULE = "LB: loop body\n= control target key end\n" + "".join(
    f"  {i:#4x} {label:>2}: > {{ {code} }}\n" for i, (label, code) in enumerate(SLOTS)
)
USAGE = "== CAPACITY:\nMXU, ...\n 2 ...\n== UTILIZATION:\n" + "".join(
    f"{MATMULS.get(i, 0)} 0 0 0 0 0 0 0 {SPILLS.get(i, 0)} 0\n" for i in range(len(SLOTS))
)
MEMORY = """
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'core index']
  #allocation2 [shape = 's32[768]', space=smem, size = 0xc00, offset = 0, scoped, tag = 'scratch operand']
  #allocation3 [shape = 'bf16[4,64,256]', space=vmem, size = 0x20000, offset = 0, scoped, tag = 'scratch operand']
  #allocation5 [shape = 'f32[8,128]', space=vmem, size = 0x1000, offset = 0x20000, scoped, tag = 'scratch operand']
"""


@pytest.fixture
def kernel() -> Kernel:
    return read_kernel(SCHEDULE, USAGE, MEMORY, delay=4)


def test_loops(kernel: Kernel) -> None:
    (outer,) = kernel.inner
    (inner,) = outer.inner
    assert [(loop.first, loop.last) for loop in kernel.within()] == [(0, 23), (1, 22), (10, 16)]
    assert [loop.copies for loop in kernel.within()] == [1, 2, 0]
    assert [loop.spills for loop in kernel.within()] == [0, 1, 3]
    assert [loop.matmuls for loop in kernel.within()] == [2, 2, 2]
    assert kernel.all_spills == 4
    assert (kernel.vmem, kernel.smem) == (0x21000, 0xC00)
    assert inner.walks == {(0, 0): 7}


def test_cost_of_a_turn(kernel: Kernel) -> None:
    """With the branch taken slots 1 to 6 and 17 to 22; without it 7 to 9 besides. The inner loop is counted by itself."""
    outer: Loop = kernel.inner[0]
    assert outer.walks == {(0, 0): 12, (0, 2): 15}
    assert outer.cost(0, 0) == 12
    assert outer.cost(0, 1) == outer.cost(0, 2) == 15


def test_bodies_that_exclude_each_other() -> None:
    """One of two slots and one of five, each with a product: a turn goes through one of them."""
    compare = "%p{}_p0 = scmp.{}.s32.totalorder %s7_s1, 0"
    branch = "%3 = sbr.rel (%p{}_p0) target bundleno = {}, region = 3"
    codes = [compare.format(1, "ne"), compare.format(2, "eq"), branch.format(1, "9 (0x9)"), "", "", "", "", "mm", ""]
    codes += [branch.format(2, "19 (0x13)"), "", "", "", "", "mm", "", "", "", "", branch.format(3, "0 (0x0)")]
    codes += ["", "", "", ""]
    schedule = "".join(f"  {i:#4x} {'LB' if i == 0 else '':>2}: > {{ {code} }}\n" for i, code in enumerate(codes))
    usage = "\n" * 4 + "".join(f"{int(code == 'mm')} 0 0 0 0 0 0 0 0 0\n" for code in codes)
    (loop,) = read_kernel(schedule, usage, "", delay=4).inner
    assert (loop.first, loop.last, loop.matmuls) == (0, 23, 2)
    assert loop.walks == {(0, 0): len(codes) - 5}


def test_cost_of_copies(kernel: Kernel) -> None:
    """In a turn that starts them as they stand, or goes to a loop that starts 8 in 9 cycles."""
    outer = kernel.inner[0]
    assert outer.issue(tiles=2, pages=1, group=8) == 15 - 12
    starting = Loop(2, 10, walks={(0, 8): 9}, copies=8)
    block = Loop(0, 99, inner=[starting], walks={(0, 0): 50, (1, 0): 52, (2, 0): 54})
    assert block.issue(tiles=2, pages=32, group=8) == 54 - 50 + 2 * 4 * 9


def test_numbers_in_a_name() -> None:
    assert numbers_in("mla_attend_16_rows_4_tiles", "mla_attend") == {"rows": 16, "tiles": 4}


def test_read_from_a_dump(tmp_path: Path) -> None:
    for name in ("attend_8_rows", "attend_8_rows_2", "fusion"):
        for i, (dump, text) in enumerate(
            {
                "packed-bundles-post-ra": SCHEDULE,
                "pre-delay_hlo-static-per-bundle-utilization": USAGE,
                "post-delay-converter": MEMORY,
            }.items()
        ):
            (tmp_path / f"17959-{name}.1-0{i}-{dump}.txt").write_text(text)
    (tmp_path / "17959-attend_8_rows.1-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("")
    kernels = read_kernels(tmp_path, "v6e", "attend")
    assert kernels.keys() == {"attend_8_rows", "attend_8_rows_2"}
    assert kernels["attend_8_rows"].inner[0].cost(0, 0) == 12
