"""The orchestrator's command line, `python -m primeslurm.orchestrator`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from primeslurm.base import files, logs
from primeslurm.base.errors import PrimeslurmError
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.evaluation.evaluation_orchestrator import EvaluationOrchestrator
from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
from primeslurm.recipe import Recipe
from primeslurm.wire.transport import secret


def main(argv: list[str] | None = None) -> int:
    """Run the orchestrator of one attempt. Returns 0 if the run is complete, else an exit code of `wire.exits`."""
    options = _parser().parse_args(argv)
    secret.take()
    logs.configure()
    recipe = Recipe.model_validate_json(files.read_bytes(options.recipe))
    arguments = OrchestratorArguments(
        run_dir=options.run_dir,
        attempt=options.attempt,
        run_id=options.run_id,
        bind=options.bind,
        env_bind=options.env_bind,
        routers=options.routers.split(","),
        engines=options.engines.split(","),
        teachers=options.teachers.split(",") if options.teachers else (),
    )
    try:
        asyncio.run(_run(recipe, arguments))
    except BaseExceptionGroup as group:
        error = _first_own_error(group)
        if error is None:
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    except PrimeslurmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


async def _run(recipe: Recipe, arguments: OrchestratorArguments) -> None:
    kind = EvaluationOrchestrator if recipe.task == "eval" else OrchestratorPipeline
    with files.within(files.RETRY_S):  # reads may block here, because nothing else runs on the event loop yet
        orchestrator = kind(recipe, arguments)
    await orchestrator.run()


def _first_own_error(error: BaseException) -> PrimeslurmError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((first for inner in error.exceptions if (first := _first_own_error(inner))), None)
    return error if isinstance(error, PrimeslurmError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="primeslurm.orchestrator")
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe, JSON")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--bind", required=True, help="ZMQ address for the trainer")
    parser.add_argument("--env-bind", required=True, help="ZMQ address for the environment workers")
    parser.add_argument("--routers", required=True, help="process names, comma-separated")
    parser.add_argument("--engines", required=True, help="process names, comma-separated")
    parser.add_argument("--teachers", default="", help="process names, comma-separated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
