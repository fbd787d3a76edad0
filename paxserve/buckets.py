"""The short, fixed list of shapes that a step is padded to; one program is compiled for each."""

from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROWS = 2
"""Fewest rows of any step: XLA:CPU takes a slow path for dots with a single row."""

MIN_PREFILL_TOKENS = 64
"""Below this a step costs the same whatever its size: it reads all the weights once."""


@dataclass(frozen=True, order=True)
class Bucket:
    """A step of `tokens` tokens of at most `seqs` sequences; `decode` if each sequence has one token."""

    tokens: int
    seqs: int
    decode: bool

    def __str__(self) -> str:
        return f"decode {self.seqs}" if self.decode else f"mixed {self.tokens}"


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Decode buckets up to the sequence limit and mixed ones up to the token limit, smallest first.

    Few mixed sizes are enough: the scheduler fills a bucket and leaves the rest of a prefill to the next step. Below 8 rows
    a decode step costs about the same whatever its size.
    """
    max_seqs, max_tokens = max(max_num_seqs, MIN_ROWS), max(max_num_batched_tokens, MIN_ROWS)
    decode = [Bucket(n, n, decode=True) for n in sorted({MIN_ROWS, *_growing(8, max_seqs, 2)})]
    mixed = [Bucket(n, max_seqs, decode=False) for n in _growing(MIN_PREFILL_TOKENS, max_tokens, 4)]
    return (*decode, *mixed)


def choose_bucket(buckets: Sequence[Bucket], groups: Sequence[Sequence[int]]) -> Bucket:
    """The smallest bucket for data groups whose sequences have these numbers of tokens in the step."""
    decode = all(count == 1 for counts in groups for count in counts)
    tokens, seqs = max(map(sum, groups)), max(map(len, groups))
    fitting = [b for b in buckets if b.tokens >= tokens and b.seqs >= seqs and (decode or not b.decode)]
    assert fitting, f"no bucket for {tokens} tokens of {seqs} sequences"
    return min(fitting)


def _growing(start: int, end: int, factor: int) -> list[int]:
    """start, start * factor, ... below end, and end."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= factor
    return [*sizes, end]
