from __future__ import annotations

import math

import torch

from cimage_dist.config import ModelConfig
from cimage_dist.losses import structure_loss
from cimage_dist.nn.model import StructureDecoder
from cimage_dist.types import Mean


def test_structure_loss_by_hand():
    pos, neg = structure_loss(torch.tensor([0.0, 2.0]), torch.tensor([-1.0]))
    assert math.isclose(float(pos.total), math.log(2) + math.log1p(math.exp(-2)), rel_tol=1e-6)
    assert math.isclose(float(neg.value()), math.log1p(math.exp(-1)), rel_tol=1e-6)
    assert (pos.count, neg.count) == (2, 1)


def test_structure_loss_survives_huge_logits_and_empty_inputs():
    pos, neg = structure_loss(torch.tensor([1e9, -1e9]), torch.empty(0, requires_grad=True))
    assert float(pos.total) == 1e9
    value = neg.value()
    value.backward()
    assert float(value.detach()) == 0.0


def test_mean_of_nothing_is_zero():
    assert float(Mean(torch.tensor(0.0), 0).value()) == 0.0


def test_decoder_is_symmetric_in_the_pair_and_has_the_asked_layers():
    decoder = StructureDecoder(
        ModelConfig(num_factors=2, factor_dim=3, structure_layers=3, structure_hidden=5)
    ).eval()
    assert [tuple(layer.weight.shape) for layer in decoder.layers] == [(5, 6), (5, 5), (1, 5)]
    z = torch.randn(4, 2, 3)
    pairs = torch.tensor([[0, 1], [2, 3]])
    torch.testing.assert_close(decoder(z, pairs), decoder(z, pairs.flip(1)))
    assert decoder(z, torch.empty(0, 2, dtype=torch.int64)).shape == (0,)
