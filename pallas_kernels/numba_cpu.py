"""Paged attention for CPUs, in Python that Numba compiles: pages are read where they lie, nothing is gathered.

An item of work is one KV head of one query tile: a decode's single token, or some tokens of a prefill, with all the query
heads that share the KV head. Keys are taken in blocks with an online softmax (arXiv:1805.02867), in float32 throughout.
"""

import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from paxserve.pallas_kernels import numba_ffi
from paxserve.pallas_kernels.layout import Scale, page_size_of
from paxserve.pallas_kernels.numba_ffi import FRAME_ARGS, data, dim, load_word

TILE_ROWS = 96  # query rows (tokens x heads of the group) of a tile at most: with a block's logits they fit an L1 cache
TILE_BLOCK = 64  # keys that a tile takes at a time
FEW_ROWS = 8  # up to which rows are not worth a tile
ROW_BLOCK = 256  # keys that they take at a time
VECTOR = 16  # float32 in a vector: a register of AVX-512, several where registers are smaller
ROWS = 32  # float32 in a row of the innermost product
MANY, FEW = 8, 3  # rows that it computes at a time, keeping ROWS / VECTOR sums of each in registers
CACHE_LINE = 64  # bytes
NO_WINDOW = 2**30
LOWEST = np.float32(np.finfo(np.float32).min)  # the logit of a key that is not seen
START = np.float32(-1e30)  # the running maximum before any key: above LOWEST, so that unseen keys weigh nothing

DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "uint16": np.uint16, "int8": np.int8}
"""The dtypes of q and of pages that this can read, and as what; bfloat16 is read by its bits."""

FAST = {"contract", "reassoc", "nsz", "arcp"}
inlined = njit(fastmath=FAST, error_model="numpy", inline="always")


