"""One optimisation step, no input or output: what it works on, made from the whole graph or from
sampled neighbourhoods of seed edges, and its losses.

Convention for several ranks: a term is this rank's share, shares add up to the global value, and
the loss is world · share because DDP averages gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cimage_dist import keyed, registry
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.sparse import CsrFeatures
from cimage_dist.losses import (
    factor_loss,
    modularity_edges,
    modularity_full,
    redundancy_loss,
    structure_loss,
    target_factors,
)
from cimage_dist.nn.model import CimageModel, ModelOutput, rows_of
from cimage_dist.nn.projection import drop_columns, placed
from cimage_dist.sampling.hidden import MaskedGraph, PathMasker, most_masked
from cimage_dist.sampling.loader import BatchLoader, BatchSource
from cimage_dist.types import Batch, CIScores, EdgeList, Features, SparseRows, Topology, View

ViewT = TypeVar("ViewT", bound=View)


def _columns(x: Features, cfg: Config, step: int, view: int) -> Features:
    """x as a view of a step sees it: without the columns drawn for it, the same on all ranks."""
    return drop_columns(
        x, cfg.mask.feature_rate, keyed.stream(cfg.run.seed, "view-columns", step, view)
    )


def batches_per_epoch(cfg: Config, num_nodes: int, num_edges: int) -> int:
    """Batches of a pass over a graph of `num_edges` directed training edges."""
    if cfg.sampler.fanouts:
        return max(1, math.ceil(num_edges // 2 / cfg.sampler.batch_edges))
    most = most_masked(cfg.mask, num_nodes, num_edges)
    return max(1, math.ceil(most / cfg.train.batch_edges))


class Batches(Protocol):
    steps_per_epoch: int

    def iterate(self, start: int, end: int) -> Iterator[Batch]:
        """The batches of steps [start, end); each is a function of the step number alone."""
        ...

    def edge_batches(self, step: int) -> Iterator[Batch]:
        """What an optimiser step trains the edge factors on beforehand (§4.6)."""
        ...

    def measuring_batch(self) -> Batch:
        """On which the edge factors are measured, no batch of a step."""
        ...


class FullGraphBatches:
    """Step s of a full-graph run is part s mod P of the mask of epoch s div P.

    P = ceil(most edges a mask can hold / batch_edges), so the step number alone names the batch.
    Several ranks all encode the whole graph and share out the pairs, nodes and edges of the losses:
    the same experiment at any world size.
    """

    def __init__(self, x: Features, topology: Topology, cfg: Config, comm: Comm) -> None:
        self.x, self.cfg, self.comm = x, cfg, comm
        self.masker = PathMasker(topology, cfg.mask, cfg.run.seed)
        self.steps_per_epoch = batches_per_epoch(cfg, topology.num_nodes, topology.num_edges)
        self._masks: dict[
            int, tuple[int, MaskedGraph]
        ] = {}  # of each view: the epoch, and its mask

    def _mask_of(self, epoch: int, view: int = 0) -> MaskedGraph:
        if view not in self._masks or self._masks[view][0] != epoch:
            mask = self.masker.mask(epoch, view)
            if self.steps_per_epoch > 1:
                draws = keyed.uniform(
                    keyed.stream(self.cfg.run.seed, "batch-order", epoch),
                    torch.arange(mask.masked.shape[0]),
                )
                mask = mask._replace(masked=mask.masked[draws.argsort(stable=True)])
            self._masks[view] = epoch, mask._replace(visible=mask.visible.to(self.x.device))
        return self._masks[view][1]

    def _view(self, step: int, view: int) -> View:
        visible = self._mask_of(step // self.steps_per_epoch, view).visible
        return View(
            x=_columns(self.x, self.cfg, step, view),
            edges=self.masker.hide_more(visible, step, view),
            nodes=torch.arange(*self.comm.slice_of(self.x.shape[0]), device=self.x.device),
        )

    def batch(self, step: int) -> Batch:
        epoch, part = divmod(step, self.steps_per_epoch)
        mask = self._mask_of(epoch)
        total = mask.masked.shape[0]
        positives = mask.masked[
            total * part // self.steps_per_epoch : total * (part + 1) // self.steps_per_epoch
        ]
        # Without an edge decoder nobody looks at non-edges.
        wanted = positives.shape[0] if self.cfg.loss.structure_weight > 0 else 0
        negatives = self.masker.negatives(wanted, step)
        pos, neg = (
            pairs[slice(*self.comm.slice_of(pairs.shape[0]))] for pairs in (positives, negatives)
        )
        view = self._view(step, 0)
        return Batch(
            x=view.x,
            edges=view.edges,
            nodes=view.nodes,
            pairs=torch.cat([pos, neg]).to(self.x.device),
            num_pos=pos.shape[0],
            modularity=_share_of_edges(view.edges, self.comm),
            global_pos=positives.shape[0],
            global_neg=negatives.shape[0],
            global_nodes=self.x.shape[0],
            second=self._view(step, 1) if self.cfg.loss.redundancy_weight > 0 else None,
        )

    def iterate(self, start: int, end: int) -> Iterator[Batch]:
        for step in range(start, end):
            yield self.batch(step)

    def edge_batches(self, step: int) -> Iterator[Batch]:
        for number in range(1, self.cfg.optim.edge_steps):
            yield self._edge_batch(step, number + 1)  # views 0 and 1 are those of the step itself

    def measuring_batch(self) -> Batch:
        return self._edge_batch(_MEASURE, 0)

    def _edge_batch(self, step: int, view: int) -> Batch:
        cfg, device = self.cfg, self.x.device
        mask = self.masker.mask(step, view, cfg.mask.edge_start_rate)
        masked = mask.masked
        if masked.shape[0] > cfg.train.batch_edges:
            key = keyed.stream(cfg.run.seed, "batch-order", step, view=view)
            masked = masked[keyed.highest(key, masked.shape[0], cfg.train.batch_edges)]
        negatives = self.masker.negatives(masked.shape[0], step, view * _VIEW_DRAWS)
        pos, neg = (
            pairs[slice(*self.comm.slice_of(pairs.shape[0]))] for pairs in (masked, negatives)
        )
        return Batch(
            x=_columns(self.x, cfg, step, view),
            edges=self.masker.hide_more(mask.visible, step, view).to(device),
            nodes=torch.empty(0, dtype=torch.int64, device=device),
            pairs=torch.cat([pos, neg]).to(device),
            num_pos=pos.shape[0],
            global_pos=masked.shape[0],
            global_neg=negatives.shape[0],
            global_nodes=0,
        )


_MEASURE = -1  # the number of a batch that no step has
_VIEW_DRAWS = 1 << 40  # positions of one view's non-edges; no mask has as many


def _share_of_edges(edges: EdgeList, comm: Comm) -> EdgeList:
    begin, end = comm.slice_of(edges.src.numel())
    return (
        edges
        if comm.world == 1
        else replace(edges, src=edges.src[begin:end], dst=edges.dst[begin:end])
    )


class SampledBatches:
    """Seed edges with their sampled neighbourhoods; an epoch is one pass over all undirected edges
    (§3.3, §11.1).

    `features` [N, F] is the store's array as it is, dense or sparse: a mapped file stays on disk,
    in its own type, and only the rows of a batch are read.
    """

    def __init__(
        self,
        features: np.ndarray | CsrFeatures,
        topology: Topology,
        cfg: Config,
        comm: Comm,
        device: torch.device,
    ) -> None:
        self.cfg, self.device = cfg, device
        self.source = BatchSource.of(topology, cfg, comm.rank, comm.world, features)
        self.steps_per_epoch = self.source.schedule.steps_per_epoch

    def convert(self, batch: Batch, step: int) -> Batch:
        """The batch on the device, its features as the views of the step see them."""
        batch = batch.to(self.device, non_blocking=True)
        second = None if batch.second is None else self._seen(batch.second, step, 1)
        return replace(self._seen(batch, step, 0), second=second)

    def _seen(self, view: ViewT, step: int, number: int) -> ViewT:
        x = placed(view.x, self.device, torch.get_default_dtype())
        if isinstance(x, SparseRows) and self.cfg.train.precision == "bfloat16":
            x = x.to_dense()  # autocast is for dense products only
        return replace(view, x=_columns(x, self.cfg, step, number))

    def iterate(self, start: int, end: int) -> Iterator[Batch]:
        sampler = self.cfg.sampler
        loader = BatchLoader(
            self.source,
            start,
            end,
            workers=sampler.loader_processes,
            prefetch=sampler.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        for step, batch in zip(loader.steps, loader, strict=True):
            yield self.convert(batch, step)

    def edge_batches(self, step: int) -> Iterator[Batch]:
        """None: sampled runs have more and smaller steps."""
        return iter(())

    def measuring_batch(self) -> Batch:
        return self.convert(self.source[_MEASURE], _MEASURE)


def loss_terms(
    model: nn.Module, batch: Batch, cfg: Config, scores: CIScores | None, comm: Comm
) -> dict[str, Tensor]:
    """Collective: this rank's share of each term that has a weight in the objective."""
    use_factors = cfg.loss.factor_weight > 0 and scores is not None
    context = scores.in_context.to(batch.x.device) if scores is not None else None
    visible = ~target_factors(context, cfg.loss) if context is not None else None
    with torch.autocast(
        batch.x.device.type, torch.bfloat16, enabled=cfg.train.precision == "bfloat16"
    ):
        nodes, hidden = (batch.nodes, visible) if use_factors else (None, None)
        out: ModelOutput = model(
            batch.x, batch.edges, batch.pairs, nodes, hidden, batch.hops, batch.second
        )
    terms = {}
    if out.logits is not None:
        terms["structure"] = _structure_share(out.logits.to(out.z.dtype), batch)
    if out.predicted is not None and context is not None:
        own, predicted = rows_of(out.z, batch.nodes), out.predicted.to(out.z.dtype)
        recon = factor_loss(own, predicted, context, cfg.loss, batch.node_weight)
        terms["factor"] = recon.total / max(batch.global_nodes, 1)
    if cfg.loss.cluster_weight != 0:
        terms["cluster"] = _cluster_share(out.z.flatten(1), batch, comm)
    if out.second is not None:
        terms["redundancy"] = _redundancy_share(out, batch, cfg, comm)
    if cfg.loss.extra:
        seen = registry.LossInputs(
            rows_of(out.z, batch.nodes),
            out.second,
            batch.node_gids,
            batch.node_weight,
            batch.global_nodes,
            comm,
        )
        terms |= {name: registry.loss(name)(seen) for name in cfg.loss.extra}
    return terms


