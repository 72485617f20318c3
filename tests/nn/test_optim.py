"""Our Adam is torch's to the bit, and does not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cimage_dist.nn.model import Adam


def trained(kind: type[torch.optim.Adam], fused: bool) -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.Linear(7, 5)
    optimizer = kind(layer.parameters(), lr=0.01, weight_decay=0.1, fused=fused)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        layer(torch.randn(3, 7)).square().sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return layer.weight.detach()


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_bits(fused: bool) -> None:
    assert torch.equal(trained(Adam, fused), trained(torch.optim.Adam, fused))


def test_the_compiler_stays_out() -> None:
    code = (
        "import sys; from tests.nn.test_optim import Adam, trained; trained(Adam, True); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
