"""The network of Dink-Net and its losses (§6.4). Shapes: N nodes, F features, D width, C clusters, n rows of this rank.

Every loss here is this rank's share: the sum over ranks of values is the loss, the sum of gradients its gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.comm import Comm


class DinkNet(nn.Module):
    """F(X) = PReLU(Â X W + b) and the discriminating head Linear(D -> D) summed over its outputs (§6.4). weight [F, D], bias [D].

    Glorot-uniform W, b = 0, one slope for all channels. The caller multiplies by Â, before or after W, whichever is cheaper.
    """

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_features, width)))
        self.bias = nn.Parameter(torch.zeros(width))
        self.slope = nn.Parameter(torch.tensor(0.25))
        self.head = nn.Linear(width, width)

    def activate(self, pre_ND: Tensor, columns: slice = slice(None)) -> Tensor:
        """F(X) from Â X W, for some of the columns."""
        return F.prelu(pre_ND + self.bias[columns], self.slope.unsqueeze(0))

    def logits(self, pre_ND: Tensor) -> Tensor:
        """Σ_k (V F(x) + v)_k, [N]. Summed over the rows of V first: the same number with D times less work."""
        return self.activate(pre_ND) @ self.head.weight.sum(0) + self.head.bias.sum()


def masked_columns(num_features: int, rate: float, key: int, like: Tensor) -> Tensor:
    """1 for a kept feature and 0 for a masked one, [F, 1]; ⌊rate F⌋ are masked, chosen by the key."""
    keep = torch.ones(num_features, 1, dtype=like.dtype, device=like.device)
    keep[keyed.bits(key, torch.arange(num_features, device=like.device)).argsort()[: int(rate * num_features)]] = 0
    return keep


def discrimination_loss(real: Tensor, fake: Tensor, batch: int) -> Tensor:
    """Binary cross-entropy of the logits with real = 1 and fake = 0, mean over the 2·batch of all ranks (§6.4). real, fake [n]."""
    return (F.softplus(-real).sum() + F.softplus(fake).sum()) / (2 * batch)


def clustering_loss(h_nD: Tensor, centres_CD: Tensor, batch: int, comm: Comm) -> Tensor:
    """`mean_{i,j} |H_i - c_j|² - (1/(C(C-1))) Σ_{i≠j} |c_i - c_j|²`: shrink and dilation (§6.4), over the `batch` rows of all ranks.

    Squares are multiplied out, so that only sums of H and of the centres are needed: O((n + C)·D), nothing of size n x C.
    """
    num_clusters = centres_CD.shape[0]
    squares, total_D = centres_CD.square().sum(), centres_CD.sum(0)
    shrink = num_clusters * h_nD.square().sum() - 2 * (h_nD.sum(0) @ total_D) + h_nD.shape[0] * squares
    dilation = 2 * (num_clusters * squares - total_D.square().sum()) / (num_clusters * (num_clusters - 1))
    return shrink / (batch * num_clusters) - dilation / comm.world


@torch.no_grad()
def project_to_ball(centres_CD: Tensor) -> None:
    """In place: centres longer than 1 are shortened to 1. The loss is unbounded below without it (§6.4)."""
    centres_CD.div_(torch.linalg.vector_norm(centres_CD, dim=1, keepdim=True).clamp(min=1.0))
