"""One rank of the transfer test: build the policy in each layout, publish it, and send it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join
from primeslurm.trainer.weight_senders.collective_sender import Sender
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.link.trainer_link import TrainerLink


def main() -> None:
    """Arguments: orchestrator address, then directories with a recipe.json."""
    import torch
    from torch.distributed.tensor import DTensor

    world = join(Interrupt(), timeout_s=600)
    link = TrainerLink(sys.argv[1])
    gather = DTensor.full_tensor
    gathered = []

    def counted(tensor: DTensor) -> torch.Tensor:
        whole = gather(tensor)
        gathered.append(whole.numel())
        return whole

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    for number, directory in enumerate(map(Path, sys.argv[2:])):
        policy = build(Recipe.model_validate_json((directory / "recipe.json").read_text()), world)
        encoding = Encoding(torch.float32, stored=policy.stored_fp8)
        publisher = Publisher(policy, directory, encoding, 1, world, whole=lambda version: version == 1)
        publisher.publish(1)
        publisher.publish(2)
        print("GATHERED", json.dumps([directory.name, max(gathered)]), flush=True)
        gathered.clear()
        sender = Sender(policy, encoding, link, world, 60)
        layers = sender.copy() if number % 2 else None  # as for the last version, and for a repeated one
        if layers is not None:
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.zero_()  # as the next step changes it, while the copy is sent
        sessions = sender.send(1, layers)
        print("SENT", json.dumps([directory.name, sessions]), flush=True)
    world.close()


if __name__ == "__main__":
    main()
