"""The worker: the same loop in one process, under Ray, or inside a sweep's trial. It knows a Comm and a Sink, nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cimage_dist import checkpoint
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.graph.holdout import training_graph
from cimage_dist.graph.store import Graph
from cimage_dist.nn.model import CimageModel, build_model, norm_kind
from cimage_dist.train.batches import FullGraphBatches
from cimage_dist.train.sink import Sink
from cimage_dist.train.step import objective, train_step

# Scores a model by validation data only; higher is better. None where the graph has nothing to validate on.
Validator = Callable[[CimageModel], dict[str, float]]


def pick_device(cfg: Config) -> torch.device:
    if cfg.resources.device == "cuda" and not torch.cuda.is_available():
        raise UserError("resources.device is 'cuda' but torch sees no CUDA device. Use resources.device=cpu, or see `cimage doctor`.")
    use_cuda = cfg.resources.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


class Trainer:
    """Everything that changes during training, and how to save and restore it."""

    def __init__(self, cfg: Config, graph: Graph, comm: Comm) -> None:
        self.cfg, self.comm = cfg, comm
        self.device = pick_device(cfg)
        topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
        if topology.num_edges == 0:
            raise UserError(f"Graph {graph.name!r} has no edges to train on.")
        moments = graph.feature_moments() if norm_kind(cfg) == "moments" else None
        self.model = build_model(graph.num_features, cfg, moments).to(self.device)
        self.batches = FullGraphBatches(graph.features().to(self.device, torch.get_default_dtype()), topology, cfg, comm)
        self.wrapped: nn.Module = self.model
        if comm.world > 1:
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, process_group=comm.group)
        optim = cfg.optim
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=optim.lr_max, weight_decay=optim.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, optim.t0_steps, optim.t_mult, optim.lr_min)
        self.step = 0
        self.best_score = -math.inf
        self.best_step = 0

    @property
    def total_steps(self) -> int:
        return self.cfg.train.epochs * self.batches.steps_per_epoch

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        slots, groups = checkpoint.pack_optimizer(self.optimizer)
        best = None if self.best_step == 0 else {"score": self.best_score, "step": self.best_step}
        return checkpoint.pack_model(self.model) | slots, {"optimizer": groups, "scheduler": self.scheduler.state_dict(), "best": best}

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        checkpoint.unpack_model(self.model, saved.tensors, saved.path)
        checkpoint.unpack_optimizer(self.optimizer, saved.tensors, saved.meta["optimizer"])
        self.scheduler.load_state_dict(saved.meta["scheduler"])
        if saved.meta["best"]:
            self.best_score, self.best_step = saved.meta["best"]["score"], saved.meta["best"]["step"]
        self.step = saved.step

    def advance(self) -> dict[str, Tensor]:
        """Collective: one optimiser step."""
        self.model.train()
        batch = self.batches.batch(self.step)
        terms = train_step(self.wrapped, self.optimizer, self.scheduler, batch, self.step, self.cfg, self.comm)
        self.step += 1
        return terms | {"edges": torch.tensor(float(batch.global_pos))}


def worker(cfg: Config, comm: Comm, sink: Sink, graph: Graph, validate: Validator | None = None) -> Trainer:
    """Collective: train to the last step, resuming from the sink's newest checkpoint.

    Raises Interrupted after saving when a signal asked to stop, and UserError when a loss stops being finite (the last good
    checkpoint stays).
    """
    if cfg.resources.threads:
        torch.set_num_threads(cfg.resources.threads)
    trainer = Trainer(cfg, graph, comm)
    saved = sink.restore()
    if saved is not None:
        trainer.restore(saved)
    total = trainer.total_steps
    clock, edges = time.perf_counter(), 0.0
    while trainer.step < total:
        terms = trainer.advance()
        step = trainer.step
        edges += float(terms.pop("edges"))
        is_last = step == total
        metrics = _reduce(terms, cfg, comm, step)
        sink.tick(step, total, {"loss": metrics["loss"], **{k: v for k, v in metrics.items() if k in ("structure", "factor", "cluster")}})
        if step % cfg.run.log_every == 0 or is_last:
            seconds = time.perf_counter() - clock
            sink.log("train", step, metrics | {"lr": trainer.scheduler.get_last_lr()[0], "edges_per_s": edges / seconds, "seconds": seconds})
            clock, edges = time.perf_counter(), 0.0
        is_best = False
        if validate and cfg.train.validate_every and (step % cfg.train.validate_every == 0 or is_last):
            is_best = _validate(trainer, validate, sink)
            clock = time.perf_counter()
        signum = _agree_on_signal(sink, comm)
        if is_best or is_last or signum or step % cfg.run.checkpoint_every == 0:
            sink.save(step, *trainer.state(), is_best)
        if signum and not is_last:
            raise Interrupted(signum, step)
    return trainer


def _reduce(terms: dict[str, Tensor], cfg: Config, comm: Comm, step: int) -> dict[str, float]:
    """Collective: global values of the terms, of the objective and of the gradient norm; fails when the loss is not finite."""
    norm = float(terms.pop("grad_norm"))
    names = sorted(terms)
    values = comm.sum(torch.stack([terms[name].double() for name in names]))
    reduced = dict(zip(names, values, strict=True))
    metrics = {"loss": float(objective(reduced, cfg)), **{name: float(value) for name, value in reduced.items()}, "grad_norm": norm}
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise UserError(f"Training diverged at step {step}: {', '.join(bad)} is not finite. Lower optim.lr_max (now {cfg.optim.lr_max:g}); the last good checkpoint is kept.")
    return metrics


def _validate(trainer: Trainer, validate: Validator, sink: Sink) -> bool:
    """Collective: score by validation data; rank 0 decides whether this is the best so far."""
    trainer.model.eval()
    scores = trainer.comm.broadcast_object(validate(trainer.model))
    sink.log("val", trainer.step, scores)
    is_best = scores["score"] > trainer.best_score
    if is_best:
        trainer.best_score, trainer.best_step = scores["score"], trainer.step
    return is_best


def _agree_on_signal(sink: Sink, comm: Comm) -> int:
    """Collective: the signal any rank received, so that all stop at the same step."""
    own = sink.stop_signal()
    return own if comm.world == 1 else int(comm.sum(torch.tensor([own])).clamp_max(15))
