"""Custom calls written with Numba: XLA's structs as we read them, threads, and which implementation is chosen."""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import cfunc, types
from test_paged_attention import A100, CPU, TPU

from paxserve.pallas_kernels import GQASizes, choose_implementation, numba_ffi
from paxserve.pallas_kernels.numba_ffi import WORD, data, dim, load_word

HEADER = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
SIZES = {"size_t": 8, "int64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4, "XLA_FFI_Handler_Traits": 4}


def struct(name: str) -> tuple[dict[str, int], int, int]:
    """Byte offsets of a struct's fields, its size and its alignment, by the C rules."""
    body = re.search(rf"struct {name}\s*{{(.*?)}}\s*(?:{name})?;", HEADER, re.S)
    assert body, name
    text = re.sub(r"//[^\n]*", "", body[1])
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"\1* \1", text)
    offsets, end, widest = {}, 0, 1
    for declaration in filter(str.strip, text.split(";")):
        kind, field = re.match(r"\s*(?:const\s+|struct\s+)*(\w+)(.*)", declaration, re.S).groups()
        if "*" in field:
            size = align = 8
        elif kind in SIZES:
            size = align = SIZES[kind]
        elif re.search(rf"enum {{[^}}]*}} {kind};", HEADER):
            size = align = 4
        else:
            _, size, align = struct(kind)
        end = -(-end // align) * align
        offsets[field.replace("*", "").strip()] = end
        end, widest = end + size, max(widest, align)
    return offsets, -(-end // widest) * widest, widest


def test_structs_are_as_the_installed_header_has_them():
    frame, buffer, api = (struct(f"XLA_FFI_{name}")[0] for name in ("CallFrame", "Buffer", "Api"))
    lists = [struct(f"XLA_FFI_{name}")[0] for name in ("Args", "Rets")]
    version = struct("XLA_FFI_Api_Version")[0]["major_version"]
    metadata, extension = (struct(f"XLA_FFI_Metadata{name}")[0] for name in ("", "_Extension"))
    base = next(name for name in ("InternalExtension", "Extension_Base") if f"struct XLA_FFI_{name} {{" in HEADER)
    assert frame["extension_start"] == WORD * numba_ffi.FRAME_EXTENSION
    assert frame["api"] == WORD * numba_ffi.FRAME_API
    assert frame["ctx"] == WORD * numba_ffi.FRAME_CONTEXT
    assert frame["args"] + lists[0]["args"] == WORD * numba_ffi.FRAME_ARGS
    assert frame["rets"] + lists[1]["rets"] == WORD * numba_ffi.FRAME_RETS
    assert buffer["data"] == WORD * numba_ffi.BUFFER_DATA
    assert buffer["dims"] == WORD * numba_ffi.BUFFER_DIMS
    assert struct(f"XLA_FFI_{base}")[0]["type"] == WORD * numba_ffi.EXTENSION_TYPE
    assert extension["metadata"] == WORD * numba_ffi.EXTENSION_METADATA
    assert metadata["api_version"] + version == WORD * numba_ffi.METADATA_VERSION
    assert api["api_version"] + version == WORD * numba_ffi.API_VERSION
    assert api["XLA_FFI_ThreadPool_Schedule"] == WORD * numba_ffi.API_SCHEDULE
    assert api["XLA_FFI_ThreadPool_NumThreads"] == WORD * numba_ffi.API_NUM_THREADS
    for name in ("Schedule", "NumThreads"):
        offsets = struct(f"XLA_FFI_ThreadPool_{name}_Args")[0]
        assert list(offsets.values()) == [WORD * i for i in range(len(offsets))]


@pytest.fixture(scope="module")
def double():
    """A custom call that doubles a matrix, a row an item, and counts how often each row was done."""

    @cfunc(types.intp(types.intp))
    def count(frame):
        return dim(load_word(frame, numba_ffi.FRAME_ARGS), 0, 0)

    @cfunc(types.void(types.intp, types.intp, types.intp))
    def work(arguments, results, item):
        shape = (dim(arguments, 0, 0), dim(arguments, 0, 1))
        x, y = data(arguments, 0, shape, np.float32), data(results, 0, shape, np.float32)
        for j in range(shape[1]):
            y[item, j] = 2 * x[item, j]

    numba_ffi.register("test_double", count, work)
    return jax.jit(lambda x: jax.ffi.ffi_call("test_double", jax.ShapeDtypeStruct(x.shape, x.dtype))(x))


@pytest.mark.parametrize("rows", [0, 1, 2, 500])
def test_every_item_is_done(double, rows):
    x = np.random.default_rng(0).standard_normal((rows, 300)).astype(np.float32)
    np.testing.assert_array_equal(double(x), 2 * x)


def test_calls_of_several_threads_at_once(double):
    """More calls than XLA has threads: none waits for a thread that another one holds."""

    def run(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((64, 1000)).astype(np.float32)
        for _ in range(50):
            np.testing.assert_array_equal(double(x), 2 * x)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))


LLAMA = GQASizes(heads=8, kv_heads=2, head_dim=128, page_size=16)


def test_the_implementation_chosen_by_platform_and_dtype(monkeypatch):
    assert choose_implementation(None, CPU, jnp.bfloat16, jnp.uint16, sizes=LLAMA) == "numba_cpu"
    assert choose_implementation(None, CPU, jnp.float16, sizes=LLAMA) == "xla"
    assert choose_implementation(None, A100, jnp.bfloat16, sizes=LLAMA) == "xla"
    assert choose_implementation("reference", TPU, jnp.bfloat16, sizes=LLAMA) == "reference"
    with pytest.raises(NotImplementedError, match="runs on CPU, not on gpu"):
        choose_implementation("numba_cpu", A100, jnp.bfloat16, sizes=LLAMA)
    with pytest.raises(NotImplementedError, match="does not read float16"):
        choose_implementation("numba_cpu", CPU, jnp.float16, sizes=LLAMA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_implementation(None, CPU, jnp.bfloat16, sizes=LLAMA) == "xla"
    with pytest.raises(NotImplementedError, match=r"pip install 'paxserve\[cpu\]'"):
        choose_implementation("numba_cpu", CPU, jnp.bfloat16, sizes=LLAMA)
