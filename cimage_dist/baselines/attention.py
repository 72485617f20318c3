"""Graph attention as sparse products: what GraphMAE2, AUG-MAE and GiGaMAE share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import Linear
from torch_geometric.nn.inits import glorot
from torch_geometric.utils import softmax

from cimage_dist.baselines.sparse import Features, Pattern, projected

SLOPE = 0.2  # of LeakyReLU below zero, as in the paper


class Attention(nn.Module):
    """Per head: out_v = sum_u a_vu h_u,  a_vu = softmax over u of LeakyReLU(r . h_v + s . h_u).

    h = X W, u runs over the entries of row v: the sources of its edges and v itself. The heads
    [N, out] are put side by side, or with `concat` False averaged; then a bias is added. P.
    Velickovic et al., "Graph Attention Networks", ICLR 2018. `dropout` is that of the shares a.
    """

    def __init__(
        self, num_features: int, out: int, heads: int, dropout: float, concat: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.out_channels, self.concat, self.dropout = heads, out, concat, dropout
        self.lin = Linear(num_features, heads * out, bias=False, weight_initializer="glorot")
        self.att_src = nn.Parameter(torch.empty(1, heads, out))  # s
        self.att_dst = nn.Parameter(torch.empty(1, heads, out))  # r
        self.bias = nn.Parameter(torch.zeros(heads * out if concat else out))
        glorot(self.att_src)
        glorot(self.att_dst)

    def forward(self, x: Features, links: Pattern) -> Tensor:
        return self.attend(projected(x, self.lin.weight), links)

    def attend(self, h: Tensor, links: Pattern) -> Tensor:
        """The layer for h = X W [N, heads * out]; rows without entries hold the bias alone."""
        by_head = h.view(-1, self.heads, self.out_channels).transpose(0, 1)  # [heads, N, out]
        sent, received = (
            torch.bmm(by_head, vector.view(self.heads, -1, 1)).squeeze(2).t()
            for vector in (self.att_src, self.att_dst)
        )
        # index_select, unlike [...], has a fast gradient; [E, heads].
        logits = F.leaky_relu(
            sent.index_select(0, links.column) + received.index_select(0, links.row), SLOPE
        )
        share = softmax(logits, ptr=links.begins.long())
        share = F.dropout(share, self.dropout, self.training)
        outs = [links.times(a, one) for a, one in zip(share.t(), by_head, strict=True)]
        joined = torch.cat(outs, 1) if self.concat else torch.stack(outs).mean(0)
        return joined + self.bias
