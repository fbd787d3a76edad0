"""The gate on what kernels cost: a rise over 5 % against the stored figures, of the same compilers."""

import copy

import figures
import pytest

VERSIONS = {"v6e": {"jax": "1", "libtpu": "2"}, "sm_90a": {"jax": "1"}}
DECODE = {"cycles": 1.0, "hot_spills": 0, "spills": 4, "vmem": 100}
PREFILL = {"peak": 0.42, "hot_spills": 100}
GPU = {"registers": 168, "shared": 80000, "spill_bytes": 0, "fitting": 2}
STORED = {"compilers": VERSIONS, "figures": {"v6e": {"decode": DECODE, "prefill": PREFILL}, "sm_90a": {"attend": GPU}}}


def compare(decode: dict[str, float] | None = None, prefill: dict[str, float] | None = None):
    found = {"v6e": {"decode": DECODE | (decode or {}), "prefill": PREFILL | (prefill or {})}}
    return figures.compare(copy.deepcopy(STORED), found, VERSIONS)


def test_within_five_percent() -> None:
    assert compare() == ([], [])
    assert compare({"cycles": 1.049, "spills": 9, "vmem": 900}, {"peak": 0.401, "hot_spills": 200}) == ([], [])
    assert compare({"cycles": 0.5}, {"peak": 0.9}) == ([], [])


@pytest.mark.parametrize(
    ("decode", "prefill", "said"),
    [
        ({"cycles": 1.051}, {}, "v6e, decode: cycles rose from 1 to 1.051"),
        ({}, {"peak": 0.399}, "v6e, prefill: the share of the peak fell from 42.0% to 39.9%"),
    ],
)
def test_a_rise(decode: dict[str, float], prefill: dict[str, float], said: str) -> None:
    assert compare(decode, prefill) == ([said], [])


def test_a_rise_on_a_gpu() -> None:
    rises, _ = figures.compare(STORED, {"sm_90a": {"attend": GPU | {"registers": 176, "spill_bytes": 4}}}, VERSIONS)
    assert rises == ["sm_90a, attend: spill_bytes rose from 0 to 4"]


def test_like_only_with_like() -> None:
    newer = {"v6e": {"jax": "1", "libtpu": "3"}}
    rises, remarks = figures.compare(STORED, {"v6e": {"decode": DECODE | {"cycles": 9.0}}}, newer)
    assert rises == []
    assert remarks == [f"v6e: the stored figures are of {VERSIONS['v6e']}, these are of {newer['v6e']}"]


def test_a_case_that_is_new() -> None:
    rises, remarks = figures.compare(STORED, {"v6e": {"new": DECODE}}, VERSIONS)
    assert rises == []
    assert remarks == ["v6e, new: it has no stored figures; scripts/kernel_report makes them"]


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((4, 64, 256), "bfloat16", 4 * 64 * 256 * 2),
        ((4, 64, 160), "bfloat16", 4 * 64 * 256 * 2),  # lanes in tiles of 128
        ((2, 24, 128), "int8", 2 * 32 * 128),  # rows in tiles of 32 bytes
        ((16, 2, 128), "bfloat16", 16 * 2 * 128 * 2),  # but two rows of bfloat16 are a tile of their own
        ((5, 1, 128), "bfloat16", 5 * 2 * 128 * 2),
    ],
)
def test_stored_bytes(shape: tuple[int, ...], dtype: str, size: int) -> None:
    assert figures.stored_bytes(shape, dtype) == size
