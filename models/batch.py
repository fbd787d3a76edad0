"""What attention needs to know about one step: where each token stands and which pages its sequence owns."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "token_pages",
        "token_offsets",
        "block_tables",
        "context_lens",
        "query_starts",
        "page_offset",
        "schedule",
    ],
    meta_fields=["num_pages", "page_stride", "max_query_len", "attention"],
)
@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch of prefill chunks and decodes, padded to `tokens` tokens and `seqs` sequences; arrays are int32.

    Sequence s owns tokens query_starts[s] : query_starts[s + 1]; the last of them is at position context_lens[s] - 1.
    Page ids count within one layer. Padding tokens are written to page 0, padding sequences have context 0.

    positions: each token's position in its sequence.
    token_pages, token_offsets: the page, and the slot in it, that each token's K and V are written to.
        On a mesh that splits pages, a token whose page another device holds is written to page 0.
    block_tables: the pages of each sequence in order; on such a mesh those that this device holds.
    context_lens: tokens of each sequence including this step's.
    page_offset: of each sequence, the number of its first page in the block table; None for 0.
    schedule: what `schedule_attention` makes of the batch, for all layers to share (None: each makes its own).
    num_pages: pages of one layer (static).
    page_stride: entries of a block table are this many pages apart (static): the devices that a sequence is dealt over.
    max_query_len: upper bound on a sequence's tokens in this step, 1 for a pure decode step (static; None: no bound).
    attention: the attention implementation by name (static; None: chosen by platform).
    """

    positions: Int[Array, "tokens"]
    token_pages: Int[Array, "tokens"]
    token_offsets: Int[Array, "tokens"]
    block_tables: Int[Array, "seqs pages_per_seq"]
    context_lens: Int[Array, "seqs"]
    query_starts: Int[Array, "seqs_plus_1"]
    num_pages: int
    page_offset: Int[Array, "seqs"] | None = None
    schedule: Any = None
    page_stride: int = 1
    max_query_len: int | None = None
    attention: str | None = None
