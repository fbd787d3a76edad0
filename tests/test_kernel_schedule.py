"""The reader of libtpu's schedules, on one written by hand whose cycles can be counted, in the form of libtpu's dumps."""

from pathlib import Path

import pytest
from schedule import Kernel, Loop, read_kernel, read_kernels

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
