"""The sweep over block sizes, on made-up costs and, by time, on a simulated kernel."""

import gqa_cases
import pytest
import tune
from gqa_cases import Case

CASE = Case(8, 4)
START = {"block_keys": 512, "chains": 12, "slots": 3}


def test_improve_finds_sizes_that_depend_on_each_other() -> None:
    asked = []

    def costs(case: Case, options: list[tune.Sizes]) -> list[float]:
        asked.extend(options)
        return [
            float("inf")
            if each["block_keys"] == 1024 and each["chains"] > 8
            else 100 - each["block_keys"] / 64 + abs(each["chains"] - 8)
            for each in options
        ]

    best = tune.improve(CASE, START, costs, ["block_keys", "chains"])
    assert best == {"block_keys": 1024, "chains": 8, "slots": 3}
    assert all(each["slots"] == 3 for each in asked)


def test_improve_leaves_what_gains_too_little() -> None:
    def costs(case: Case, options: list[tune.Sizes]) -> list[float]:
        return [1 - each["chains"] / 10000 for each in options]

    assert tune.improve(CASE, START, costs, ["block_keys", "chains"]) == START


def test_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sizes in ((gqa_cases, {"SEQS": 2, "CONTEXT": 64, "POOL": 256}), (tune, {"ROUNDS": 1, "CALLS": 1})):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    case = Case(2, 1, head_dim=16, page_size=8, dtype="float32", pages="float32", max_pages=4)
    few, many = START | {"block_keys": 8}, START | {"block_keys": 32}
    assert 0 < min(tune.times(case, [few, many])) < float("inf")
