"""The packed layout of the compiled routing loops, to and fro. See `loops.py` for what
it is good for.
"""

from __future__ import annotations

from typing import Any

import numba
from torch import Tensor

from cimage_dist.nn.kernels.cpu.loops import add_row, fill, make_unit, normalise_grad
from cimage_dist.nn.kernels.cpu.simd import LANES, load, pointer, store, transpose
from cimage_dist.nn.kernels.cpu.threads import run_parts

_compiled: Any = numba.njit(cache=True, error_model="numpy", nogil=True)


@_compiled
def turn(
    source_array: Any,
    source_row: int,
    target_array: Any,
    target_row: int,
    num_factors: int,
    channels: int,
    packs: bool,
) -> None:
    """One row from [K, C] to [K / LANES, C, LANES] (`packs`), or back."""
    source, target = pointer(source_array), pointer(target_array)
    blocks = -(-num_factors // LANES)
    plain_row, packed_row = (source_row, target_row) if packs else (target_row, source_row)
    plain, packed = plain_row * num_factors * channels, packed_row * blocks * channels * LANES
    whole = channels // LANES * LANES
    for block in range(num_factors // LANES):
        a, b = plain + block * LANES * channels, packed + block * channels * LANES
        for c in range(0, whole, LANES):
            i, j, step = (
                (a + c, b + c * LANES, channels) if packs else (b + c * LANES, a + c, LANES)
            )
            n = LANES if packs else channels
            r = transpose(
                (
                    load(source, i),
                    load(source, i + step),
                    load(source, i + 2 * step),
                    load(source, i + 3 * step),
                    load(source, i + 4 * step),
                    load(source, i + 5 * step),
                    load(source, i + 6 * step),
                    load(source, i + 7 * step),
                )
            )
            store(target, j, r[0])
            store(target, j + n, r[1])
            store(target, j + 2 * n, r[2])
            store(target, j + 3 * n, r[3])
            store(target, j + 4 * n, r[4])
            store(target, j + 5 * n, r[5])
            store(target, j + 6 * n, r[6])
            store(target, j + 7 * n, r[7])
    for k in range(num_factors):
        for c in range(whole if k < num_factors // LANES * LANES else 0, channels):
            i, j = (
                plain + k * channels + c,
                packed + ((k // LANES) * channels + c) * LANES + k % LANES,
            )
            if packs:
                target[j] = source[i]
            else:
                target[i] = source[j]


@_compiled
def _pack(x_NKC: Any, unit: bool, out: Any, inverse: Any, part: int, parts: int) -> None:
    """A part of the rows to the packed layout; with `unit` each factor divided by max(‖x‖, ε), and
    by what it was multiplied.
    """
    num_rows, num_factors, channels = x_NKC.shape
    blocks = -(-num_factors // LANES)
    size, width = blocks * channels * LANES, blocks * LANES
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        if num_factors % LANES:
            fill(pointer(out), row * size, size, 0.0)
        turn(x_NKC, row, out, row, num_factors, channels, True)
        if unit:
            make_unit(pointer(out), row * size, pointer(inverse), row * width, channels, blocks)


@_compiled
def unpack_grad(grads: Any, rows: Any, inverse: Any, out_NKC: Any, part: int, parts: int) -> None:
    """A part of the rows of the gradient of l, the sum of `grads` (packed, and overwritten), to
    that of x where l = x / max(‖x‖, ε); `inverse` is empty where l = x.
    """
    num_rows, num_factors, channels = out_NKC.shape
    blocks = -(-num_factors // LANES)
    size, width = blocks * channels * LANES, blocks * LANES
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        at, grad = row * size, pointer(grads[0])
        for other in range(1, grads.shape[0]):
            add_row(grad, at, pointer(grads[other]), at, size)
        if inverse.size:
            normalise_grad(
                grad,
                at,
                pointer(rows),
                at,
                pointer(inverse),
                row * width,
                grad,
                at,
                channels,
                blocks,
            )
        turn(grads[0], row, out_NKC, row, num_factors, channels, False)


def aligned(size: int, like: Tensor) -> Any:
    """Flat and aligned to whole cache lines, which numpy's own memory is not."""
    return like.new_empty(size).numpy()


def pack(x_NKC: Tensor, unit: bool, parts: int) -> tuple[Any, Any]:
    """Packed rows, and the inverse length of every factor when they are made unit."""
    num_rows, num_factors, channels = x_NKC.shape
    width = -(-num_factors // LANES) * LANES
    out, inverse = (
        aligned(num_rows * width * channels, x_NKC),
        aligned(num_rows * width if unit else 0, x_NKC),
    )
    x = x_NKC.detach().contiguous().numpy()
    run_parts(lambda part: _pack(x, unit, out, inverse, part, parts), parts)
    return out, inverse
