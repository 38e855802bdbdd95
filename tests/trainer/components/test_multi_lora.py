"""Several adapters at once compute what each of them computes alone."""

from __future__ import annotations

import torch
from torch.nn.functional import linear
from torchtitan.models.common import Linear

from primeslurm.trainer.components.multi_lora import Assignment, MultiLora


def test_each_token_computes_with_its_own_adapter() -> None:
    torch.manual_seed(0)
    base = Linear.Config(in_features=24, out_features=40).build()
    adapters = MultiLora(base, rank=8, scales=[2.0, 0.5, 1.0, 4.0])
    x = torch.randn(3, 50, 24, requires_grad=True)
    owners = torch.randint(0, 4, (3, 50))
    owners[owners == 2] = 1  # the third adapter has no token
    assignment = Assignment.of(owners, 4)
    assert not adapters(x, assignment).any(), "fresh adapters change nothing"
    with torch.no_grad():
        adapters.b.normal_()
    together = adapters(x, assignment)
    upstream = torch.randn_like(together)
    together.backward(upstream)
    together_x, x.grad = x.grad, None

    for index, scale in enumerate((2.0, 0.5, 1.0, 4.0)):
        a, b = (t.detach()[index].clone().requires_grad_() for t in (adapters.a, adapters.b))
        mine = owners == index
        alone = linear(linear(x[mine], a.T), b) * scale
        torch.testing.assert_close(together[mine], alone)
        alone.backward(upstream[mine])
        torch.testing.assert_close(adapters.a.grad[index], a.grad)
        torch.testing.assert_close(adapters.b.grad[index], b.grad)
    torch.testing.assert_close(together_x, x.grad)
