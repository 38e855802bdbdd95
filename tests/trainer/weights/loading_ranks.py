"""One of two ranks that load distributed tensors. Prints the number of elements that it read of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join


def main() -> None:
    """Arguments: model directory, output directory."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    from primeslurm.trainer.weights.loading import Loader
    from primeslurm.trainer.weights.safetensors_header import TensorLocation
    from primeslurm.trainer.weights.tensor_files import OpenFiles, TensorFiles
    from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

    read: list[tuple[TensorLocation, int]] = []  # several threads read: what they append is not lost
    at = OpenFiles.at

    def counted(self: OpenFiles, place: TensorLocation, first: int, count: int, space: Any = None) -> torch.Tensor:
        read.append((place, count))
        return at(self, place, first, count, space)

    OpenFiles.at = counted  # type: ignore[method-assign]
    world = join(Interrupt(), timeout_s=600)
    mesh = init_device_mesh("cpu", (2,))
    files = TensorFiles.shared(Path(sys.argv[1]), world)
    names = {place: name for name, place in files.places.items()}
    names |= {codes.scales: f"{name}'s scales" for name, codes in files.four_bits.items()}
    shapes = {name: place.shape for name, place in files.places.items()}
    shapes |= {name: codes.shape for name, codes in files.four_bits.items()}
    tensors = {
        name: zeros(*shape, device_mesh=mesh, placements=[Shard(int(name.rsplit(".")[-1]))])
        for name, shape in sorted(shapes.items())
        if not name.endswith(FP8_SCALE)
    }
    with Loader(files, world.device) as loader:
        loader.fill(tensors)
    torch.save({name: tensor.full_tensor() for name, tensor in tensors.items()}, f"{sys.argv[2]}/{world.rank}")
    elements = {name: sum(count for place, count in read if names[place] == name) for name in names.values()}
    print("READ", json.dumps(elements), flush=True)
    world.close()


if __name__ == "__main__":
    main()
