"""One process that plays one rank of a large world: collectives answer at once, as if every rank
held what this one holds, and are recorded.

A few real training steps of one rank on a small made-up graph: which collectives they need and what
they keep in memory.
"""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.build import csc_in_memory
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.data.store import Graph
from cimage_dist.errors import Interrupted
from cimage_dist.nn.inference import encode_graph, num_stages
from cimage_dist.nn.projection import compact, placed
from cimage_dist.train.loop import worker
from cimage_dist.train.refresh import random_scores
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import Batch, EdgeList, SparseRows, View


class Call(NamedTuple):
    """A collective as the network sees it: `size` bytes that each rank puts in."""

    operation: str
    size: int
    dtype: str


def call_of(operation: str, x: Tensor) -> Call:
    return Call(operation, x.numel() * x.element_size(), str(x.dtype).removeprefix("torch."))


class FakeComm(Comm):
    """Rank `rank` of `world_size` equal ranks: a sum is `world_size` times the input, a gather
    repeats it. Results have the right shapes and types.

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

    def share_rows(self, x: Tensor, total: int) -> Tensor:
        for _ in range(self.world):
            self._record("broadcast", x)
        return x if self.world == 1 else x[:1].repeat(total, *[1] * (x.dim() - 1))

    def scatter_rows(self, x: Tensor, total: int) -> Tensor:
        begin, end = self.slice_of(total)
        for _ in range(1, self.world):
            self._record("send", x[begin:end])
        return x[begin:end]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._record("broadcast", x)
        return x.detach().clone()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        self._record("broadcast", torch.empty(0))  # its pickled size is known to the sender only
        return value

    def barrier(self) -> None:
        self._record("barrier", torch.empty(0))


def record_gradients(wrapped: nn.Module, calls: list[Call]) -> None:
    """Note every bucket of gradients that DistributedDataParallel would reduce, and leave it as it
    is.
    """
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)

    def done(bucket: Any) -> torch.futures.Future[Tensor]:
        calls.append(call_of("all_reduce", bucket.buffer()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # A lambda, because DistributedDataParallel reads annotations and does not resolve postponed
    # ones.
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


Rows = dict[str, float]
SECOND = ", second view"

_SEED = 0
_FULL_NODES, _SAMPLED_NODES, _DEGREE = 500, 4000, 16
# Few enough that the hops of a sampled batch have different sizes on so small a graph.
_EDGES_PER_RANK = 5
# A refresh falls before the first and before the fifth step: the third is a plain one, the fifth
# has the refresh beside it.
_REFRESH_EVERY, _PLAIN, _REFRESHED, _STEPS = 4, 3, 5, 6


@dataclass(frozen=True)
class RowBytes:
    """Bytes per row of tensors by what their rows are (a key of `Rows`): all together, and of the
    widest. `constant`: of tensors without such rows.
    """

    per_row: Mapping[str, float]
    widest: Mapping[str, float]
    constant: float

    def at(self, rows: Rows) -> float:
        return self.constant + sum(size * rows[kind] for kind, size in self.per_row.items())

    def widest_at(self, rows: Rows) -> float:
        return max((size * rows[kind] for kind, size in self.widest.items()), default=0.0)


@dataclass(frozen=True)
class Played:
    """What the played rank did. `step` and `refresh`: collectives of a plain step and of a refresh;
    `kept`: tensors saved between the passes; `row_s`, `message_s`: CPU seconds of this processor to
    project a row of features and to send a message through one layer, without gradients.
    """

    parameters: int
    model_bytes: int
    checkpoint_bytes: int
    step: list[Call]
    refresh: list[Call]
    batch: RowBytes
    kept: RowBytes
    row_s: float
    message_s: float


def play(
    cfg: Config,
    num_features: int,
    num_clusters: int,
    rows: Rows,
    entries_per_node: float | None = None,
) -> Played:
    """Play rank 0, which does all that others do and hands out the labels. `rows`: the real sizes,
    which decide between kinds of equal size. `entries_per_node` of sparse features; None: dense.
    """
    world = cfg.resources.num_workers
    small = _small(cfg, num_clusters)
    nodes = max(_SAMPLED_NODES if cfg.sampler.fanouts else _FULL_NODES, 2 * world)
    entries = None if entries_per_node is None else max(1, round(entries_per_node))
    graph = _graph(nodes, num_features, num_clusters, entries)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), fake_comm(world) as comm:
        # Remarks of torch belong to a real run; scores of a made-up graph mean nothing.
        for kind in (FutureWarning, RuntimeWarning):
            warnings.simplefilter("ignore", kind)
        cuts = _collectives(small, graph, num_clusters, comm)
        # The updates of the edge factors before a step keep nothing for its backward pass.
        alone = replace(small, optim=replace(small.optim, edge_steps=1))
        trainer = Trainer(alone, graph, graph.topology(), comm)
        gradients, batch, kept = _one_step(trainer, rows)
        speed = _encoding_speed(trainer, graph)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    saved, _ = trainer.state()
    refresh = list((Counter(cuts[_REFRESHED - 1]) - Counter(cuts[_PLAIN - 1])).elements())
    sizes = (parameters, _bytes(tensors), _bytes(saved.values()))
    return Played(*sizes, [*cuts[_PLAIN - 1], *gradients], refresh, batch, kept, *speed)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _small(cfg: Config, num_clusters: int) -> Config:
    """The same model, objective and world on a batch of a few edges per rank, on this processor."""
    edges, epochs = _EDGES_PER_RANK * cfg.resources.num_workers, _STEPS * cfg.train.accumulate
    whole: dict[str, Any] = {"batch_edges": 2**31, "validate_every": 0, "select": "last"}
    # Which solver and penalty makes no difference to what is sent; this one is quick.
    quick: dict[str, Any] = {"diagnose_every": 2, "solver": "nnlasso", "lam": 1e-3}
    return replace(
        cfg,
        data=replace(cfg.data, holdout_edges="none"),
        sampler=replace(cfg.sampler, batch_edges=edges, loader_processes=0, backend="csr"),
        cluster=replace(cfg.cluster, num_clusters=num_clusters),
        ci=replace(cfg.ci, every_steps=_REFRESH_EVERY, **quick),
        train=replace(cfg.train, steps=None, epochs=epochs, **whole),
        run=replace(cfg.run, checkpoint_every=2**31, log_every=2**31),
        resources=replace(cfg.resources, device="cpu", compile=False, threads=0),
    )


def _graph(num_nodes: int, num_features: int, num_classes: int, entries: int | None) -> Graph:
    """Random edges and features, these with so many `entries` in a row or dense."""
    key = keyed.derive(_SEED, 1)
    ends = keyed.integers(key, torch.arange(num_nodes * _DEGREE), num_nodes).view(2, -1).numpy()
    indptr, indices, _ = csc_in_memory(num_nodes, ends[0], ends[1])
    shape = (num_nodes, num_features if entries is None else entries)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED)).numpy()
    x: np.ndarray | CsrFeatures = values
    if entries is not None:
        stride = num_features // entries
        columns = np.arange(entries) * stride + np.arange(num_nodes)[:, None] % stride
        pointers = np.arange(0, values.size + 1, entries)
        x = CsrFeatures(
            pointers, columns.ravel(), values.ravel(), None, None, num_features, np.float32
        )
    return Graph("plan", indptr, indices, x, np.arange(num_nodes) % max(num_classes, 1))


class _PlanSink(MemorySink):
    """Hands out made-up initial labels, notes which collectives belong to which step, and asks to
    stop after a few.
    """

    def __init__(self, comm: FakeComm, num_nodes: int, num_clusters: int) -> None:
        super().__init__()
        self.comm = comm
        self.stored["pseudo-labels"] = {
            "labels": torch.arange(num_nodes) % max(num_clusters, 2),
            "confidence": torch.ones(num_nodes, dtype=torch.float64),
        }
        self.cuts: list[list[Call]] = []

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        self.cuts.append(list(self.comm.calls))
        self.comm.calls.clear()

    def stop_signal(self) -> int:
        return signal.SIGINT if len(self.cuts) >= _STEPS else 0


def _collectives(cfg: Config, graph: Graph, num_clusters: int, comm: FakeComm) -> list[list[Call]]:
    """The calls between one step's end and the next's, by the real worker."""
    sink = _PlanSink(comm, graph.num_nodes, num_clusters)
    with contextlib.suppress(Interrupted):  # as asked
        worker(cfg, comm, sink, graph)
    return sink.cuts


def _one_step(trainer: Trainer, rows: Rows) -> tuple[list[Call], RowBytes, RowBytes]:
    """Gradient buckets of a settled step, the tensors of its batch, and what its forward pass keeps
    for the backward pass.
    """
    if trainer.cfg.loss.uses_partition:
        trainer.scores = random_scores(trainer.cfg.model.num_factors, _SEED)
    gradients: list[Call] = []
    if trainer.comm.world > 1:
        record_gradients(trainer.wrapped, gradients)
    batches = trainer.remaining()
    # After it the buckets are built again, in the order in which gradients came.
    trainer.advance(next(batches))
    gradients.clear()
    batch = next(batches)[0]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.advance([batch])
    own = batch_tensors(batch)
    elsewhere = {
        t.untyped_storage().data_ptr()
        for t in [*trainer.model.parameters(), *trainer.model.buffers(), *own]
    }
    played = rows_of(batch)
    made = [tensor for pointer, tensor in kept.items() if pointer not in elsewhere]
    return gradients, _by_row(own, played, rows), _by_row(made, played, rows)


def _encoding_speed(trainer: Trainer, graph: Graph) -> tuple[float, float]:
    """CPU seconds per row and per message; the second of two passes counts, after all that is
    compiled or read once.
    """
    encoder, topology = trainer.model.encoder.eval(), graph.topology()
    x = compact(graph.rows())
    for _ in range(2):
        began = time.process_time()
        with torch.no_grad():
            encoder.project(placed(x, torch.device("cpu"), torch.get_default_dtype()))
        projected = time.process_time()
        encode_graph(encoder, x, topology)
        ended = time.process_time()
    in_layers = max(ended - projected - (projected - began), 0.0)
    sent = num_stages(encoder.cfg) * (topology.num_edges + topology.num_nodes)
    return (projected - began) / topology.num_nodes, in_layers / sent


def _seen(view: View) -> list[Tensor | None]:
    """The tensors that the encoder sees."""
    x = [view.x.row, view.x.column, view.x.value] if isinstance(view.x, SparseRows) else [view.x]
    edges = (getattr(view.edges, f.name) for f in fields(EdgeList) if f.name != "num_nodes")
    return [*x, *edges, view.nodes, view.gids]


def batch_tensors(batch: Batch) -> list[Tensor]:
    second = [] if batch.second is None else _seen(batch.second)
    tensors = [*_seen(batch), batch.pairs, batch.weight, batch.node_weight, *second]
    return list({t.untyped_storage().data_ptr(): t for t in tensors if t is not None}.values())


def rows_of(batch: Batch) -> Rows:
    """How many rows tensors of each kind have. With hops the kinds are numbered by the distance
    from a seed up to which they reach.
    """
    endpoints, second = batch.nodes.numel(), batch.second
    rows: Rows = {"pairs": len(batch.pairs), "positives": batch.num_pos, "endpoints": endpoints}
    for view, name in ((batch, ""), (second, SECOND)):
        if view is not None and isinstance(view.x, SparseRows):
            rows[f"entries{name}"] = view.x.value.numel()
    if batch.hops is None:
        own_edges = 0 if batch.modularity is None else batch.modularity.src.numel()
        rows |= {"nodes": batch.x.shape[0], "messages": batch.edges.src.numel()}
        rows["own messages"] = own_edges
        return rows if second is None else rows | {f"messages{SECOND}": second.edges.src.numel()}
    rows |= hop_rows(batch.hops.nodes, batch.hops.messages)
    if second is None or second.hops is None:
        return rows
    return rows | hop_rows(second.hops.nodes, second.hops.messages, SECOND)


def hop_rows(nodes: Iterable[float], messages: Iterable[float], view: str = "") -> Rows:
    """Rows up to each distance from a seed; `view`: what is added to the names of the kinds."""
    return {
        f"{kind} within {depth}{view}": float(total)
        for kind, counts in (("nodes", nodes), ("messages", messages))
        for depth, total in enumerate(np.cumsum(list(counts)))
    }


def _by_row(tensors: Iterable[Tensor], played: Rows, real: Rows) -> RowBytes:
    """Sort tensors by the length of their first dimension; of several kinds of the same length the
    one that is largest in reality counts.
    """
    per_row: dict[str, float] = {}
    widest: dict[str, float] = {}
    constant = 0.0
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        length = tensor.shape[0] if tensor.dim() else 0
        # Row pointers have one entry more than rows.
        kinds = [kind for kind, n in played.items() if n > 1 and length in (n, n + 1)]
        if kinds:
            kind = max(kinds, key=lambda name: real[name])
            per_row[kind] = per_row.get(kind, 0.0) + size / length
            widest[kind] = max(widest.get(kind, 0.0), size / length)
        else:
            constant += size
    return RowBytes(per_row, widest, constant)
