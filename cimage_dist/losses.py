"""Loss terms as (sum, count) pairs, so that several processes can add them up before dividing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cimage_dist.types import Mean


def structure_loss(pos_logits: Tensor, neg_logits: Tensor) -> tuple[Mean, Mean]:
    """L_st = mean softplus(-logit) over masked edges + mean softplus(logit) over non-edges (§4); the two means are separate."""
    return Mean(F.softplus(-pos_logits).sum(), pos_logits.numel()), Mean(F.softplus(neg_logits).sum(), neg_logits.numel())
