"""The worker: the same loop in one process, under Ray, or inside a sweep's trial. It knows a Comm
and a Sink, nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler
from torch.torch_version import TorchVersion

from cimage_dist import keyed
from cimage_dist.ci.hsic import HsicStats
from cimage_dist.comm import Comm
from cimage_dist.config import Config, OptimConfig, describe_encoder
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.environment import keep_freed_memory
from cimage_dist.nn.encoder import Encoder
from cimage_dist.nn.features import Features, compact
from cimage_dist.nn.model import CimageModel, build_model, needs_moments, norm_kind
from cimage_dist.nn.norm import BatchNorm, settle
from cimage_dist.train.batches import Batches, FullGraphBatches, SampledBatches, StepBatch
from cimage_dist.train.initial import LabelSet, initial_labels
from cimage_dist.train.progress import Meter
from cimage_dist.train.refresh import (
    Embedder,
    FullEmbedder,
    Refresher,
    SampledEmbedder,
    random_scores,
    redrawn_scores,
)
from cimage_dist.train.sink import Sink
from cimage_dist.train.step import PseudoLabels, objective, train_step
from cimage_dist.train.teleport import fit_to_graph
from cimage_dist.types import CIScores, Topology

# Scores a model by validation data only; "score" is what selection maximises.
Validator = Callable[[CimageModel], dict[str, float]]

_LABELS = "pseudo-labels"
_TEACHER = "teacher."
_SETTLE_ROWS = 100_000  # of a sampled run: enough for a mean and a variance per channel
# The option has another name since torch 2.13.
_UNSHARED_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if TorchVersion(torch.__version__) >= "2.13"
    else "broadcast_buffers": False
}
SHOWN = ("loss", "structure", "factor", "cluster", "redundancy")


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
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=optim.lr_max, weight_decay=optim.weight_decay, fused=True
        )
        epochs = optim.schedule_epochs or cfg.train.epochs
        self.scheduler = make_schedule(self.optimizer, optim, self._steps_of(epochs))
        self.refresher: Refresher | None = None
        self.scores: CIScores | None = None
        self.labels: PseudoLabels | None = None  # where the redundancy loss looks at them
        self.teacher: Encoder | None = None
        if cfg.loss.factor_weight > 0 and cfg.loss.factor_target == "teacher":
            self.teacher = copy.deepcopy(self.model.encoder).requires_grad_(False).eval()
        self.step = 0
        self.best_score = -math.inf
        self.best_step = 0

    def _data(self) -> tuple[Batches, Embedder, Features]:
        """Batches, the embedder, and the features [n, F] that batch normalisation settles on."""
        cfg, rows = self.cfg, self.graph.x
        if cfg.sampler.fanouts:
            batches = SampledBatches(rows, self.topology, cfg, self.comm, self.device)
            embedder = SampledEmbedder(rows, self.topology, cfg, self.device)
            return batches, embedder, self._some_rows()
        x = compact(self.graph.features().to(self.device, torch.get_default_dtype()))
        return FullGraphBatches(x, self.topology, cfg, self.comm), FullEmbedder(x, self.topology), x

    def _some_rows(self) -> Tensor:
        """A keyed sample of the features, the same on every rank; empty if no norm needs it."""
        if norm_kind(self.cfg) != "batch":
            return torch.empty(0, self.graph.num_features)
        gids = torch.arange(self.graph.num_nodes)
        draw = keyed.uniform(keyed.stream(self.cfg.run.seed, "refresh-sample", -1), gids)
        chosen = gids[draw < _SETTLE_ROWS / gids.numel()]
        return torch.from_numpy(np.asarray(self.graph.x[chosen.numpy()]))

    def settle(self) -> None:
        """Give batch normalisation the moments of the clean features under the current weights.

        Called before anything that runs the encoder in eval mode or stores it; training steps
        neither read nor change these moments. The same on every rank, as weights and rows are.
        """
        settle(self.model.encoder.norm, self.model.encoder.linear, self.clean)

    @property
    def total_batches(self) -> int:
        return self.cfg.train.epochs * self.batches.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self._steps_of(self.cfg.train.epochs)

    def _steps_of(self, epochs: int) -> int:
        return math.ceil(epochs * self.batches.steps_per_epoch / self.cfg.train.accumulate)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.settle()
        slots, groups = checkpoint.pack_optimizer(self.optimizer)
        tensors = checkpoint.pack_model(self.model) | slots
        if self.teacher is not None:
            tensors |= {
                f"{_TEACHER}{name}": value for name, value in self.teacher.state_dict().items()
            }
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
        if self.teacher is not None:
            kept_teacher = {
                name.removeprefix(_TEACHER): value
                for name, value in saved.tensors.items()
                if name.startswith(_TEACHER)
            }
            # Weights handed over by a run without a teacher begin a new average.
            self.teacher.load_state_dict(kept_teacher or self.model.encoder.state_dict())
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

    def refresh(self) -> dict[str, Any] | None:
        """Collective: rebuild the partition when it is due; what to log, or None."""
        if self.step % self.cfg.ci.every_steps or not self.cfg.loss.uses_partition:
            return None
        if self.cfg.ci.partition == "random_redrawn":
            self.scores, metrics = redrawn_scores(self.cfg, self.step, self.scores)
            return metrics
        if self.refresher is None:
            return None
        self.settle()
        self.scores, metrics = self.refresher(self.model.encoder, self.step, self.scores)
        return metrics

    def advance(self, batches: Sequence[StepBatch]) -> dict[str, Tensor]:
        """Collective: one optimiser step on train.accumulate batches."""
        self.model.train()
        first = self.step * self.cfg.train.accumulate
        teacher = None if self.teacher is None else self._taught
        terms = train_step(
            self.wrapped,
            self.optimizer,
            self.scheduler,
            batches,
            first,
            self.cfg,
            self.scores,
            self.comm,
            self.labels,
            teacher,
        )
        self._average_teacher()
        self.step += 1
        return terms

    def _taught(self, gids: Tensor, number: int) -> Tensor:
        """The teacher's factors of nodes on the unmasked graph, [n, K, C]."""
        assert self.teacher is not None
        settle(self.teacher.norm, self.teacher.linear, self.clean)
        return self.embedder(self.teacher, gids, number).z

    @torch.no_grad()
    def _average_teacher(self) -> None:
        """teacher <- m·teacher + (1 - m)·encoder, in its weights."""
        if self.teacher is None:
            return
        for kept, now in zip(
            self.teacher.state_dict().values(),
            self.model.encoder.state_dict().values(),
            strict=True,
        ):
            if kept.is_floating_point():
                kept.lerp_(now, 1 - self.cfg.loss.teacher_momentum)
            else:
                kept.copy_(now)

    def remaining(self) -> Iterator[list[StepBatch]]:
        """The batches of each step to come, as they are made."""
        size = self.cfg.train.accumulate
        batches = self.batches.iterate(self.step * size, self.total_batches)
        while group := list(itertools.islice(batches, size)):
            yield group


