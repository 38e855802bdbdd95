"""A tool server that reports HOSTILE_PORT instead of its port; with `huge`, a file of 1 GiB."""

from __future__ import annotations

import os
import time
from pathlib import Path

if __name__ == "__main__":  # before the import of verifiers, which takes seconds
    port = os.environ["HOSTILE_PORT"]
    port_file = Path(os.environ["MCP_PORT_FILE"])
    written = port_file.with_suffix(".written")
    with written.open("wb") as handle:
        handle.write(port.encode())
        if port == "huge":
            handle.truncate(1 << 30)
    written.rename(port_file)  # atomically, because the reader is polling for the file
    time.sleep(600)

import verifiers.v1 as vf


class HostileTools(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    """Tools that never serve."""
