"""Several soft clusterings of the same nodes made into one. Shapes: M members, N nodes, C clusters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_ROUNDS = 3


def consensus(members: Sequence[Tensor], reference: int = 0) -> Tensor:
    """The mean of M soft assignments q [N, C] after renumbering each to agree best with the others; float64 [N, C], rows sum to 1.

    Clusters carry arbitrary numbers, so each member is matched to a base by the permutation π that maximises Σ_i Σ_c base_ic q_i,π(c)
    (the assignment problem). The base is the reference member at first, then the mean so far. A member that found nothing has nearly
    uniform rows and so hardly a vote.
    """
    votes = [q.to(torch.float64) for q in members]
    base_NC = votes[reference]
    for _ in range(_ROUNDS):
        base_NC = torch.stack([q[:, _matching(base_NC, q)] for q in votes]).mean(0)
    return base_NC


def _matching(base_NC: Tensor, q_NC: Tensor) -> Tensor:
    """The cluster of q that stands for each cluster of the base, int64 [C]."""
    agreement = (base_NC.t() @ q_NC).cpu().numpy()
    _, columns = linear_sum_assignment(-agreement)
    return torch.from_numpy(columns.astype(np.int64)).to(q_NC.device)
