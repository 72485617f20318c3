"""Comm: the only thing the mathematics knows about other processes. At world size 1 every call is
the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cimage_dist.errors import UserError


class _SumWithSumBackward(torch.autograd.Function):
    """All-reduce whose backward is also an all-reduce: d(sum over ranks)/dx on every rank.

    A plain all-reduce with the local term re-attached gives the same value but gradients 1/world
    too small.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].contiguous().clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None


class Comm:
    """Collective operations over a process group; `Comm()` is one process on its own.

    Every method starting with `Collective:` must be called by all ranks in the same order.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.is_distributed = group is not None
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.world = dist.get_world_size(group) if self.is_distributed else 1

    @classmethod
    def from_environment(cls) -> Comm:
        """The default process group where one is initialised, else a single process."""
        return cls(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else cls()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Collective: elementwise sum over ranks, without gradient."""
        if self.world == 1:
            return x.detach()
        out = x.detach().clone()
        dist.all_reduce(out, group=self.group)
        return out

    def grad_sum(self, x: Tensor) -> Tensor:
        """Collective: elementwise sum over ranks whose backward also sums over ranks."""
        return x if self.world == 1 else _SumWithSumBackward.apply(x, self.group)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Collective: concatenate `[n_r, ...]` of all ranks in rank order; the n_r may differ or be
        zero.
        """
        if self.world == 1:
            return x
        count = torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device)
        counts = [torch.empty_like(count) for _ in range(self.world)]
        dist.all_gather(counts, count, group=self.group)
        sizes = [int(c) for c in counts]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def share_rows(self, x: Tensor, total: int) -> Tensor:
        """Collective: `[total, ...]`, of which every rank brings the rows of its `slice_of(total)`;
        nothing but the result is made.
        """
        if self.world == 1:
            return x
        out = x.new_empty((total, *x.shape[1:]))
        for source in range(self.world):
            part = out[total * source // self.world : total * (source + 1) // self.world]
            if source == self.rank:
                part.copy_(x)
            if part.shape[0]:
                dist.broadcast(part, src=dist.get_global_rank(self.group, source), group=self.group)
        return out

    def scatter_rows(self, x: Tensor, total: int) -> Tensor:
        """Collective: this rank's `slice_of(total)` of rank 0's rows `[total, ...]`; others give a
        tensor of the same type and row shape, which need not have rows.
        """
        if self.world == 1:
            return x
        begin, end = self.slice_of(total)
        if not self.is_main:
            own = x.new_empty((end - begin, *x.shape[1:]))
            dist.recv(own, src=dist.get_global_rank(self.group, 0), group=self.group)
            return own
        for rank in range(1, self.world):
            part = x[total * rank // self.world : total * (rank + 1) // self.world]
            dist.send(part.contiguous(), dist.get_global_rank(self.group, rank), group=self.group)
        return x[begin:end]

    def from_main(self, make: Callable[[], Any]) -> Any:
        """Collective: what `make` gives on rank 0, which alone calls it, as a small picklable
        object on every rank. A mistake of the user that rank 0 finds is raised on all of them.
        """
        found: Any = None
        complaint: str | None = None
        if self.is_main:
            try:
                found = make()
            except UserError as error:
                complaint = str(error)
        found, complaint = self.broadcast_object((found, complaint))
        if complaint is not None:
            raise UserError(complaint)
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Collective: the tensor of rank `source`, on every rank (same shape and dtype
        everywhere).
        """
        if self.world == 1:
            return x
        out = x.detach().clone()
        dist.broadcast(out, src=dist.get_global_rank(self.group, source), group=self.group)
        return out

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Collective: a small picklable object of rank `source`, on every rank of this same job."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(
            box, src=dist.get_global_rank(self.group, source), group=self.group
        )
        return box[0]

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.group)

    def slice_of(self, total: int) -> tuple[int, int]:
        """This rank's contiguous share [begin, end) of `total` items; sizes differ by one at
        most.
        """
        return total * self.rank // self.world, total * (self.rank + 1) // self.world

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, world={self.world})"
