"""The worker: the same loop in one process, under Ray, or inside a sweep's trial. It knows a Comm
and a Sink, nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config, describe_encoder
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io.storage import keep_freed_memory
from cimage_dist.nn.encoder import Encoder
from cimage_dist.nn.model import CimageModel
from cimage_dist.train.initial import NO_LABELS, LabelSet, initial_labels, method_for
from cimage_dist.train.progress import Meter, Pace
from cimage_dist.train.refresh import Embedder, Refresher, random_scores
from cimage_dist.train.sink import Sink
from cimage_dist.train.step import objective
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import Topology

# Collective: scores a model by validation data only, the same on every rank; "score" is what
# selection maximises.
Validator = Callable[[CimageModel], dict[str, float]]

_LABELS = "pseudo-labels"
SHOWN = ("loss", "structure", "factor", "cluster", "redundancy")


def describe_clusters(cfg: Config, graph: Graph, labels: Tensor) -> dict[str, Any]:
    """The number of clusters and who chose it, for the log and the run's summary."""
    count, method = 1 + int(labels.max()), method_for(cfg.cluster.init, graph.num_nodes)
    if cfg.cluster.init == "file":
        by, how = "cluster.labels_path", "read from a file"
    elif cfg.cluster.num_clusters:
        by = how = "cluster.num_clusters"
    elif graph.num_classes >= 2 and cfg.cluster.num_clusters is None:
        by = how = "the number of classes"
    else:
        by, how = "features and edges", "estimated from features and edges"
    return {
        "clusters": count,
        "by": by,
        "method": method,
        "described": f"{count} ({how}), {method}",
    }


def _edge_only(
    cfg: Config, graph: Graph, topology: Topology, comm: Comm, sink: Sink
) -> tuple[Encoder, Embedder]:
    """Collective: a throw-away encoder trained with the edge loss alone, on streams of its own."""
    seed = keyed.derive(cfg.run.seed, keyed.STREAM["initial-labels"]) & (2**62 - 1)
    short = dataclasses.replace(
        cfg,
        loss=cfg.loss.edges_only(),
        optim=dataclasses.replace(cfg.optim, schedule_epochs=0),
        # The labels may not take longer than the run itself, where steps bound it.
        train=dataclasses.replace(cfg.train, steps=cfg.steps, epochs=cfg.cluster.init_epochs),
        run=dataclasses.replace(cfg.run, seed=seed),
    )
    trainer = Trainer(short, graph, topology, comm)
    for batches in trainer.remaining():
        terms = trainer.advance(batches)
        sink.tick(
            trainer.step, trainer.total_steps, {"loss": float(terms["structure"])}, "initial labels"
        )
        if signum := _agree(sink, comm, False)[0]:
            raise Interrupted(signum, 0)
    trainer.settle()
    return trainer.model.encoder, trainer.embedder


def make_labels(cfg: Config, graph: Graph, topology: Topology, comm: Comm, sink: Sink) -> LabelSet:
    """Collective: the initial labels of this config, made or found; see `initial_labels`."""

    def tick(step: int, total: int, values: dict[str, float], stage: str) -> None:
        sink.tick(step, total, values, stage)
        # Several ranks do not always tick alike, so they cannot agree here; they stop at the first
        # step.
        if comm.world == 1 and (signum := sink.stop_signal()):
            raise Interrupted(signum, 0)

    return initial_labels(
        cfg, graph, topology, lambda: _edge_only(cfg, graph, topology, comm, sink), comm, tick
    )


def _prepare_scores(trainer: Trainer, sink: Sink, is_new: bool) -> None:
    """Collective: what the losses need before the first step.

    Initial labels, which the sink stores, or a random half for the whole run; nothing for halves
    that are drawn at each refresh.
    """
    cfg, graph, comm = trainer.cfg, trainer.graph, trainer.comm
    if not cfg.loss.uses_partition:
        return
    if cfg.ci.partition == "random":
        trainer.scores = random_scores(cfg.model.num_factors, cfg.run.seed)
    if cfg.ci.partition != "ci":
        return
    kept = sink.fetch(_LABELS) if comm.is_main else None
    if comm.broadcast_object(kept is not None):
        found = NO_LABELS if kept is None else LabelSet(kept["labels"], kept["confidence"])
    else:
        found = make_labels(cfg, graph, trainer.topology, comm, sink)
        sink.store(_LABELS, {"labels": found.labels, "confidence": found.confidence})
    if is_new and comm.is_main:  # the others have no labels yet
        sink.log("clusters", 0, describe_clusters(cfg, graph, found.labels))
    trainer.refresher = Refresher(
        cfg,
        comm.scatter_rows(found.labels.to(torch.int64), graph.num_nodes),
        comm.scatter_rows(found.confidence.to(torch.float64), graph.num_nodes),
        trainer.embedder,
        comm,
        trainer.total_steps,
        first_node=comm.slice_of(graph.num_nodes)[0],
    )


class Due(NamedTuple):
    """What falls on a step."""

    log: bool
    validate: bool
    save: bool


