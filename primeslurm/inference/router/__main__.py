"""Starts a router: `python -m primeslurm.inference.router --name NAME --attempt-dir DIR --health-port PORT OPTIONS`.

`--health-port` is the port of the health endpoint. All other options are passed to vllm-router.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from primeslurm.base import logs
from primeslurm.inference.router.supervisor import REFUSED_BYTES, Address, RouterSupervisor
from primeslurm.records.journal import Journal


def main(argv: Sequence[str]) -> int:
    """Run the supervisor until the router ends, and return the router's exit code."""
    logs.configure()
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--name", required=True)
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--health-port", type=int, required=True)
    parser.add_argument("--remembered-bytes", type=int, default=REFUSED_BYTES)
    ours, options = parser.parse_known_args(argv)
    shared = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    shared.add_argument("--host", required=True)
    shared.add_argument("--port", type=int, required=True)
    listen, _ = shared.parse_known_args(options)
    journal = Journal(ours.attempt_dir, ours.name)
    journal.note_storage_faults()
    router, endpoint = Address(listen.host, listen.port), Address(listen.host, ours.health_port)
    supervisor = RouterSupervisor(options, router, endpoint, journal, ours.remembered_bytes)
    code = asyncio.run(supervisor.run())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
