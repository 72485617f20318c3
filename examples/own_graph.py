"""From edges and features in memory to embeddings and their nearest neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from cimage_dist import Pretrainer, load_config


def main(num_nodes: int = 600, epochs: int = 10) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(3, (num_nodes,), generator=generator)
    x = F.one_hot(group, 3) + torch.randn(num_nodes, 3, generator=generator)
    x = torch.cat([x, torch.randn(num_nodes, 13, generator=generator)], dim=1)
    ends = torch.randint(num_nodes, (2, 12 * num_nodes), generator=generator)
    same = group[ends[0]] == group[ends[1]]
    keep = same | (torch.rand(ends.shape[1], generator=generator) < 0.2)
    graph = Data(x=x, edge_index=ends[:, keep], num_nodes=num_nodes)

    cfg = load_config(overrides=["data.name=example", f"train.epochs={epochs}"])
    z = F.normalize(Pretrainer(cfg).fit(graph).embed(graph), dim=1)
    near = (z @ z[:5].t()).topk(6, dim=0).indices[1:].t()
    for node, others in enumerate(near.tolist()):
        print(f"node {node} of group {int(group[node])}: nearest {others}")
    print(f"neighbours in the same group: {(group[near] == group[:5, None]).double().mean():.0%}")
    return z


if __name__ == "__main__":
    main()
