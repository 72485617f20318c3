"""The state of training: how to advance it by a step, and how to save and restore it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler
from torch.torch_version import TorchVersion

from cimage_dist import keyed
from cimage_dist.ci.hsic import HsicStats
from cimage_dist.comm import Comm
from cimage_dist.config import Config, OptimConfig
from cimage_dist.data.sparse import rows_at
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.storage import return_freed_memory
from cimage_dist.nn.model import Adam, build_model, needs_moments, norm_kind
from cimage_dist.nn.projection import BatchNorm, compact, placed, settle
from cimage_dist.train.refresh import (
    Embedder,
    FullEmbedder,
    Refresher,
    SampledEmbedder,
    redrawn_scores,
)
from cimage_dist.train.step import (
    Batches,
    FullGraphBatches,
    SampledBatches,
    edge_share,
    train_edges,
    train_step,
)
from cimage_dist.train.teleport import fit_to_graph
from cimage_dist.types import Batch, CIScores, Features, Topology

# The option has another name since torch 2.13.
_UNSHARED_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if TorchVersion(torch.__version__) >= "2.13"
    else "broadcast_buffers": False
}
_SETTLE_ROWS = 100_000  # of a sampled run: enough for a mean and a variance per channel


def pick_device(cfg: Config) -> torch.device:
    if cfg.resources.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "resources.device is 'cuda' but torch sees no CUDA device. Use "
            "resources.device=cpu, or see `cimage doctor`."
        )
    use_cuda = cfg.resources.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def make_schedule(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, total_steps: int
) -> LRScheduler:
    """optim.schedule=cosine: lr_min + (lr_max - lr_min)·(1 + cos(π·step/total))/2, a function of
    the step alone; else with restarts.
    """
    if optim.schedule == "restarts":
        return CosineAnnealingWarmRestarts(optimizer, optim.t0_steps, optim.t_mult, optim.lr_min)
    floor = optim.lr_min / optim.lr_max

    def share(step: int) -> float:
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(step / total_steps, 1.0))) / 2

    return LambdaLR(optimizer, share)


def follow(scheduler: LambdaLR) -> None:
    """Set the rate that the schedule has at its step, whatever it was when the state was saved.

    Only a run that became longer, or took over another's weights, sees a difference.
    """
    rates = [
        base * share(scheduler.last_epoch)
        for base, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


class Trainer:
    """Everything that changes during training, how to advance it by a step, and how to save and
    restore it.
    """

    def __init__(self, cfg: Config, graph: Graph, topology: Topology, comm: Comm) -> None:
        if topology.num_edges == 0:
            raise UserError(f"Graph {graph.name!r} has no edges to train on.")
        self.cfg = cfg = fit_to_graph(cfg, graph, topology, comm)
        self.graph, self.topology, self.comm = graph, topology, comm
        self.device = pick_device(cfg)
        moments = graph.feature_moments() if needs_moments(cfg) else None
        self.model = build_model(graph.num_features, cfg, moments).to(
            self.device, torch.get_default_dtype()
        )
        del moments
        return_freed_memory()  # of moments and principal directions
        if cfg.resources.compile:
            for part in (self.model.structure, self.model.factors):
                if part is not None:
                    part.compile()
        self.batches, self.embedder, self.clean = self._data()
        self.wrapped: nn.Module = self.model
        if comm.world > 1:
            norm = self.model.encoder.norm
            if cfg.sampler.fanouts and isinstance(norm, BatchNorm):
                norm.reduce = comm.grad_sum
            # Buffers are constant, or the same function of weights and rows on each rank (settle).
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.model, process_group=comm.group, **_UNSHARED_BUFFERS
            )
        optim = cfg.optim
        self.optimizer = Adam(
            self._groups(), lr=optim.lr_max, weight_decay=optim.weight_decay, fused=True
        )
        per_epoch, passes = self.batches.steps_per_epoch, optim.schedule_epochs
        self.total_batches = cfg.total_batches(per_epoch)
        self.total_steps = cfg.total_steps(per_epoch)
        decay = math.ceil(passes * per_epoch / cfg.train.accumulate) or self.total_steps
        self.scheduler = make_schedule(self.optimizer, optim, decay)
        self.refresher: Refresher | None = None
        self.scores: CIScores | None = None
        self.step = 0
        self.best_score = -math.inf
        self.best_step = 0

    def _groups(self) -> list[dict[str, Any]]:
        """The parameters with their rates: the edge factors and their decoder learn faster."""
        fast = self.model.edge_parameters()
        if not fast:
            return [{"params": list(self.model.parameters())}]
        known = {id(weight) for weight in fast}
        slow = [weight for weight in self.model.parameters() if id(weight) not in known]
        return [{"params": slow}, {"params": fast, "lr": self.cfg.optim.edge_lr}]

    def _data(self) -> tuple[Batches, Embedder, Features]:
        """Batches, the embedder, and the features [n, F] that batch normalisation settles on."""
        cfg, rows = self.cfg, self.graph.x
        if cfg.sampler.fanouts:
            batches = SampledBatches(rows, self.topology, cfg, self.comm, self.device)
            embedder = SampledEmbedder(rows, self.topology, cfg, self.device)
            return batches, embedder, self._some_rows()
        x = compact(placed(self.graph.rows(), self.device, torch.get_default_dtype()))
        return FullGraphBatches(x, self.topology, cfg, self.comm), FullEmbedder(x, self.topology), x

    def _some_rows(self) -> Features:
        """A keyed sample of the features, the same on every rank; empty if no norm needs it."""
        if norm_kind(self.cfg) != "batch":
            return torch.empty(0, self.graph.num_features)
        key, nodes = keyed.stream(self.cfg.run.seed, "refresh-sample", -1), self.graph.num_nodes
        chosen = keyed.below(key, _SETTLE_ROWS / nodes, 0, nodes)
        return rows_at(self.graph.x, chosen.numpy())

    def settle(self) -> None:
        """Collective: give batch normalisation the moments of the clean features under the current
        weights, and edge factors the length that their loss earns them.

        Called before anything that runs the encoder in eval mode or stores it; training steps
        neither read nor change these. The same on every rank, as weights and rows are.
        """
        encoder = self.model.encoder
        settle(encoder.norm, encoder.linear, self.clean)
        if encoder.edges is not None:
            self.model.eval()
            with torch.no_grad():
                share = edge_share(self.model, self.batches.measuring_batch(), self.cfg)
            encoder.weigh_edge_factors(float(self.comm.sum(share)))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.settle()
        slots, groups = checkpoint.pack_optimizer(self.optimizer)
        tensors = checkpoint.pack_model(self.model) | slots
        meta: dict[str, Any] = {
            "optimizer": groups,
            "scheduler": self.scheduler.state_dict(),
            "best": None,
            "scores": None,
        }
        if self.best_step:
            meta["best"] = {"score": self.best_score, "step": self.best_step}
        if self.scores is not None:
            found, meta["scores"] = checkpoint.pack_record("scores", self.scores)
            tensors |= found
            meta["refresh_failures"] = self.refresher.failures if self.refresher else 0
        if self.refresher is not None and self.refresher.average is not None:
            found, meta["average"] = checkpoint.pack_record("average", self.refresher.average)
            tensors |= found
        return tensors, meta

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        checkpoint.unpack_model(self.model, saved.tensors, saved.path)
        self.model.encoder.follow_weights()
        checkpoint.unpack_optimizer(self.optimizer, saved.tensors, saved.meta["optimizer"])
        self.scheduler.load_state_dict(saved.meta["scheduler"])
        if isinstance(self.scheduler, LambdaLR):
            follow(self.scheduler)
        if saved.meta["best"]:
            self.best_score, self.best_step = (
                saved.meta["best"]["score"],
                saved.meta["best"]["step"],
            )
        if saved.meta["scores"]:
            plain = saved.meta["scores"]
            self.scores = checkpoint.unpack_record(CIScores, "scores", saved.tensors, plain)
            if self.refresher is not None:
                self.refresher.failures = saved.meta["refresh_failures"]
        if self.refresher is not None and saved.meta.get("average"):
            plain = saved.meta["average"]
            found = checkpoint.unpack_record(HsicStats, "average", saved.tensors, plain)
            self.refresher.average = found
        self.step = saved.step

    def is_refresh_due(self) -> bool:
        return self.cfg.loss.uses_partition and self.step % self.cfg.ci.every_steps == 0

    def refresh(self) -> dict[str, Any] | None:
        """Collective: rebuild the partition when it is due; what to log, or None."""
        if not self.is_refresh_due():
            return None
        if self.cfg.ci.partition == "random_redrawn":
            self.scores, metrics = redrawn_scores(self.cfg, self.step, self.scores)
            return metrics
        if self.refresher is None:
            return None
        self.settle()
        self.scores, metrics = self.refresher(self.model.encoder, self.step, self.scores)
        return metrics

    def advance(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Collective: one optimiser step on train.accumulate batches, after those of the edge
        factors alone.
        """
        self.model.train()
        if self.model.encoder.edges is not None:
            alone = self.batches.edge_batches(self.step)
            train_edges(self.model, self.optimizer, alone, self.step, self.cfg, self.comm)
        first = self.step * self.cfg.train.accumulate
        terms = train_step(
            self.wrapped,
            self.optimizer,
            self.scheduler,
            batches,
            first,
            self.cfg,
            self.scores,
            self.comm,
        )
        self.step += 1
        return terms

    def remaining(self) -> Iterator[list[Batch]]:
        """The batches of each step to come, as they are made."""
        size = self.cfg.train.accumulate
        batches = self.batches.iterate(self.step * size, self.total_batches)
        while group := list(itertools.islice(batches, size)):
            yield group
