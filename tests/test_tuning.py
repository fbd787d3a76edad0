"""Tuned block sizes: the nearest match, and what a file may not hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from paxserve.pallas_kernels import tuning

SHAPE = {"heads": 8, "kv_heads": 4, "head_dim": 128, "page_size": 64, "itemsize": 2}
SIZES = {"block_keys": 512, "chains": 12, "slots": 3}


def write(folder: Path, name: str, kind: str, *entries: dict[str, Any], kernel: str = "mosaic_tpu decode") -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"device_kind": kind, kernel: list(entries)}))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With two tuned shapes on one kind of device and one on another."""
    small, large = SHAPE | {"page_size": 16}, SHAPE | {"heads": 32, "page_size": 256}
    write(tmp_path, "a", "TPU v5", SHAPE | {"sizes": SIZES | {"chains": 5}})
    write(
        tmp_path,
        "b",
        "TPU v6 lite",
        small | {"sizes": SIZES | {"chains": 6}},
        large | {"sizes": SIZES | {"chains": 7}},
    )
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._entries.cache_clear()
    yield tmp_path
    tuning._entries.cache_clear()


@pytest.mark.parametrize(
    ("kind", "changes", "chains"),
    [
        ("TPU v6 lite", {"page_size": 16}, 6),
        ("TPU v6 lite", {}, 6),  # 4 times the small one's pages; the large one's are 4 times these, its heads too
        ("TPU v6 lite", {"heads": 16, "page_size": 128}, 7),
        ("TPU v5", {"page_size": 16}, 5),  # the kind of device before the shape
        ("cpu", {"page_size": 16}, 6),  # of all kinds
        ("cpu", {}, 5),
    ],
)
def test_nearest(folder: Path, kind: str, changes: dict[str, int], chains: int) -> None:
    assert tuning.block_sizes("mosaic_tpu decode", kind, **SHAPE | changes) == SIZES | {"chains": chains}


def test_first_of_equals(folder: Path) -> None:
    write(folder, "0", "TPU v5", SHAPE | {"sizes": SIZES | {"chains": 9}})
    assert tuning.block_sizes("mosaic_tpu decode", "TPU v5", **SHAPE)["chains"] == 9


@pytest.mark.parametrize("kernel", tuning.KERNELS)
@pytest.mark.parametrize("kind", [*tuning.DEVICE_KINDS, "cpu"])
def test_what_is_in_the_package(kernel: str, kind: str) -> None:
    fields, sizes = tuning.KERNELS[kernel]
    shape = {name: {"kv_lora_rank": 512, **SHAPE}[name] for name in fields}
    assert tuning.block_sizes(kernel, kind, **shape).keys() == set(sizes)


def test_wrong_questions(folder: Path) -> None:
    with pytest.raises(ValueError, match="no kernel 'mosaic_npu' is tuned; there are mosaic_tpu decode"):
        tuning.block_sizes("mosaic_npu", "TPU v5", **SHAPE)
    with pytest.raises(ValueError, match="given by positive heads, kv_heads"):
        tuning.block_sizes("mosaic_tpu decode", "TPU v5", heads=8)
    with pytest.raises(ValueError, match="given by positive heads, kv_heads"):
        tuning.block_sizes("mosaic_tpu decode", "TPU v5", **SHAPE | {"heads": 0})


@pytest.mark.parametrize(
    ("kind", "kernel", "entry", "message"),
    [
        ("TPU v2", "mosaic_tpu decode", {}, "device_kind 'TPU v2' is none of TPU v5 lite"),
        ("TPU v5", "mosaic_npu", {}, "'mosaic_npu' is none of the kernels"),
        ("TPU v5", "mosaic_tpu decode", SHAPE, "sizes of 'mosaic_tpu decode' must give block_keys, .* not nothing"),
        (
            "TPU v5",
            "mosaic_tpu decode",
            SHAPE | {"batch": 2, "sizes": SIZES},
            "a shape of 'mosaic_tpu decode' must give",
        ),
        ("TPU v5", "mosaic_tpu decode", SHAPE | {"sizes": SIZES | {"slots": 2.5}}, "slots of sizes of .* not 2.5"),
    ],
)
def test_wrong_files(tmp_path: Path, kind: str, kernel: str, entry: dict[str, Any], message: str) -> None:
    path = write(tmp_path, "wrong", kind, entry, kernel=kernel)
    with pytest.raises(ValueError, match=rf"wrong\.json: .*{message}"):
        tuning.read(path)
