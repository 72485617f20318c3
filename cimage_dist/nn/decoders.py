"""Decoders: an edge from two embeddings, and hidden factors from visible ones."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist.config import ModelConfig


class StructureDecoder(nn.Module):
    """logit(u, v) = MLP(z_u ⊙ z_v) (§4): every layer but the last is dropout -> Linear -> ReLU, the last is Linear to 1."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        width = cfg.num_factors * cfg.factor_dim
        sizes = [width] + [cfg.structure_hidden] * (cfg.structure_layers - 1) + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.dropout = cfg.structure_dropout

    def forward(self, z: Tensor, pairs: Tensor) -> Tensor:
        """z [N, ...] flattened per node, pairs int64 [n, 2] -> logits [n]."""
        flat = z.reshape(z.shape[0], -1)
        x = flat.index_select(0, pairs[:, 0]) * flat.index_select(0, pairs[:, 1])
        for layer in self.layers[:-1]:
            x = torch.relu(layer(F.dropout(x, self.dropout, self.training)))
        return cast(Tensor, self.layers[-1](x)).squeeze(-1)
