"""Vectors and threads for compiled loops.

Vectors: eight numbers side by side as one value, which the compiler keeps in registers. Left to
itself the compiler vectorises the short inner loops of routing badly: their lengths (factors,
channels) are known only at run time. A vector is a value of numba's own kind here, with loads,
stores, multiply-add and exp; lanes never mix except in the sums and maxima over lanes, so results
do not depend on the width of the machine's registers.

Threads: as many as torch uses, waiting without burning a core. The compiled loops release the
interpreter, so plain threads run them side by side. An OpenMP team would be a little quicker to
start, but its threads wait for each other spinning, which on a shared machine costs many times the
work itself, and starting numba's own team changes the number of threads torch works with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

LANES = 8

# Its values exist in compiled code only, where Python's types say nothing.
intrinsic: Any = extending.intrinsic

_I32 = ir.IntType(32)


class VectorType(types.Type):
    """LANES numbers of one floating type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype}, {LANES})")


@extending.register_model(VectorType)
class _VectorModel(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.VectorType(_element(fe_type), LANES))


def _element(vector: Any) -> Any:
    return ir.FloatType() if vector.dtype is types.float32 else ir.DoubleType()


def _suffix(vector: Any) -> str:
    return f"v{LANES}{'f32' if vector.dtype is types.float32 else 'f64'}"


def _call(
    builder: Any, name: str, result: Any, args: list[Any], flags: tuple[str, ...] = ()
) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args, fastmath=flags)


def _spread(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, _I32(0))
    order = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, nothing, order)


def _constant(vector: Any, value: float) -> Any:
    return ir.Constant(ir.VectorType(_element(vector), LANES), [value] * LANES)


def _address(builder: Any, pointer_type: Any, pointer: Any, index: Any) -> tuple[Any, int]:
    vector = ir.VectorType(_element(pointer_type), LANES).as_pointer()
    align = 4 if pointer_type.dtype is types.float32 else 8
    return builder.bitcast(builder.gep(pointer, [index]), vector), align


@intrinsic
def pointer(typingctx: Any, array: Any) -> Any:
    """Where the data of a contiguous array begins; the array must be kept alive, one made in
    compiled code by `keep`.

    Handed down in place of arrays, which cost a call some forty words and counted references.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def keep(typingctx: Any, array: Any) -> Any:
    """The array lives until here. The compiler frees one after its last use, which a pointer into
    it is not.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def load(typingctx: Any, source: Any, index: Any) -> Any:
    """source[index : index + LANES] from a pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, align = _address(builder, signature.args[0], args[0], args[1])
        return builder.load(address, align=align)

    return VectorType(source.dtype)(source, types.intp), codegen


@intrinsic
def store(typingctx: Any, target: Any, index: Any, vector: Any) -> Any:
    """target[index : index + LANES] = vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, align = _address(builder, signature.args[0], args[0], args[1])
        builder.store(args[2], address, align=align)
        return context.get_dummy_value()

    return types.void(target, types.intp, vector), codegen


@intrinsic
def spread(typingctx: Any, like: Any, scalar: Any) -> Any:
    """The scalar in every lane, in the type that `like` points to."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wanted, given = signature.args
        return _spread(builder, context.cast(builder, args[1], given, wanted.dtype))

    return VectorType(like.dtype)(like, scalar), codegen


@intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, fused where the machine can."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.fmuladd.{_suffix(signature.return_type)}"
        return _call(builder, name, args[0].type, list(args))

    return a(a, b, c), codegen


@intrinsic
def multiply(typingctx: Any, a: Any, b: Any) -> Any:
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def divide(typingctx: Any, a: Any, b: Any) -> Any:
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of each pair of lanes; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">", *args), *args)

    return a(a, b), codegen


@intrinsic
def length(typingctx: Any, square: Any, floor: Any) -> Any:
    """max(√square, floor)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = signature.return_type
        root = _call(builder, f"llvm.sqrt.{_suffix(vector)}", args[0].type, [args[0]])
        low = _spread(builder, context.cast(builder, args[1], signature.args[1], vector.dtype))
        return builder.select(builder.fcmp_unordered(">", root, low), root, low)

    return square(square, floor), codegen


@intrinsic
def zero_above(typingctx: Any, a: Any, test: Any, ceiling: Any) -> Any:
    """a where test < ceiling, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_below = builder.fcmp_ordered("<", args[1], args[2])
        return builder.select(is_below, args[0], _constant(signature.return_type, 0.0))

    return a(a, test, ceiling), codegen


@intrinsic
def lane_sum(typingctx: Any, a: Any) -> Any:
    """The sum over lanes, pairwise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, name = _element(a), f"llvm.vector.reduce.fadd.{_suffix(a)}"
        return _call(builder, name, element, [ir.Constant(element, 0.0), args[0]], ("reassoc",))

    return a.dtype(a), codegen


