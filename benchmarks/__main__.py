"""Run a benchmark: `python -m benchmarks NAME [ARGUMENTS]`, from the root of the checkout. Without a name: list all."""

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
    """The first line of what each benchmark says of itself, by name. Modules without a `main` are no benchmarks."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def end_in_order() -> None:
    """Have `timeout` end a benchmark in order: a run that it left behind would keep its GPUs from the next."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main(words: list[str]) -> None:
    """List the benchmarks, or run one with the rest of the words."""
    known = benchmarks()
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [ARGUMENTS]\n")
        print("\n".join(f"{name:20}{line}" for name, line in known.items()))
    elif words[0] not in known:
        sys.exit(f"error: no benchmark is named {words[0]!r}; there are {', '.join(known)}")
    else:
        # Processes that are started let in who knows this; those of a run have one from their agent.
        os.environ.setdefault("PRIMESLURM_SECRET", secrets.token_hex(32))
        end_in_order()
        held = temporary.use_own()  # noqa: F841  (sockets of an orchestrator that is killed would stay)
        importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