def due_at(step: int, total: int, cfg: Config, can_validate: bool) -> Due:
    """A function of the step alone; everything falls on the last one."""

    def every(steps: int) -> bool:
        return steps > 0 and (step % steps == 0 or step == total)

    validates = can_validate and every(cfg.train.validate_every)
    return Due(every(cfg.run.log_every), validates, every(cfg.run.checkpoint_every))


def worker(
    cfg: Config, comm: Comm, sink: Sink, graph: Graph, validate: Validator | None = None
) -> Trainer:
    """Collective: train to the last step, resuming from the sink's newest checkpoint.

    Raises Interrupted after saving when a signal asked to stop, and UserError when a loss stops
    being finite (the last good checkpoint stays).
    """
    if cfg.resources.threads:
        torch.set_num_threads(cfg.resources.threads)
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    trainer = Trainer(cfg, graph, topology, comm)
    saved = sink.restore()
    if saved is None:
        used = trainer.cfg.model
        described = describe_encoder(cfg.model, used, len(cfg.sampler.fanouts))
        sink.log(
            "encoder",
            0,
            {"described": described, "num_layers": used.num_layers, "teleport": used.teleport},
        )
    _prepare_scores(trainer, sink, saved is None)
    if saved is not None:
        trainer.restore(saved)
    total = trainer.total_steps
    meter, pace = Meter(cfg, trainer.device), Pace(total, cfg.ci.every_steps)
    is_first = True
    for batches in meter.timed(trainer.remaining()):
        with pace.refresh(trainer.is_refresh_due()):
            refreshed = trainer.refresh()
        if is_first:
            # From here on: preparation and the first partition make larger blocks than any step.
            keep_freed_memory()
            is_first = False
        if refreshed is not None:
            sink.log("ci", trainer.step, refreshed)
        with meter.time("step"):
            terms = trainer.advance(batches)
        step = trainer.step
        meter.edges += sum(batch.global_pos for batch in batches)
        due = due_at(step, total, cfg, validate is not None)
        with meter.time("exchange"):
            # Reading a number on a GPU waits for all work in flight: only when it is looked at.
            is_read = any(due) or trainer.device.type == "cpu"
            metrics = _reduce(terms, cfg, comm, step) if is_read else {}
        sink.tick(step, total, {name: metrics[name] for name in SHOWN if name in metrics})
        if text := pace.after(step):
            sink.note(text)
        with meter.time("exchange"):
            signum, is_time = _agree(sink, comm, meter.is_checkpoint_due())
            saves = due.save or is_time or bool(signum)
            if saves and not metrics:
                _reduce(terms, cfg, comm, step)  # what is not finite must not be saved
        if due.log:
            sink.log(
                "train",
                step,
                metrics
                | {"total_steps": total, "lr": trainer.scheduler.get_last_lr()[0]}
                | meter.read(),
            )
        is_best = validate is not None and due.validate and _validate(trainer, validate, sink)
        if saves or is_best:
            sink.save(step, *trainer.state(), is_best)
            meter.checkpointed()
        if signum and step < total:
            raise Interrupted(signum, step)
    return trainer


def _reduce(terms: dict[str, Tensor], cfg: Config, comm: Comm, step: int) -> dict[str, float]:
    """Collective: global values of the terms, of the objective and of the gradient norm; fails when
    one is not finite.
    """
    norm = float(terms.pop("grad_norm"))
    names = sorted(terms)
    values = comm.sum(torch.stack([terms[name].double() for name in names]))
    reduced = dict(zip(names, values, strict=True))
    metrics = {
        "loss": float(objective(reduced, cfg)),
        **{name: float(value) for name, value in reduced.items()},
        "grad_norm": norm,
    }
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"Training diverged at step {step}: {', '.join(bad)} is not finite. Lower "
            f"optim.lr_max (now {cfg.optim.lr_max:g}); the last good checkpoint is kept."
        )
    return metrics


def _validate(trainer: Trainer, validate: Validator, sink: Sink) -> bool:
    """Collective: score by validation data; whether this is the best so far."""
    trainer.settle()
    trainer.model.eval()
    scores = validate(trainer.model)
    sink.log("val", trainer.step, scores)
    is_best = scores["score"] > trainer.best_score
    if is_best:
        trainer.best_score, trainer.best_step = scores["score"], trainer.step
    return is_best


def _agree(sink: Sink, comm: Comm, is_due: bool) -> tuple[int, bool]:
    """Collective: (a signal that some rank received, or 0; whether rank 0's clock asks for a
    checkpoint), so that all act at the same step.
    """
    own = sink.stop_signal()
    if comm.world == 1:
        return own, is_due
    # One small sum: two counts by kind of signal and rank 0's wish.
    asked = comm.sum(
        torch.tensor(
            [own == signal.SIGTERM, own not in (0, signal.SIGTERM), is_due and comm.is_main],
            dtype=torch.int64,
        )
    ).tolist()
    return signal.SIGTERM if asked[0] else signal.SIGINT if asked[1] else 0, bool(asked[2])
