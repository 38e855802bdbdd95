"""Run a rank of the Tinker service of a deployment: `python -m primeslurm.tinker`. SIGTERM to rank 0 ends it.

RANK and WORLD_SIZE are set if there are several ranks. Users and their API keys are files of the run directory
(`primeslurm.run.tenants`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from primeslurm.base import files
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.heartbeats import liveness
from primeslurm.tinker.key_files import KeyFiles
from primeslurm.tinker.server import prepare
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.wire.transport import secret

if TYPE_CHECKING:
    from primeslurm.trainer.distributed.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.tinker", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe of the deployment (JSON)")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", help="required for rank 0, as all below")
    parser.add_argument("--port", type=int)
    parser.add_argument("--engines", nargs="*", default=(), help="URLs of engines or routers that sample")
    arguments = parser.parse_args()
    interrupt = Interrupt()  # blocks its signal before the imports below start threads
    secret.take()
    recipe = Recipe.model_validate_json(files.read_text(arguments.recipe))
    assert recipe.tenants is not None
    model, rank, parallelism = recipe.model.path, recipe.tenants.max_rank, recipe.trainer.parallelism
    limits = PhaseLimits.of(recipe)
    liveness().enter("load", limit_s=limits.long_s)

    from primeslurm.trainer.distributed.world import alone, join

    def enter() -> World:
        return join(interrupt, limits.control_s) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else alone()

    if int(os.environ.get("RANK", "0")):
        from primeslurm.tinker.backbone import Backbone

        backbone = Backbone(model, rank, world := enter(), parallelism)
        # Rank 0 gets the signal, too, and ends this rank after the batch that is being computed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        backbone.ranks.follow()
        world.close()
        return
    server = prepare(arguments.host, arguments.port, arguments.run_dir / "tinker", engines=arguments.engines)
    with contextlib.closing(KeyFiles(arguments.run_dir)) as users:
        server.serve(model, rank, users, enter(), parallelism)


if __name__ == "__main__":
    main()