@intrinsic
def lane_max(typingctx: Any, a: Any) -> Any:
    """The largest lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, f"llvm.vector.reduce.fmax.{_suffix(a)}", _element(a), [args[0]])

    return a.dtype(a), codegen


@intrinsic
def transpose(typingctx: Any, rows: Any) -> Any:
    """LANES vectors as the rows of a square -> its columns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = cgutils.unpack_tuple(builder, args[0])
        # Each round exchanges the off-diagonal halves of all 2w x 2w squares, w = 1, 2, 4.
        for width in (1, 2, 4):
            turned = list(vectors)
            for i in range(LANES):
                if not i & width:
                    low = [j if not j & width else LANES + (j ^ width) for j in range(LANES)]
                    high = [(j ^ width) if not j & width else LANES + j for j in range(LANES)]
                    for place, order in ((i, low), (i | width, high)):
                        mask = ir.Constant(ir.VectorType(_I32, LANES), order)
                        turned[place] = builder.shuffle_vector(vectors[i], vectors[i | width], mask)
            vectors = turned
        return context.make_tuple(builder, signature.return_type, vectors)

    return rows(rows), codegen


# exp on [-ln 2 / 2, ln 2 / 2] as 1 + r + r²·P(r): Cephes' coefficients for single precision,
# highest power first.
_EXP_COEFFICIENTS: tuple[float, ...] = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3)
_EXP_COEFFICIENTS += (4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5·2^23: adding it leaves the nearest integer in the low bits of a single


@intrinsic
def exp(typingctx: Any, a: Any) -> Any:
    """e^a. Single precision: to about 1e-7, arguments in [-87, 0] as a softmax has them (smaller
    ones give e^-87); double: the library's.
    """

    def single(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = signature.return_type
        kind, bits = args[0].type, ir.VectorType(_I32, LANES)

        def fma(x: Any, y: Any, z: Any) -> Any:
            return _call(builder, f"llvm.fmuladd.{_suffix(vector)}", kind, [x, y, z])

        low = _constant(vector, -87.0)
        x = builder.select(builder.fcmp_unordered(">", args[0], low), args[0], low)
        shifted = fma(x, _constant(vector, 1.4426950408889634), _constant(vector, _ROUND))
        n = builder.fsub(shifted, _constant(vector, _ROUND))
        r = fma(n, _constant(vector, -_LN2_LOW), fma(n, _constant(vector, -_LN2_HIGH), x))
        poly = _constant(vector, _EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            poly = fma(poly, r, _constant(vector, coefficient))
        poly = builder.fadd(fma(poly, builder.fmul(r, r), r), _constant(vector, 1.0))
        exponent = builder.shl(builder.bitcast(shifted, bits), ir.Constant(bits, [23] * LANES))
        power = builder.add(exponent, ir.Constant(bits, [0x3F800000] * LANES))
        return builder.fmul(poly, builder.bitcast(power, kind))

    def double(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, f"llvm.exp.{_suffix(signature.return_type)}", args[0].type, [args[0]])

    return a(a), single if a.dtype is types.float32 else double


@intrinsic
def keep_mask(typingctx: Any, like: Any, first: Any, low: Any, high: Any, threshold: Any) -> Any:
    """1 in the lanes where hash(key, first + lane) >= threshold, else 0, in the type `like` points
    to.

    The hash is murmur3's 32-bit finaliser applied twice, the two halves of the key mixed in before
    each; the upper half of the position (uint64) goes with the second.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, vector = ir.VectorType(_I32, LANES), signature.return_type

        def spread(value: int) -> Any:
            return ir.Constant(bits, [value] * LANES)

        def mix(h: Any, shift: int, factor: int) -> Any:
            return builder.mul(builder.xor(h, builder.lshr(h, spread(shift))), spread(factor))

        lanes = ir.Constant(bits, list(range(LANES)))
        position = builder.add(_spread(builder, builder.trunc(args[1], _I32)), lanes)
        upper = builder.trunc(builder.lshr(args[1], ir.Constant(args[1].type, 32)), _I32)
        h = builder.xor(builder.mul(position, spread(0x9E3779B1)), _spread(builder, args[2]))
        h = mix(mix(h, 16, 0x85EBCA6B), 13, 0xC2B2AE35)
        h = builder.add(builder.xor(h, _spread(builder, args[3])), _spread(builder, upper))
        h = mix(mix(h, 16, 0x7FEB352D), 15, 0x846CA68B)
        h = builder.xor(h, builder.lshr(h, spread(16)))
        kept = builder.icmp_unsigned(">=", h, _spread(builder, args[4]))
        return builder.select(kept, _constant(vector, 1.0), _constant(vector, 0.0))

    key = (types.uint32, types.uint32, types.uint32)
    return VectorType(like.dtype)(like, types.uint64, *key), codegen


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork: the process number makes a child start its own.
    return ThreadPoolExecutor(threads, thread_name_prefix="cimage-parts")


def num_parts() -> int:
    return torch.get_num_threads()


def run_parts(work: Callable[[int], object], parts: int) -> None:
    """work(0), ..., work(parts - 1), side by side; returns when all are done."""
    if parts > 1:
        others = [_pool(parts - 1, os.getpid()).submit(work, part) for part in range(1, parts)]
        work(0)
        for other in others:
            other.result()
    else:
        work(0)
