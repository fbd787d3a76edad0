"""What attention asks of a batch's numbers, checked on the host: the kernels themselves trust block tables and lengths."""

import numpy as np
from jaxtyping import Int


def check_batch(
    block_tables: Int[np.ndarray, "seqs max_pages"],
    context_lens: Int[np.ndarray, "seqs"],
    query_starts: Int[np.ndarray, "seqs_plus_1"],
    *,
    tokens: int,
    num_pages: int,
    page_size: int,
    page_stride: int = 1,
    page_offset: Int[np.ndarray, "seqs"] | None = None,
) -> None:
    """Checks the integer arguments of `paged_attention` and `mla_paged_attention`, as NumPy arrays.

    tokens: rows of the queries. num_pages: of the pages array, or of a layer of it if the block tables count within one.

    Raises ValueError, naming the sequence, for query starts that do not ascend from 0 to at most `tokens`, a context below 0,
    shorter than the sequence's queries or longer than its block table, and for a page that is needed and is not one of
    1 .. num_pages - 1: page 0 belongs to no sequence.
    """
    if query_starts[0] != 0 or (np.diff(query_starts) < 0).any() or query_starts[-1] > tokens:
        raise ValueError(
            f"query_starts {query_starts.tolist()} must ascend from 0 and end within the {tokens} query tokens"
        )
    for seq, context in enumerate(context_lens.tolist()):
        queries = int(query_starts[seq + 1] - query_starts[seq])
        if context < 0 or 0 < context < queries:
            raise ValueError(f"sequence {seq}: a context of {context} tokens does not hold its {queries} query tokens")
        offset = 0 if page_offset is None else int(page_offset[seq])
        if not 0 <= offset < page_stride:
            raise ValueError(f"sequence {seq}: page_offset {offset} must be within page_stride {page_stride}")
        needed = max(-(-(-(-context // page_size) - offset) // page_stride), 0)
        if needed > block_tables.shape[1]:
            raise ValueError(
                f"sequence {seq}: a context of {context} tokens takes {needed} pages here, and its block table has "
                f"{block_tables.shape[1]} entries"
            )
        pages = block_tables[seq, :needed]
        wrong = (pages < 1) | (pages >= num_pages)
        if wrong.any():
            entry = int(wrong.argmax())
            raise ValueError(
                f"sequence {seq}: entry {entry} of its block table is page {pages[entry]}, which is not one of the pages "
                f"1 .. {num_pages - 1}"
            )