def _structure_share(logits: Tensor, batch: Batch) -> Tensor:
    cut = batch.num_pos
    weights = (None, None) if batch.weight is None else (batch.weight[:cut], batch.weight[cut:])
    pos, neg = structure_loss(*logits.tensor_split([cut]), *weights)
    return pos.total / max(batch.global_pos, 1) + neg.total / max(batch.global_neg, 1)


def _redundancy_share(out: ModelOutput, batch: Batch, cfg: Config, comm: Comm) -> Tensor:
    """Over all nodes, or over the endpoints of the positives, each as often as it is one."""
    assert out.second is not None
    zb = out.second.flatten(1)
    za = rows_of(out.z, batch.nodes).flatten(1)[:, : zb.shape[1]]
    mu = cfg.loss.redundancy_decorrelation
    return redundancy_loss(za, zb, mu=mu, weight=batch.node_weight, comm=comm)


def _cluster_share(z: Tensor, batch: Batch, comm: Comm) -> Tensor:
    if batch.modularity is not None:
        return modularity_full(z, batch.modularity, comm, is_symmetric=comm.world == 1) / comm.world
    pos = batch.pairs[: batch.num_pos]
    if batch.weight is not None:
        pos = pos[batch.weight[: batch.num_pos] > 0]
    return (
        modularity_edges(
            z.index_select(0, pos[:, 0]), z.index_select(0, pos[:, 1]), comm, is_symmetric=True
        )
        / comm.world
    )


