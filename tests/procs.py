"""Run a function on several ranks, each a spawned process on this machine, and collect what each
returned.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cimage_dist.comm import Comm

PATIENCE_S = 600.0  # against a hang only: no test may fail because its machine is busy


def wait_for_children(before: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Until this process has no children but those of `before`: one that was asked to end may be
    there for a while.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not set(multiprocessing.active_children()) <= set(before):
        assert time.monotonic() < deadline, multiprocessing.active_children()
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _child(
    rank: int,
    world: int,
    port: int,
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    queue: Any,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, rank=rank, world_size=world)
        result = fn(Comm.from_environment(), *args)
        dist.barrier()
        dist.destroy_process_group()
        queue.put((rank, result, None))
    except Exception:
        queue.put((rank, None, traceback.format_exc()))


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = PATIENCE_S,
    backend: str = "gloo",
) -> list[Any]:
    """`[fn(comm, *args) of rank 0, of rank 1, ...]`. `fn` must be a module-level function; a
    failing rank's traceback is raised here.

    Return numpy arrays or plain values: torch tensors would travel through shared memory that dies
    with the child.
    """
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = _free_port()
    children = [
        context.Process(
            target=_child, args=(rank, world, port, backend, fn, args, queue), daemon=True
        )
        for rank in range(world)
    ]
    for child in children:
        child.start()
    results: dict[int, Any] = {}
    try:
        for _ in children:
            rank, value, error = queue.get(timeout=timeout)
            if error:
                raise AssertionError(f"rank {rank} of {world} failed:\n{error}")
            results[rank] = value
    finally:
        for child in children:
            child.join(timeout=30)
            if child.is_alive():
                child.kill()
                child.join()
    return [results[rank] for rank in range(world)]
