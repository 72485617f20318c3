"""One step of gradient descent that all ranks make alike."""

from __future__ import annotations

import torch
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.errors import UserError


def step_on(share: Tensor, optimiser: torch.optim.Optimizer, comm: Comm, method: str) -> float:
    """Collective: one step of the optimiser on the sum of all ranks' shares; returns that sum. Parameters stay alike everywhere."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    grads = torch.autograd.grad(share, parameters, materialize_grads=True)
    total = comm.sum(torch.cat([share.detach().reshape(1), *(g.flatten() for g in grads)]))
    if not bool(total.isfinite().all()):
        raise UserError(f"{method} diverged: its loss or gradients are no longer finite. Check the features for huge values, or lower the learning rate.")
    for p, grad in zip(parameters, total[1:].split([p.numel() for p in parameters]), strict=True):
        p.grad = grad.view_as(p)
    optimiser.step()
    return float(total[0])