def objective(terms: dict[str, Tensor], cfg: Config) -> Tensor:
    """L = λ0·L_st + λ1·L_ch + λ2·L_cl + λ3·L_red (§5.1); terms without a weight are absent."""
    loss = cfg.loss
    weight = {
        "structure": loss.structure_weight,
        "factor": loss.factor_weight,
        "cluster": loss.cluster_weight,
        "redundancy": loss.redundancy_weight,
        **loss.extra,
    }
    return torch.stack([weight[name] * value for name, value in terms.items()]).sum()


def edge_share(model: CimageModel, batch: Batch, cfg: Config) -> Tensor:
    """This rank's share of the edge loss by the edge factors."""
    device = batch.x.device.type
    with torch.autocast(device, torch.bfloat16, enabled=cfg.train.precision == "bfloat16"):
        logits = model.edge_logits(batch.x, batch.edges, batch.pairs, batch.hops)
    return _structure_share(logits.to(torch.get_default_dtype()), batch)


def train_edges(
    model: CimageModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    step: int,
    cfg: Config,
    comm: Comm,
) -> None:
    """Collective: an update of the edge factors and their decoder on each batch, by the edge loss
    alone; nothing else changes. Clipped by themselves, at the rate of the step.
    """
    weights = model.edge_parameters()
    limit = cfg.optim.clip_norm if cfg.optim.clip_norm > 0 else float("inf")
    for number, batch in enumerate(batches, start=1):
        devices = [batch.x.device] if batch.x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(keyed.stream(cfg.run.seed, "dropout", step, comm.rank, view=number))
            share = cfg.loss.structure_weight * edge_share(model, batch, cfg)
            # Not backward(): the hooks of DDP are for the step itself.
            grads = torch.autograd.grad(share, weights)
        optimizer.zero_grad(set_to_none=True)
        together = comm.sum(torch.cat([grad.flatten() for grad in grads]))  # one message
        sizes = [weight.numel() for weight in weights]
        for weight, grad in zip(weights, together.split(sizes), strict=True):
            weight.grad = grad.view_as(weight)
        nn.utils.clip_grad_norm_(weights, limit)
        optimizer.step()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batches: Sequence[Batch],
    first: int,
    cfg: Config,
    scores: CIScores | None,
    comm: Comm,
) -> dict[str, Tensor]:
    """Collective: forward and backward of each batch, the first of them number `first`, then clip,
    update, schedule.

    The gradient is the mean over the batches; ranks exchange it once. Returns this rank's shares of
    the mean terms and the gradient norm, detached.
    """
    optimizer.zero_grad(set_to_none=True)
    total: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        devices = [batch.x.device] if batch.x.device.type == "cuda" else []
        is_last = number == len(batches) - 1
        waits = (
            nullcontext()
            if is_last or not isinstance(model, DistributedDataParallel)
            else model.no_sync()
        )
        with torch.random.fork_rng(devices=devices), waits:
            # Dropout is the one draw that depends on the rank: each rank drops its own copy of the
            # rows.
            torch.manual_seed(keyed.stream(cfg.run.seed, "dropout", first + number, comm.rank))
            terms = loss_terms(model, batch, cfg, scores, comm)
            (comm.world / len(batches) * objective(terms, cfg)).backward()
        for name, value in terms.items():
            total[name] = total.get(name, 0.0) + value.detach() / len(batches)
    limit = cfg.optim.clip_norm if cfg.optim.clip_norm > 0 else float("inf")
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    scheduler.step()
    return total | {"grad_norm": norm.detach()}
