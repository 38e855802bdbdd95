"""Run the Tinker service of a deployment: `python -m primeslurm.tinker`. SIGTERM ends it.

Users and their API keys are files of the run directory (`primeslurm.run.tenants`).
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from primeslurm.tinker.key_files import KeyFiles
from primeslurm.tinker.server import prepare
from primeslurm.wire.transport import secret


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m primeslurm.tinker", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-rank", type=int, required=True)
    parser.add_argument("--engines", nargs="*", default=(), help="URLs of engines or routers that sample")
    arguments = parser.parse_args()
    secret.take()
    server = prepare(arguments.host, arguments.port, arguments.run_dir / "tinker", engines=arguments.engines)
    with contextlib.closing(KeyFiles(arguments.run_dir)) as users:
        server.serve(arguments.model, arguments.max_rank, users)


if __name__ == "__main__":
    main()
