"""One process that plays one rank of a large world: collectives answer at once, as if every rank held what this one holds, and are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cimage_dist.comm import Comm


class Call(NamedTuple):
    """A collective as the network sees it: `size` bytes that each rank puts in."""

    operation: str
    size: int
    dtype: str


def call_of(operation: str, x: Tensor) -> Call:
    return Call(operation, x.numel() * x.element_size(), str(x.dtype).removeprefix("torch."))


class FakeComm(Comm):
    """Rank `rank` of `world_size` equal ranks: a sum is `world_size` times the input, a gather repeats it. Results have the right shapes and types.

    `group` is the one-process group that DistributedDataParallel asks for.
    """

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.group = group
        self.is_distributed = group is not None
        self.rank, self.world = rank, world_size
        self.calls: list[Call] = []

    def _record(self, operation: str, x: Tensor) -> None:
        if self.world > 1:
            self.calls.append(call_of(operation, x))

    def sum(self, x: Tensor) -> Tensor:
        self._record("all_reduce", x)
        return x.detach() * self.world

    def grad_sum(self, x: Tensor) -> Tensor:
        self._record("all_reduce", x)
        out = x * self.world
        if out.requires_grad:
            out.register_hook(lambda grad: self._record("all_reduce", grad))
        return out

    def gather_rows(self, x: Tensor) -> Tensor:
        self._record("all_gather", torch.empty(1, dtype=torch.int64))
        self._record("all_gather", x)
        return x if self.world == 1 else x.repeat(self.world, *[1] * (x.dim() - 1))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._record("broadcast", x)
        return x.detach().clone()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        self._record("broadcast", torch.empty(0))  # its pickled size is known to the sender only
        return value

    def barrier(self) -> None:
        self._record("barrier", torch.empty(0))


def record_gradients(wrapped: nn.Module, calls: list[Call]) -> None:
    """Note every bucket of gradients that DistributedDataParallel would reduce, and leave it as it is."""
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)

    def done(bucket: Any) -> torch.futures.Future[Tensor]:
        calls.append(call_of("all_reduce", bucket.buffer()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # A lambda, because DistributedDataParallel reads annotations and does not resolve postponed ones.
    wrapped.register_comm_hook(None, lambda state, bucket: done(bucket))


@contextlib.contextmanager
def fake_comm(world_size: int) -> Iterator[FakeComm]:
    """Rank 0 of `world_size`, with a process group of this process alone, ended afterwards."""
    if world_size == 1:
        yield FakeComm(0, 1)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield FakeComm(0, world_size, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
