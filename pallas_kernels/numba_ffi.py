"""XLA:CPU custom calls written in Python: Numba compiles them, XLA's own threads run them.

A call does `work(arguments, results, item)` once for every item in 0 .. `count(arguments, results)` - 1, in no order, on as
many threads as XLA has. `arguments` and `results` are the addresses of lists of buffers, which `data` and `dim` read.

The numbers below are word offsets in the structs of XLA's FFI (xla/ffi/api/c_api.h, which jaxlib ships). XLA keeps them
from version to version, and a test compares them with the header that is installed.
"""

import ctypes
from typing import Any

import jax
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

WORD = 8

FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RETS = 1, 2, 3, 9, 14
BUFFER_DATA, BUFFER_DIMS = 3, 5
EXTENSION_TYPE, EXTENSION_METADATA, METADATA_VERSION = 1, 3, 3
API_VERSION, API_SCHEDULE, API_NUM_THREADS = 4, 17, 18
METADATA = 1  # the extension type by which XLA asks a handler for its version

# What the threads of one call share.
OWNERS, NEXT, DONE, COUNT, WORK, ARGUMENTS, RESULTS, SHARED_WORDS = range(8)

malloc = types.ExternalFunction("malloc", types.intp(types.intp))
free = types.ExternalFunction("free", types.void(types.intp))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _word(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(address, ir.IntType(64).as_pointer()), [index])


@intrinsic
def load_word(typing: Any, address: Any, index: Any) -> Any:
    """The 64-bit word at `address + 8 * index`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word(builder, *args))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def store_word(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the 64-bit word at `address + 8 * index`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@intrinsic
def add_word(typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Adds atomically to the 64-bit word at `address + 8 * index`; its value before that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, *args[:2]), args[2], "seq_cst")

    return types.int64(types.intp, types.intp, types.int64), generate


@intrinsic
def call(typing: Any, function: Any, argument: Any) -> Any:
    """Calls the C function `intptr_t f(intptr_t)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer()), args[1:])

    return types.int64(types.intp, types.intp), generate


@intrinsic
def call_work(typing: Any, function: Any, arguments: Any, results: Any, item: Any) -> Any:
    """Calls the C function `void f(intptr_t, intptr_t, intptr_t)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as the kind of pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@njit(inline="always")
def data(buffers: int, index: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Buffer `index` as an array of a shape and dtype."""
    return carray(pointer(load_word(load_word(buffers, index), BUFFER_DATA)), shape, dtype)


@njit(inline="always")
def dim(buffers: int, index: int, axis: int) -> int:
    """The size of an axis of buffer `index`."""
    return load_word(load_word(load_word(buffers, index), BUFFER_DIMS), axis)


@njit(cache=True)
def _take_items(shared: int) -> None:
    total, work = load_word(shared, COUNT), load_word(shared, WORK)
    arguments, results = load_word(shared, ARGUMENTS), load_word(shared, RESULTS)
    item = add_word(shared, NEXT, 1)
    while item < total:
        call_work(work, arguments, results, item)
        add_word(shared, DONE, 1)
        item = add_word(shared, NEXT, 1)


@njit(cache=True)
def _leave(shared: int) -> None:
    """A thread may start when all is done already, so the last to leave, whoever it is, frees what they share."""
    if add_word(shared, OWNERS, -1) == 1:
        free(shared)


@cfunc(types.void(types.intp), cache=True)
def _task(shared: int) -> None:
    _take_items(shared)
    _leave(shared)


@njit(types.intp(types.intp, types.intp, types.intp, types.intp), cache=True)
def _run(frame: int, count: int, work: int, task: int) -> int:
    """What a handler does with a call frame, given the addresses of the C functions `count`, `work` and `_task`."""
    api, extension = load_word(frame, FRAME_API), load_word(frame, FRAME_EXTENSION)
    if extension != 0 and load_word(extension, EXTENSION_TYPE) % 2**32 == METADATA:
        store_word(load_word(extension, EXTENSION_METADATA), METADATA_VERSION, load_word(api, API_VERSION))
        return 0
    shared = malloc(SHARED_WORDS * WORD)
    store_word(shared, NEXT, 0)
    store_word(shared, DONE, 0)
    store_word(shared, WORK, work)
    store_word(shared, ARGUMENTS, load_word(frame, FRAME_ARGS))
    store_word(shared, RESULTS, load_word(frame, FRAME_RETS))
    total = call(count, frame)
    store_word(shared, COUNT, total)

    threads = np.ones(1, np.int64)
    api_call = np.empty(5, np.int64)  # struct_size, extension_start, context, and what the function takes or gives
    api_call[0], api_call[1], api_call[2] = 4 * WORD, 0, load_word(frame, FRAME_CONTEXT)
    api_call[3] = threads.ctypes.data
    call(load_word(api, API_NUM_THREADS), api_call.ctypes.data)
    helpers = max(min(threads[0], total) - 1, 0)
    store_word(shared, OWNERS, helpers + 1)
    api_call[0], api_call[3], api_call[4] = 5 * WORD, task, shared
    for _ in range(helpers):
        call(load_word(api, API_SCHEDULE), api_call.ctypes.data)
    _take_items(shared)
    while add_word(shared, DONE, 0) < total:
        sched_yield()  # to a thread that is in the midst of an item, should it have no core
    _leave(shared)
    return 0


_handlers: list[Any] = []  # XLA calls them as long as the process lives


def register(name: str, count: Any, work: Any) -> None:
    """Makes two C functions that Numba has compiled the target `name` of `jax.ffi.ffi_call` on CPU.

    count: `intp(intp)`, from the call frame to the number of items.
    work: `void(intp, intp, intp)`, of the lists of arguments and results and the item. It must not raise.
    """
    count_address, work_address, task_address = count.address, work.address, _task.address

    @cfunc(types.intp(types.intp))
    def handler(frame: int) -> int:
        return _run(frame, count_address, work_address, task_address)

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new_capsule(handler.address, None, None), platform="cpu")
    _handlers.append((handler, count, work))
