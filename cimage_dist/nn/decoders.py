"""Decoders: an edge from two embeddings, and hidden factors from visible ones."""

from __future__ import annotations

import itertools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist.config import ModelConfig
from cimage_dist.nn.dropout import dropout


class FactorDecoder(nn.Module):
    """F̂ = MLP(z with the hidden factors set to zero) (§5.3): every layer but the last is dropout -> Linear -> ELU, output K·C wide."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        width = cfg.num_factors * cfg.factor_dim
        sizes = [width] + [cfg.factor_hidden] * (cfg.factor_layers - 1) + [width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = cfg.factor_dropout

    def forward(self, z_nKC: Tensor, visible_K: Tensor) -> Tensor:
        """z [n, K, C], visible bool [K]: the factors given as input -> prediction of all factors [n, K, C]."""
        x = (z_nKC * visible_K.to(z_nKC.dtype).unsqueeze(-1)).flatten(1)
        for layer in self.layers[:-1]:
            x = F.elu(layer(dropout(x, self.dropout, self.training)))
        return cast(Tensor, self.layers[-1](x)).view_as(z_nKC)


class StructureDecoder(nn.Module):
    """logit(u, v) = MLP(z_u ⊙ z_v) (§5.2): every layer but the last is dropout -> Linear -> ReLU, the last is Linear to 1."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        width = cfg.num_factors * cfg.factor_dim
        sizes = [width] + [cfg.structure_hidden] * (cfg.structure_layers - 1) + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = cfg.structure_dropout

    def forward(self, z: Tensor, pairs: Tensor) -> Tensor:
        """z [N, ...] flattened per node, pairs int64 [n, 2] -> logits [n]."""
        flat = z.flatten(1)
        x = flat.index_select(0, pairs[:, 0]) * flat.index_select(0, pairs[:, 1])
        for layer in self.layers[:-1]:
            x = torch.relu(layer(dropout(x, self.dropout, self.training)))
        return cast(Tensor, self.layers[-1](x)).squeeze(-1)
