"""The trainer of a tenant's run, `python -m primeslurm.tenants.trainer`.

Exit codes: 0 = training finished, 75 = interrupted after a checkpoint, 77 = failed for good, 1 = failed (the log has
the reason). After 1 its agent restarts it, and it resumes from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from primeslurm.base import files, logs
from primeslurm.recipe import Recipe
from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.events.training import TrainerStarted, TrainerStopped
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.run.tenants import read_key, user_of
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.wire import exit_codes
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.transport import secret

log = logging.getLogger("primeslurm.tenants")


def main(argv: list[str] | None = None) -> int:
    """Train the recipe's adapter. Return the exit code. Expected errors are logged, not raised."""
    parser = argparse.ArgumentParser(prog="python -m primeslurm.tenants.trainer", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe (JSON)")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--orchestrator", required=True, help="tcp://host:port")
    arguments = parser.parse_args(argv)
    interrupt = Interrupt()  # blocks the signal before the imports below start threads
    secret.take()
    logs.configure()

    from primeslurm.tenants.loop import TenantTask
    from primeslurm.tenants.tinker_client import TinkerClient, TinkerError, connect
    from primeslurm.trainer.base.phase_timer import PhaseTimer
    from primeslurm.wire.link.trainer_link import LinkError, TrainerLink

    run_dir, attempt = arguments.run_dir, arguments.attempt
    journal = Journal(run_dir / "attempts" / str(attempt), "trainer-rank-0")
    journal.note_storage_faults()
    journal.write(TrainerStarted(os.getpid()))
    recipe = Recipe.model_validate_json(files.read_text(arguments.recipe))
    assert recipe.tenant is not None  # as the plan says
    limits = PhaseLimits.of(recipe)
    liveness().enter("load", limit_s=limits.long_s)
    try:
        key = read_key(recipe.tenant.deployment, user_of(recipe.name))
        with connect(recipe.tenant.service, key) as http:
            client = TinkerClient(http, liveness().heartbeat)
            link = TrainerLink(arguments.orchestrator, on_wait=client.wait)
            timer = PhaseTimer(journal, record=True, limits=limits)
            return TenantTask(recipe, run_dir, attempt, client, link, timer, interrupt.requested).run()
    except (TinkerError, LinkError, FloatingPointError, OSError, ValueError) as error:
        log.error("%s: %s", type(error).__name__, error)
        journal.write(TrainerStopped(reason=str(error)))
        # A restart would get the same weights, which have no finite gradient, or the same settings.
        is_final = isinstance(error, FloatingPointError | ValueError) and not isinstance(error, DamagedError)
        return exit_codes.UNRECOVERABLE if is_final else exit_codes.FAILED


if __name__ == "__main__":
    sys.exit(main())
