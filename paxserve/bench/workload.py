"""What a benchmark asks of an engine: prompts and answer lengths that are the same wherever they are made."""

import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxserve.tokenizers import Tokenizer


@dataclass(frozen=True)
class Workload:
    """Greedy requests that run to their full length.

    input_len, output_len: shortest and longest prompt and answer, in tokens. Lengths are drawn uniformly and then evened
        out so that each total is exactly the number of prompts times the middle of the range (rounded down).
    concurrency: requests submitted and unfinished at any time, at most.
    """

    name: str
    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    concurrency: int
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_prompts", "concurrency"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}={value}: must be at least 1")
        for field in ("input_len", "output_len"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise ValueError(f"{field}={low}:{high}: must be SHORTEST:LONGEST, both at least 1")


W64 = Workload("W64", num_prompts=64, input_len=(32, 512), output_len=(64, 128), concurrency=32)
"""17,408 prompt tokens and 6,144 output tokens."""

WORKLOADS = {W64.name: W64}


@dataclass(frozen=True)
class BenchRequest:
    prompt_token_ids: list[int]
    max_tokens: int


def make_requests(workload: Workload, tokenizer: "Tokenizer | None", vocab_size: int) -> list[BenchRequest]:
    """The workload's requests for a model; the same model and Python version always get the same ones.

    Prompts are pieces of real text, namely of the language reference that every Python brings along (`pydoc_data.topics`),
    cut at token boundaries. A model without a tokenizer gets random token ids.
    """
    draw = random.Random(workload.seed)
    input_lens = _draw_lengths(draw, workload.num_prompts, *workload.input_len)
    output_lens = _draw_lengths(draw, workload.num_prompts, *workload.output_len)
    longest = max(input_lens)
    if tokenizer is None:
        text = [draw.randrange(vocab_size) for _ in range(64 * longest)]
    else:
        text = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
    if len(text) <= longest:
        raise ValueError(
            f"input_len: a prompt of {longest} tokens is longer than the text it is cut from ({len(text)})"
        )
    starts = [draw.randrange(len(text) - longest) for _ in input_lens]
    return [
        BenchRequest(text[start : start + input_len], output_len)
        for start, input_len, output_len in zip(starts, input_lens, output_lens, strict=True)
    ]


def _draw_lengths(draw: random.Random, count: int, low: int, high: int) -> list[int]:
    lengths = [draw.randint(low, high) for _ in range(count)]
    surplus = sum(lengths) - count * (low + high) // 2
    step = -1 if surplus > 0 else 1
    while surplus:
        index = draw.randrange(count)
        if low <= lengths[index] + step <= high:
            lengths[index] += step
            surplus += step
    return lengths
