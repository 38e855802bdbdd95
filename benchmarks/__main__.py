"""Runs a benchmark: `python -m benchmarks NAME [ARGUMENTS]` at the root of the checkout. No NAME lists them."""

from __future__ import annotations

import ast
import importlib
import os
import secrets
import signal
import sys
from pathlib import Path

from benchmarks.support import temporary


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by name. Modules without `main` are not benchmarks."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def end_in_order() -> None:
    """Turn SIGTERM (of `timeout`) into an orderly exit, because a run that stays behind would keep its GPUs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main(words: list[str]) -> None:
    known = benchmarks()
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [ARGUMENTS]\n")
        print("\n".join(f"{name:20}{line}" for name, line in known.items()))
    elif words[0] not in known:
        sys.exit(f"error: no benchmark is named {words[0]!r}; there are {', '.join(known)}")
    else:
        # Child processes authenticate with this secret. Processes of a run get one from their agent.
        os.environ.setdefault("PRIMESLURM_SECRET", secrets.token_hex(32))
        end_in_order()
        held = temporary.use_own()  # noqa: F841  (sockets of an orchestrator that is killed would stay)
        importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
