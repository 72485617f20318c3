"""A keyed permutation of [0, m) evaluated point by point, so that an epoch's order never has to be stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cimage_dist import keyed

# Four rounds already make a Feistel network pseudo-random (Luby & Rackoff 1988); on domains of a few dozen points the halves are
# two or three bits wide and more rounds are needed before the order of the first few outputs passes a chi-square test.
_ROUNDS = 8


class Bijection:
    """x -> pi(x), a permutation of [0, size) chosen by `key`; memory is that of the positions asked for.

    A balanced Feistel network permutes [0, 4^h) with 4^h >= size > 4^(h-1); positions that land outside [0, size) are sent through
    again until they land inside (cycle walking), which keeps the map one-to-one. At most 4 passes are expected per position.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"a bijection needs a size between 1 and 2^62, not {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [keyed.derive(key, i) for i in range(_ROUNDS)]

    def __call__(self, positions: Tensor) -> Tensor:
        """The ids at `positions`, both int64 in [0, size), any shape."""
        return self._walk(positions, self._forward)

    def inverse(self, ids: Tensor) -> Tensor:
        """The positions at which `ids` come up."""
        return self._walk(ids, self._backward)

    def _forward(self, x: Tensor) -> Tensor:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (keyed.bits(key, right) & self._mask)
        return (left << self._half) | right

    def _backward(self, x: Tensor) -> Tensor:
        left, right = x >> self._half, x & self._mask
        for key in reversed(self._keys):
            left, right = right ^ (keyed.bits(key, left) & self._mask), left
        return (left << self._half) | right

    def _walk(self, x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= self.size):
            raise ValueError(f"positions must lie in [0, {self.size})")
        out = step(x.to(torch.int64).reshape(-1))
        outside = (out >= self.size).nonzero().squeeze(1)
        while outside.numel():
            moved = step(out[outside])
            out[outside] = moved
            outside = outside[moved >= self.size]
        return out.reshape(x.shape)

    def __repr__(self) -> str:
        return f"Bijection(size={self.size})"
