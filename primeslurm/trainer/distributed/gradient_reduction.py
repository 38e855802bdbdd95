"""When FSDP sums gradients over ranks and splits them: after each micro batch, or after the last one of a step."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reduce_after(model: nn.Module, *, last: bool, stays_gathered: bool) -> None:
    """Say of the next micro batch whether gradients are reduced after it; if not, they are added up in float32.

    Args:
        model: whose micro batch it is.
        last: whether it is the last one of its step.
        stays_gathered: whether weights are gathered once for forward and backward pass: they then stay so until the
            last micro batch, too.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)
            if stays_gathered:
                module.set_reshard_after_backward(last, recurse=False)