def _widen(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 (one or a vector) from float32, from int8 or from bfloat16's bits."""

    def like_value(kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind

    if value.type == like_value(ir.IntType(16)):
        word = like_value(ir.IntType(32))
        sixteen = [16] * VECTOR if isinstance(word, ir.VectorType) else 16
        bits = builder.shl(builder.zext(value, word), ir.Constant(word, sixteen))
        return builder.bitcast(bits, like_value(ir.FloatType()))
    if value.type == like_value(ir.IntType(8)):
        return builder.sitofp(value, like_value(ir.FloatType()))
    return value


@intrinsic
def as_float(typing: Any, value: Any) -> Any:
    """The float32 that is stored as `value`, a float32, an int8 or a bfloat16's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen(builder, args[0])

    return types.float32(value), generate


@intrinsic
def size_of(typing: Any, like: Any) -> Any:
    """Bytes of a value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), like.bitwidth // 8)

    return types.intp(like), generate


@intrinsic
def float_at(typing: Any, address: Any, index: Any, like: Any) -> Any:
    """`as_float` of element `index` at an address, stored like `like`. An array's index might count from its end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        elements = builder.inttoptr(args[0], context.get_data_type(like).as_pointer())
        return _widen(builder, builder.load(builder.gep(elements, [args[1]])))

    return types.float32(types.intp, types.intp, like), generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Starts to load the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reading_data_to_keep = [ir.Constant(word, value) for value in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], byte), *reading_data_to_keep])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def rounded(typing: Any, value: Any, like: Any) -> Any:
    """A float32 as the type of `like`: itself, or rounded to a bfloat16's bits (to nearest, ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        bits = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(bits, ir.Constant(word, 16)), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic
def power_of_two(typing: Any, exponent: Any) -> Any:
    """2 ** exponent in float32, for exponents from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.int32), generate


class _Vectors:
    """Emits what the two products below are made of; addresses and elements are 64-bit integers."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self.context, self.builder = context, builder
        self.word, self.kind = ir.IntType(64), ir.VectorType(ir.FloatType(), VECTOR)

    def constant(self, value: int) -> ir.Value:
        return ir.Constant(self.word, value)

    def at(self, address: ir.Value, element: ir.Value, like: Any) -> ir.Value:
        """A pointer to an element of an array of Numba type `like`."""
        array = self.builder.inttoptr(address, self.context.get_data_type(like).as_pointer())
        return self.builder.gep(array, [element])

    def load(self, pointer: ir.Value) -> ir.Value:
        """The vector that starts at an element."""
        kind = ir.VectorType(pointer.type.pointee, VECTOR)
        size = pointer.type.pointee.width // 8 if isinstance(pointer.type.pointee, ir.IntType) else 4
        return _widen(self.builder, self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=size))

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, self.kind.as_pointer()), align=4)

    def spread(self, value: ir.Value) -> ir.Value:
        """A vector of one value."""
        undefined = ir.Constant(self.kind, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), None))

    def add_product(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.builder.fadd(x, self.builder.fmul(y, z, flags=("contract",)), flags=("contract",))

    def loop(self, end: ir.Value, step: int, starts: list[ir.Value], body: Any) -> list[ir.Value]:
        """Sums from `starts`, by `body(index, sums)`, for index 0, step, 2 * step and so on below `end`, at least once."""
        builder = self.builder
        before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        index, sums = builder.phi(self.word), [builder.phi(start.type) for start in starts]
        ends = body(index, sums)
        following = builder.add(index, self.constant(step))
        builder.cbranch(builder.icmp_signed("<", following, end), inside, after)
        for phi, first, last in zip([index, *sums], [self.constant(0), *starts], [following, *ends], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, inside)
        builder.position_at_end(after)
        return ends


@intrinsic
def dot(typing: Any, a: Any, b: Any, n: Any, like: Any) -> Any:
    """Sum over d < n of a[d] * b[d], for n a multiple of VECTOR; a and b are addresses, a's of float32, b's of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Vectors(context, builder)

        def body(d: Any, sums: Any) -> list[Any]:
            x, y = v.load(v.at(args[0], d, types.float32)), v.load(v.at(args[1], d, like))
            return [v.add_product(sums[0], x, y)]

        (total,) = v.loop(args[2], VECTOR, [ir.Constant(v.kind, None)], body)
        undefined = ir.Constant(v.kind, ir.Undefined)
        half = VECTOR // 2
        while half:  # sums of halves, of quarters and so on
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [(i + half) % VECTOR for i in range(VECTOR)])
            total = builder.fadd(total, builder.shuffle_vector(total, undefined, lanes))
            half //= 2
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.intp, types.intp, types.intp, like), generate


def _multiply_add(count: int) -> Any:
    """Makes the innermost product: c[i, :] += sum over j < n of a[i, j] * b[j, :], for i < count.

    Rows of b and c are ROWS long, which a compiler would not by itself keep in registers over j. a, b and c are addresses;
    a's steps (of i and j) and the lengths of rows of b and c are in elements; c is float32, a and b are like like_a, like_b.
    """

    @intrinsic
    def multiply_add(
        typing: Any,
        c: Any,
        c_row: Any,
        a: Any,
        a_i: Any,
        a_j: Any,
        b: Any,
        b_row: Any,
        n: Any,
        like_a: Any,
        like_b: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            c, c_row, a, a_i, a_j, b, b_row, n = args[:8]
            v = _Vectors(context, builder)

            def pointers(base: Any, row: Any, like: Any) -> list[Any]:
                return [v.at(base, builder.add(row, v.constant(lane)), like) for lane in range(0, ROWS, VECTOR)]

            def body(j: Any, sums: Any) -> list[Any]:
                xs = [v.load(pointer) for pointer in pointers(b, builder.mul(j, b_row), like_b)]
                ends = []
                for i in range(count):
                    element = builder.add(builder.mul(a_i, v.constant(i)), builder.mul(a_j, j))
                    factor = v.spread(_widen(builder, builder.load(v.at(a, element, like_a))))
                    row = sums[i * len(xs) : (i + 1) * len(xs)]
                    ends += [v.add_product(total, factor, x) for total, x in zip(row, xs, strict=True)]
                return ends

            targets = []
            for i in range(count):
                targets += pointers(c, builder.mul(c_row, v.constant(i)), types.float32)
            ends = v.loop(n, 1, [v.load(target) for target in targets], body)
            for target, end in zip(targets, ends, strict=True):
                v.store(end, target)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, like_a, like_b), generate

    return multiply_add


multiply_add_many = _multiply_add(MANY)
multiply_add_few = _multiply_add(FEW)
multiply_add_one = _multiply_add(1)


@inlined
def multiply_add(
    c: np.ndarray,
    m: int,
    columns: int,
    a: int,
    a_i: int,
    a_j: int,
    b: int,
    b_row: int,
    n: int,
    like_a: Any,
    like_b: Any,
) -> None:
    """c[i, :columns] += sum over j < n of a[i, j] * b[j, :columns] for i < m; ROWS divides `columns`.

    a and b are addresses, all else is as in `_multiply_add`.
    """
    width, a_size, b_size = c.shape[1], size_of(like_a), size_of(like_b)
    for r in range(0, columns, ROWS):
        to, by = c.ctypes.data + 4 * r, b + b_size * r
        i = 0
        while i + MANY <= m:
            of = a + a_size * i * a_i
            multiply_add_many(to + 4 * i * width, width, of, a_i, a_j, by, b_row, n, like_a, like_b)
            i += MANY
        while i + FEW <= m:
            of = a + a_size * i * a_i
            multiply_add_few(to + 4 * i * width, width, of, a_i, a_j, by, b_row, n, like_a, like_b)
            i += FEW
        while i < m:
            of = a + a_size * i * a_i
            multiply_add_one(to + 4 * i * width, width, of, a_i, a_j, by, b_row, n, like_a, like_b)
            i += 1


@inlined
def exp(x: float) -> float:
    """e ** x for x <= 0, exact to 2e-7 of it, and 0 below -87; in arithmetic that vectorises, as math.exp does not."""
    y = max(x, np.float32(-87.0))
    n = np.int32(y * np.float32(1.44269504) - np.float32(0.5))  # y / log(2), rounded to nearest
    r = y - np.float32(n) * np.float32(0.693359375) + np.float32(n) * np.float32(2.12194440e-4)  # y - n * log(2)
    p = r * np.float32(1.0 / 5040.0) + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = (p * r + np.float32(1.0)) * r + np.float32(1.0)
    return p * power_of_two(n) if x >= np.float32(-87.0) else np.float32(0.0)


@inlined
def capped(x: float, cap: float) -> float:
    """cap * tanh(x / cap)."""
    y = exp(-abs(x) * (np.float32(2.0) / cap))
    return math.copysign(cap * (np.float32(1.0) - y) / (np.float32(1.0) + y), x)


@inlined
def attend_rows(
    query: np.ndarray,
    kv: np.ndarray,
    page_rows: np.ndarray,
    page_size: int,
    value_row: int,
    value_column: int,
    first: int,
    last: int,
    cap: float,
    logits: np.ndarray,
    top: np.ndarray,
    total: np.ndarray,
    acc: np.ndarray,
) -> None:
    """Goes over keys first .. last for a few query rows.

    query [rows, key_dim] float32; kv [pages * kv_heads, slots, width]; page_rows: the first axis' index of each page of the
    sequence; values start at value_row, value_column of what a page holds. logits [rows, ROW_BLOCK] is scratch; top and
    total [rows] and acc [rows, value_dim] are the online softmax.
    """
    rows, key_dim = query.shape
    value_dim, page_width, size, like, one = acc.shape[1], kv.shape[2], kv.itemsize, kv[0, 0, 0], np.float32(1.0)
    vector_keys, vector_values = key_dim // VECTOR * VECTOR, value_dim // ROWS * ROWS
    key = first
    while key <= last:
        stop = min(key + ROW_BLOCK, last + 1)
        n = stop - key
        at = key
        while at < stop:
            end = min(at - at % page_size + page_size, stop)
            k = kv[page_rows[at // page_size]].ctypes.data + size * page_width * (at % page_size)
            following = kv[page_rows[min(end, last) // page_size]].ctypes.data
            per_key = kv[0].nbytes // page_size
            for i in range(at - key, end - key):
                for line in range(0, per_key, CACHE_LINE):
                    prefetch(following + line)
                following += per_key
                for r in range(rows):
                    x = np.float32(0.0)
                    if vector_keys:
                        x = dot(query[r].ctypes.data, k, vector_keys, like)
                    for d in range(vector_keys, key_dim):
                        x += query[r, d] * float_at(k, d, like)
                    logits[r, i] = x
                k += size * page_width
            at = end

        for r in range(rows):
            if cap > np.float32(0.0):
                for i in range(n):
                    logits[r, i] = capped(logits[r, i], cap)
            new_top = top[r]
            for i in range(n):
                new_top = max(new_top, logits[r, i])
            fade, weight = exp(top[r] - new_top), np.float32(0.0)
            for i in range(n):
                x = exp(logits[r, i] - new_top)
                logits[r, i] = x
                weight += x
            top[r], total[r] = new_top, total[r] * fade + weight
            for d in range(value_dim):
                acc[r, d] *= fade

        at = key
        while at < stop:
            end = min(at - at % page_size + page_size, stop)
            v = kv[page_rows[at // page_size]].ctypes.data
            v += size * (page_width * (value_row + at % page_size) + value_column)
            weights = logits[:, at - key :]
            multiply_add(
                acc, rows, vector_values, weights.ctypes.data, ROW_BLOCK, 1, v, page_width, end - at, one, like
            )
            for i in range(end - at):
                for r in range(rows):
                    for d in range(vector_values, value_dim):
                        acc[r, d] += weights[r, i] * float_at(v, i * page_width + d, like)
            at = end
        key = stop


@inlined
def attend_tile(
    query: np.ndarray,
    kv: np.ndarray,
    page_rows: np.ndarray,
    page_size: int,
    value_row: int,
    value_column: int,
    first: int,
    position: np.ndarray,
    window: int,
    cap: float,
    logits: np.ndarray,
    fade: np.ndarray,
    top: np.ndarray,
    total: np.ndarray,
    acc: np.ndarray,
) -> None:
    """Goes over keys first .. position[-1] for many query rows at ascending positions.

    Everything is transposed, so that all arithmetic is on vectors of rows: query [key_dim, rows], logits [TILE_BLOCK, rows],
    acc [value_dim, rows], position, fade, top and total [rows], where ROWS divides rows. The rest is as in `attend_rows`.
    """
    key_dim, value_dim, page_width = query.shape[0], acc.shape[0], kv.shape[2]
    size, like, one = kv.itemsize, kv[0, 0, 0], np.float32(1.0)
    rows, lowest, last = len(position), position[0], position[-1]
    key = first
    while key <= last:
        page, slot = kv[page_rows[key // page_size]].ctypes.data, key % page_size
        n = min(page_size - slot, TILE_BLOCK, last + 1 - key)
        logits[:n] = np.float32(0.0)
        k, v = page + size * page_width * slot, page + size * (page_width * (value_row + slot) + value_column)
        multiply_add(logits, n, rows, k, page_width, 1, query.ctypes.data, rows, key_dim, like, one)

        masked = key + n - 1 > lowest or key <= last - window
        for r in range(rows):
            fade[r] = top[r]
        for i in range(n):
            if cap > np.float32(0.0):
                for r in range(rows):
                    logits[i, r] = capped(logits[i, r], cap)
            if masked:
                k = np.int32(key + i)
                for r in range(rows):
                    seen = k <= position[r] and k > position[r] - window
                    logits[i, r] = logits[i, r] if seen else LOWEST
            for r in range(rows):
                top[r] = max(top[r], logits[i, r])
        for r in range(rows):
            fade[r] = exp(fade[r] - top[r])
            total[r] *= fade[r]
        for i in range(n):
            for r in range(rows):
                x = exp(logits[i, r] - top[r])
                logits[i, r] = x
                total[r] += x

        for d in range(value_dim):
            for r in range(rows):
                acc[d, r] *= fade[r]
        multiply_add(acc, value_dim, rows, v, 1, page_width, logits.ctypes.data, rows, n, like, one)
        key += n


Q, PAGES, TABLES, CONTEXTS, STARTS, INTEGERS, FLOATS, SINKS = range(8)
"""The arguments of the call. INTEGERS: window, page_size, value_row, value_column; FLOATS: scale, soft cap."""


@inlined
def tokens_per_tile(group: int) -> int:
    return max(TILE_ROWS // group, 1)


def _kernel(q_dtype: Any, pages_dtype: Any, key_dim: int, value_dim: int) -> tuple[Any, Any]:
    """(count, work) for `numba_ffi.register`, compiled for these constants."""

    @cfunc(types.intp(types.intp), cache=True)
    def count(frame: int) -> int:
        arguments = load_word(frame, FRAME_ARGS)
        seqs, kv_heads = dim(arguments, TABLES, 0), dim(arguments, PAGES, 1)
        starts = data(arguments, STARTS, (seqs + 1,), np.int32)
        tile = tokens_per_tile(dim(arguments, Q, 1) // kv_heads)
        tiles = 0
        for seq in range(seqs):
            tiles += (starts[seq + 1] - starts[seq] + tile - 1) // tile
        return tiles * kv_heads + 1  # and one for the padding

    @cfunc(types.void(types.intp, types.intp, types.intp), cache=True, fastmath=FAST, error_model="numpy")
    def work(arguments: int, results: int, item: int) -> None:
        tokens, heads = dim(arguments, Q, 0), dim(arguments, Q, 1)
        pages, kv_heads = dim(arguments, PAGES, 0), dim(arguments, PAGES, 1)
        seqs, group = dim(arguments, TABLES, 0), heads // kv_heads
        q = data(arguments, Q, (tokens, kv_heads, group, key_dim), q_dtype)
        kv_shape = (pages * kv_heads, dim(arguments, PAGES, 2), dim(arguments, PAGES, 3))
        kv = data(arguments, PAGES, kv_shape, pages_dtype)
        tables = data(arguments, TABLES, (seqs, dim(arguments, TABLES, 1)), np.int32)
        contexts = data(arguments, CONTEXTS, (seqs,), np.int32)
        starts = data(arguments, STARTS, (seqs + 1,), np.int32)
        window, page_size, value_row, value_column = data(arguments, INTEGERS, (4,), np.int32)
        scale, cap = data(arguments, FLOATS, (2,), np.float32)
        sinks = data(arguments, SINKS, (kv_heads, group), np.float32)
        out = data(results, 0, (tokens, kv_heads, group, value_dim), q_dtype)
        lse = data(results, 1, (tokens, kv_heads, group), np.float32)
        zero = rounded(np.float32(0.0), q[0, 0, 0, 0])

        if item == 0:
            out[starts[seqs] :] = zero
            lse[starts[seqs] :] = -np.inf
            return
        tile = tokens_per_tile(group)
        seq, index, head = 0, (item - 1) // kv_heads, (item - 1) % kv_heads
        while index >= (starts[seq + 1] - starts[seq] + tile - 1) // tile:
            index -= (starts[seq + 1] - starts[seq] + tile - 1) // tile
            seq += 1
        begin = starts[seq] + index * tile
        end = min(begin + tile, starts[seq + 1])
        if contexts[seq] == 0:
            out[begin:end, head] = zero
            lse[begin:end, head] = -np.inf
            return
        position = contexts[seq] - starts[seq + 1] + begin  # of the first token
        first = max(position - window + 1, 0)
        last_page = (position + end - begin - 1) // page_size
        page_rows = np.empty(last_page + 1, np.int64)
        for page in range(first // page_size, last_page + 1):
            page_rows[page] = np.int64(tables[seq, page]) * kv_heads + head

        rows = (end - begin) * group
        if rows <= FEW_ROWS:
            query = np.empty((group, key_dim), np.float32)
            logits = np.empty((group, ROW_BLOCK), np.float32)
            top, total = np.empty(group, np.float32), np.empty(group, np.float32)
            acc = np.empty((group, value_dim), np.float32)
            for t in range(begin, end):
                for g in range(group):
                    top[g] = max(sinks[head, g], START)
                    total[g] = np.float32(1.0) if sinks[head, g] > START else np.float32(0.0)
                    for d in range(key_dim):
                        query[g, d] = as_float(q[t, head, g, d]) * scale
                acc[:] = np.float32(0.0)
                last = position + t - begin
                first = max(last - window + 1, 0)
                attend_rows(
                    query, kv, page_rows, page_size, value_row, value_column, first, last, cap, logits, top, total, acc
                )
                for g in range(group):
                    lse[t, head, g] = top[g] + np.float32(math.log(total[g]))
                    for d in range(value_dim):
                        out[t, head, g, d] = rounded(acc[g, d] / total[g], zero)
        else:
            width = (rows + ROWS - 1) // ROWS * ROWS
            query = np.empty((key_dim, width), np.float32)
            logits = np.empty((TILE_BLOCK, width), np.float32)
            fades, tops, totals = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
            positions = np.empty(width, np.int32)
            acc = np.zeros((value_dim, width), np.float32)
            for r in range(width):  # those past the last row repeat it
                t, g = min(r, rows - 1) // group, min(r, rows - 1) % group
                positions[r] = position + t
                tops[r] = max(sinks[head, g], START)
                totals[r] = np.float32(1.0) if sinks[head, g] > START else np.float32(0.0)
                for d in range(key_dim):
                    query[d, r] = as_float(q[begin + t, head, g, d]) * scale
            attend_tile(
                query, kv, page_rows, page_size, value_row, value_column, first, positions, window, cap,
                logits, fades, tops, totals, acc,
            )  # fmt: skip
            for r in range(rows):
                t, g = begin + r // group, r % group
                lse[t, head, g] = tops[r] + np.float32(math.log(totals[r]))
                for d in range(value_dim):
                    out[t, head, g, d] = rounded(acc[d, r] / totals[r], zero)

    return count, work


_targets: set[str] = set()
_compiling = threading.Lock()


def _target(*constants: Any) -> str:
    """The name of the call compiled for `_kernel`'s constants."""
    name = "paxserve_paged_attention_" + "_".join(getattr(c, "__name__", str(c)) for c in constants)
    with _compiling:
        if name not in _targets:
            numba_ffi.register(name, *_kernel(*constants))
            _targets.add(name)
    return name


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Num[Array, "pages kv_heads slots width"],
    block_tables: Int[Array, "seqs max_pages"],
    context_lens: Int[Array, "seqs"],
    query_starts: Int[Array, "seqs_plus_1"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    max_query_len: int | None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """See `paxserve.pallas_kernels.paged_attention`; `max_query_len` is not needed here.

    Raises NotImplementedError for a dtype that is not in DTYPES and a head_dim that is not a multiple of 4.
    """
    del max_query_len
    tokens, heads, head_dim = q.shape
    page_size = page_size_of(kv_pages, head_dim)
    value_row, value_column = (page_size, 0) if kv_pages.shape[3] == head_dim else (0, head_dim)
    target = _target(DTYPES[str(q.dtype)], DTYPES[str(kv_pages.dtype)], head_dim, head_dim)
    integers = [NO_WINDOW if window is None else window, page_size, value_row, value_column]
    logit_scale = scale if k_scale is None else scale * k_scale
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    out, lse = jax.ffi.ffi_call(target, results)(
        q,
        kv_pages,
        block_tables,
        context_lens,
        query_starts,
        jnp.array(integers, jnp.int32),
        jnp.array([logit_scale, soft_cap or 0.0], jnp.float32),
        jnp.full(heads, LOWEST) if sinks is None else sinks.astype(jnp.float32),
    )
    return (out if v_scale is None else (out * v_scale).astype(q.dtype)), lse
