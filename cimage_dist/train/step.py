"""One optimisation step, no input or output.

Convention for several ranks: DDP averages gradients, so each rank's loss is world · (local sum) / (global count).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.losses import structure_loss
from cimage_dist.train.batches import StepBatch


def loss_terms(model: nn.Module, batch: StepBatch) -> dict[str, Tensor]:
    """This rank's share of each term of the objective; shares add up over ranks to the global value."""
    out = model(batch.x, batch.edges, batch.pairs)
    pos, neg = structure_loss(out.logits[: batch.num_pos], out.logits[batch.num_pos :])
    return {"structure": pos.total / max(batch.global_pos, 1) + neg.total / max(batch.global_neg, 1)}


def objective(terms: dict[str, Tensor], cfg: Config) -> Tensor:
    """L = L_st + λ1·L_ch + λ2·L_cl (§1)."""
    return terms["structure"]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, batch: StepBatch, step: int, cfg: Config, comm: Comm
) -> dict[str, Tensor]:
    """Forward, backward, clip, update, schedule. Returns this rank's shares of the terms and the gradient norm, detached."""
    devices = [batch.x.device] if batch.x.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        # Dropout is the one draw that depends on the rank: each rank drops its own copy of the rows.
        torch.manual_seed(keyed.stream(cfg.run.seed, "dropout", step, comm.rank))
        terms = loss_terms(model, batch)
        optimizer.zero_grad(set_to_none=True)
        (comm.world * objective(terms, cfg)).backward()
    limit = cfg.optim.clip_norm if cfg.optim.clip_norm > 0 else float("inf")
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    scheduler.step()
    return {name: value.detach() for name, value in terms.items()} | {"grad_norm": norm.detach()}
