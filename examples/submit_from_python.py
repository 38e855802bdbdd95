"""Submit a recipe from Python and wait for it: `python examples/submit_from_python.py RECIPE [--site FILE | --local]`.

With --emulate, light replacements of engines and trainer run, on an embedded cluster unless a site is given. That needs
no GPU and no model.
"""

from __future__ import annotations

import argparse
import sys

import primeslurm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--site")
    parser.add_argument("--name")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="write and submit nothing")
    args = parser.parse_args()
    try:
        loaded = primeslurm.load(
            args.recipe,
            site=args.site,
            name=args.name,
            local=args.local,
            emulate=args.emulate,
            overrides={"max_steps": args.steps},
        )
        return dry_run(loaded) if args.dry_run else submit(loaded)
    except primeslurm.UsageError as error:
        for violation in error.violations:
            print(f"{violation.field}: {violation.why}", file=sys.stderr)
        return error.exit_code


def dry_run(loaded: primeslurm.LoadedRecipe) -> int:
    """Print findings and sizes without submitting. This needs neither Slurm nor the model."""
    for finding in loaded.check().findings:
        print(finding, file=sys.stderr)
    result = loaded.dry_run()
    for note in result.unasked:
        print(note, file=sys.stderr)
    totals = result.plan.totals
    print(f"{result.plan.run}: {totals.nodes} nodes, {totals.gpus} GPUs, {totals.engines} engines")
    print(f"{len(result.script.splitlines())} lines of batch script")
    return 0


def submit(loaded: primeslurm.LoadedRecipe) -> int:
    """Submit the run and wait for its end."""
    with loaded.on_cluster() as ready:  # an emulated run gets an embedded cluster, which ends with this block
        run = ready.submit()
        print(f"submitted {run.name} to {run.path}", flush=True)
        status = run.wait()
    print(f"{run.name} {status.phase}: step {status.step} of {status.max_steps}")
    return 0 if status.phase == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
