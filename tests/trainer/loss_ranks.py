"""One rank of the loss test: rows sharded over 2 and 4 ranks match whole rows in loss and gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from primeslurm.recipe.sections.losses import GspoLoss
from primeslurm.trainer.components.loss import Documents, Targets, from_recipe
from primeslurm.trainer.distributed.context_parallel import ContextParallel

SEQ_LEN = 64
LENGTHS = ((20, 3, 17, 24), (64,), (1, 1, 14, 28, 20))


def rows() -> tuple[torch.Tensor, torch.Tensor, Targets]:
    """Return whole rows: log-probabilities, mask, targets. One of four ranks has no trained token."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), SEQ_LEN)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])
    documents = Documents.of(positions)
    mask = (torch.rand(shape, generator=generator) < 0.5) & (positions != 0)
    mask[:, SEQ_LEN * 3 // 4 :] = False
    engine = -3 * torch.rand(shape, generator=generator).double()
    apart = torch.randn(documents.count, generator=generator).double()[documents.index] / 5
    targets = Targets(
        labels=torch.zeros(shape, dtype=torch.long),
        logprobs=engine,
        advantages=torch.randn(documents.count, generator=generator).double()[documents.index],
        temperatures=torch.ones(shape),
        on_policy=torch.zeros(shape, dtype=torch.bool),
        ref_logprobs=torch.zeros(shape),
        documents=documents,
    )
    return engine + apart + torch.randn(shape, generator=generator).double() / 3, mask, targets


def compare(group: Any) -> None:
    """Compare this rank's shard with the same positions of whole rows."""
    logp, mask, targets = rows()
    loss = from_recipe(GspoLoss(clip_low=0.05, clip_high=0.05))
    whole = logp.clone().requires_grad_()
    exact = loss(whole[mask], torch.zeros(int(mask.sum())), targets.apply(lambda tensor: tensor[mask]))
    exact.loss.backward()
    shared = ContextParallel("allgather", group)
    local, local_mask = shared.shard(logp).requires_grad_(), shared.shard(mask)
    own = targets.apply(shared.shard).apply(lambda tensor: tensor[local_mask])
    own = Targets(**{**vars(own), "documents": Documents(own.documents.index, own.documents.count, group)})
    sums = loss(local[local_mask], torch.zeros(int(local_mask.sum())), own)
    sums.loss.backward()
    assert whole.grad is not None and local.grad is not None
    torch.testing.assert_close(local.grad, shared.shard(whole.grad), rtol=1e-12, atol=1e-12)
    for part, all_of_it in ((sums.loss, exact.loss), *zip(sums.metrics.values(), exact.metrics.values(), strict=True)):
        total = part.detach().clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, all_of_it.detach(), rtol=1e-6, atol=1e-9)
    masked = exact.metrics["masked_fraction"].item()
    assert 0 < masked < mask.sum(), "some sequences must be outside, and some not"


def main() -> None:
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    compare(pairs[dist.get_rank() // 2])
    compare(dist.group.WORLD)
    dist.barrier()
    print("EQUAL 2 4", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
