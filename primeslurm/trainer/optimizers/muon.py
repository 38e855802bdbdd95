"""The Muon optimizer for sharded matrices and stacks of matrices. Its update is the orthogonalized momentum.

Update: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. It is scaled to the size of
an AdamW update as in J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, so that both optimizers can
share a learning rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Move the singular values of matrices [..., rows, columns] close to 1, by five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for DTensors [rows, columns], or [matrices, rows, columns] such as experts.

    Orthogonalization needs whole matrices. Matrices of equal shape exchange their shards, so that each rank
    orthogonalizes different ones. Stacks that are sharded between matrices stay where they are.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(named, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient. A collective. Ignores the closure."""
        with torch.no_grad():
            for group in self.param_groups:
                named = zip(group["param_names"], group["params"], strict=True)
                trained = [(name, parameter) for name, parameter in named if parameter.grad is not None]
                for together in bunches(trained):
                    self._update([parameter for _, parameter in together], group)

    def _update(self, together: list[Any], group: dict[str, Any]) -> None:
        momenta = [self._momentum(parameter, group["momentum"]) for parameter in together]
        for parameter, direction in zip(together, self._directions(together, momenta), strict=True):
            # Gives the update the root mean square of a typical AdamW update (arXiv 2502.16982, section 2.2).
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(direction, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Any, momentum: float) -> torch.Tensor:
        """Update the momentum, and return this rank's shard of the Nesterov direction."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average, gradient = state["momentum_buffer"].to_local(), parameter.grad.to_local()
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)

    def _directions(self, together: list[Any], momenta: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        first = together[0]
        if first.ndim == 3:
            return [self._direction(first, first.shape, first.placements, momenta[0])]
        shape = torch.Size((len(together), *first.shape))
        placements = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in first.placements]
        return self._direction(first, shape, placements, torch.stack(momenta)).unbind()

    def _direction(self, like: Any, shape: torch.Size, placements: Any, local: torch.Tensor) -> torch.Tensor:
        """Orthogonalize a stack of matrices from this rank's shard `local`. Return this rank's shard of the result."""
        mesh, stride = like.device_mesh, torch.empty(shape, device="meta").stride()
        stack = DTensor.from_local(local.to(self._dtype), mesh, placements, shape=shape, stride=stride)
        whole = stack.redistribute(placements=_whole(placements, like.ndim))
        result = orthogonalize(whole.to_local())
        back = DTensor.from_local(result, mesh, whole.placements, shape=shape, stride=stride)
        return back.redistribute(placements=placements).to_local()


def _whole(placements: Any, ndim: int) -> list[Any]:
    """Return placements of a stack [matrices, rows, columns] that do not split matrices."""
    # Stacked parameters are exchanged for whole matrices. Experts that are split have fewer matrices than ranks, so
    # they are gathered.
    place = Shard(0) if ndim == 2 else Replicate()
    return [place if isinstance(old, Shard) and old.dim > 0 else old for old in placements]


def bunches(named: Iterable[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Group parameters (DTensors) of equal shape and placement, as many per group as there are ranks to share them."""
    alike: dict[Any, list[tuple[str, Any]]] = defaultdict(list)
    for name, parameter in named:
        alike[parameter.shape, parameter.device_mesh, parameter.placements].append((name, parameter))
    for (shape, mesh, _), parameters in alike.items():
        size = mesh.size() if len(shape) == 2 else 1
        for start in range(0, len(parameters), size):
            yield parameters[start : start + size]
