"""Arithmetic for kernels that Numba compiles: stored values, an exponential that vectorises, the innermost products.

The products are written in LLVM's instructions, on vectors, to keep sums in registers; a compiler does not do that for
loops over arrays. Addresses are integers.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# VECTOR: float32 in a vector. ROWS: float32 in a row of the innermost product. MANY, FEW: rows that it computes at a time,
# keeping ROWS / VECTOR sums of each in registers: 32 of AVX-512, or else 16.
VECTOR, ROWS, MANY = (16, 32, 8) if get_host_cpu_features().get("avx512f") else (8, 16, 6)
FEW = 3

FAST = {"contract", "reassoc", "nsz", "arcp"}
"""How floating-point arithmetic may be rearranged; infinities and NaN keep their meaning."""

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
