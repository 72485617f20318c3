"""One optimisation step, no input or output.

Convention for several ranks: a term is this rank's share, shares add up to the global value, and
the loss is world · share because DDP averages gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cimage_dist import keyed, registry
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.losses.modularity import modularity_edges, modularity_full
from cimage_dist.losses.reconstruction import factor_loss, structure_loss, target_factors
from cimage_dist.losses.redundancy import redundancy_loss
from cimage_dist.nn.model import ModelOutput, rows_of
from cimage_dist.types import Batch, CIScores


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
        cut = batch.num_pos
        weights = (None, None) if batch.weight is None else (batch.weight[:cut], batch.weight[cut:])
        pos, neg = structure_loss(*out.logits.to(out.z.dtype).tensor_split([cut]), *weights)
        terms["structure"] = pos.total / max(batch.global_pos, 1) + neg.total / max(
            batch.global_neg, 1
        )
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


def _redundancy_share(out: ModelOutput, batch: Batch, cfg: Config, comm: Comm) -> Tensor:
    """Over all nodes, or over the endpoints of the positives, each as often as it is one."""
    assert out.second is not None
    za, zb = rows_of(out.z, batch.nodes).flatten(1), out.second.flatten(1)
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