def _edge_only(
    cfg: Config, graph: Graph, topology: Topology, comm: Comm, sink: Sink
) -> tuple[Encoder, Embedder]:
    """Collective: a throw-away encoder trained with the edge loss alone, on streams of its own."""
    seed = keyed.derive(cfg.run.seed, keyed.STREAM["initial-labels"]) & (2**62 - 1)
    short = dataclasses.replace(
        cfg,
        loss=cfg.loss.edges_only(),
        optim=dataclasses.replace(cfg.optim, schedule_epochs=0),
        train=dataclasses.replace(cfg.train, epochs=cfg.cluster.init_epochs),
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
    """Collective: the initial labels of this config, made or found."""

    def tick(step: int, total: int, values: dict[str, float], stage: str) -> None:
        sink.tick(step, total, values, stage)
        # Several ranks do not always tick alike, so they cannot agree here; they stop at the first
        # step.
        if comm.world == 1 and (signum := sink.stop_signal()):
            raise Interrupted(signum, 0)

    return initial_labels(
        cfg, graph, topology, lambda: _edge_only(cfg, graph, topology, comm, sink), comm, tick
    )


def _prepare_scores(trainer: Trainer, sink: Sink) -> None:
    """Collective: what the losses need before the first step.

    Initial labels, which the sink stores, or a random half for the whole run; nothing for halves
    that are drawn at each refresh.
    """
    cfg, graph, comm = trainer.cfg, trainer.graph, trainer.comm
    if not cfg.loss.uses_partition:
        return
    by_score = cfg.ci.partition == "ci"
    if cfg.ci.partition == "random":
        trainer.scores = random_scores(cfg.model.num_factors, cfg.run.seed)
    if not by_score and not cfg.loss.is_conditional:
        return
    kept = comm.broadcast_object(sink.fetch(_LABELS) if comm.is_main else None)
    if kept is None:
        found = make_labels(cfg, graph, trainer.topology, comm, sink)
        kept = {"labels": found.labels, "confidence": found.confidence}
        sink.store(_LABELS, kept)
    labels, confidence = kept["labels"], kept["confidence"]
    if cfg.loss.is_conditional:
        given = labels.to(trainer.device, torch.int32)
        trainer.labels = PseudoLabels(given, int(given.max()) + 1)
    if by_score:
        trainer.refresher = Refresher(
            cfg, labels, confidence, trainer.embedder, comm, trainer.total_steps
        )


def worker(
    cfg: Config, comm: Comm, sink: Sink, graph: Graph, validate: Validator | None = None
) -> Trainer:
    """Collective: train to the last step, resuming from the sink's newest checkpoint.

    Raises Interrupted after saving when a signal asked to stop, and UserError when a loss stops
    being finite (the last good checkpoint stays).
    """
    keep_freed_memory()
    if cfg.resources.threads:
        torch.set_num_threads(cfg.resources.threads)
    topology, _ = training_graph(graph, cfg.data, cfg.run.seed)
    trainer = Trainer(cfg, graph, topology, comm)
    saved = sink.restore()
    if saved is None:
        used = trainer.cfg.model
        described = describe_encoder(cfg.model, used)
        sink.log(
            "encoder",
            0,
            {"described": described, "num_layers": used.num_layers, "teleport": used.teleport},
        )
    _prepare_scores(trainer, sink)
    if saved is not None:
        trainer.restore(saved)
    total = trainer.total_steps
    meter = Meter(cfg, trainer.device)
    for batches in meter.timed(trainer.remaining()):
        refreshed = trainer.refresh()
        if refreshed is not None:
            sink.log("ci", trainer.step, refreshed)
        with meter.time("step"):
            terms = trainer.advance(batches)
        step = trainer.step
        meter.edges += sum(batch.global_pos for batch in batches)
        is_last = step == total
        is_logged = step % cfg.run.log_every == 0 or is_last
        validates = (
            validate is not None
            and bool(cfg.train.validate_every)
            and (step % cfg.train.validate_every == 0 or is_last)
        )
        with meter.time("exchange"):
            # On a GPU reading a number waits for all work in flight, so only when somebody will
            # look at it.
            looks = (
                is_logged
                or validates
                or is_last
                or step % cfg.run.checkpoint_every == 0
                or trainer.device.type == "cpu"
            )
            metrics = _reduce(terms, cfg, comm, step) if looks else {}
        sink.tick(step, total, {name: metrics[name] for name in SHOWN if name in metrics})
        with meter.time("exchange"):
            signum, is_due = _agree(sink, comm, meter.is_checkpoint_due())
            saves = is_last or bool(signum) or is_due or step % cfg.run.checkpoint_every == 0
            if saves and not metrics:
                _reduce(terms, cfg, comm, step)  # what is not finite must not be saved
        if is_logged:
            sink.log(
                "train",
                step,
                metrics
                | {"total_steps": total, "lr": trainer.scheduler.get_last_lr()[0]}
                | meter.read(),
            )
        is_best = validate is not None and validates and _validate(trainer, validate, sink)
        if saves or is_best:
            sink.save(step, *trainer.state(), is_best)
            meter.checkpointed()
        if signum and not is_last:
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
    """Collective: score by validation data; rank 0 decides whether this is the best so far."""
    trainer.settle()
    trainer.model.eval()
    scores = trainer.comm.broadcast_object(validate(trainer.model))
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
