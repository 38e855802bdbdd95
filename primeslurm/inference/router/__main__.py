"""Keep a router: `python -m primeslurm.inference.router --name NAME --attempt-dir DIR --door PORT OPTIONS`.

All other options are vllm-router's; `--host` is also the keeper's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from primeslurm.inference.router.supervisor import REMEMBERED_BYTES, Address, RouterSupervisor
from primeslurm.records.journal import Journal


def main(argv: Sequence[str]) -> int:
    """Keep a router until it ends, and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    own.add_argument("--name", required=True)
    own.add_argument("--attempt-dir", type=Path, required=True)
    own.add_argument("--door", type=int, required=True)
    own.add_argument("--remembered-bytes", type=int, default=REMEMBERED_BYTES)
    mine, options = own.parse_known_args(argv)
    shared = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    shared.add_argument("--host", required=True)
    shared.add_argument("--port", type=int, required=True)
    where, _ = shared.parse_known_args(options)
    journal = Journal(mine.attempt_dir, mine.name)
    journal.note_storage_faults()
    router, door = Address(where.host, where.port), Address(where.host, mine.door)
    keeper = RouterSupervisor(options, router, door, journal, mine.remembered_bytes)
    code = asyncio.run(keeper.run())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
