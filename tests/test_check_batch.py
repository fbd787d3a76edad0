"""The debug mode: a batch that attention must not be given is refused on the host, by the number of its sequence."""

import numpy as np
import pytest
from test_paged_attention import LONGER, Case

from paxserve.pallas_kernels import check_batch


def arrays(case: Case) -> dict[str, np.ndarray]:
    names = "block_tables", "context_lens", "query_starts"
    return {name: np.array(getattr(case, name)) for name in names}


@pytest.mark.parametrize("stride", [1, 3])
def test_a_right_batch_passes(stride: int) -> None:
    case = Case(**LONGER)
    sizes = {"tokens": len(case.q), "num_pages": len(case.kv_pages), "page_size": case.page_size}
    check_batch(**arrays(case), **sizes)
    for rank in range(stride):
        dealt = case.deal(stride, rank)
        options = {"page_stride": stride, "page_offset": np.asarray(dealt.options["page_offset"])}
        check_batch(**arrays(dealt), **sizes, **options)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("query_starts", 0, 1, "must ascend from 0"),
        ("query_starts", 3, 0, "must ascend from 0"),
        ("query_starts", -1, 99, "end within the 60 query tokens"),
        ("context_lens", 3, 32, "sequence 3: a context of 32 tokens does not hold its 33 query tokens"),
        ("context_lens", 0, -1, "sequence 0: a context of -1 tokens"),
        ("context_lens", 2, 500, r"sequence 2: a context of 500 tokens takes 32 pages here, .* has 13 entries"),
        (
            "block_tables",
            (6, 10),
            0,
            r"sequence 6: entry 10 of its block table is page 0, which is not one of the pages 1",
        ),
        ("block_tables", (0, 0), 10**6, "sequence 0: entry 0 of its block table is page 1000000"),
        ("block_tables", (2, 1), -7, "sequence 2: entry 1 of its block table is page -7"),
    ],
)
def test_a_wrong_batch_is_refused(name: str, index: object, value: int, message: str) -> None:
    case = Case(**LONGER)
    changed = arrays(case)
    changed[name][index] = value
    with pytest.raises(ValueError, match=message):
        check_batch(**changed, tokens=len(case.q), num_pages=len(case.kv_pages), page_size=case.page_size)


def test_an_offset_beyond_the_stride_is_refused() -> None:
    case = Case(**LONGER)
    sizes = {"tokens": len(case.q), "num_pages": len(case.kv_pages), "page_size": case.page_size}
    with pytest.raises(ValueError, match="sequence 1: page_offset 2 must be within page_stride 2"):
        check_batch(**arrays(case), **sizes, page_stride=2, page_offset=np.array([0, 2, 0, 0, 0, 0, 0]))
