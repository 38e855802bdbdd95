"""Results go to stdout, everything else to stderr. Errors become one message and an exit code."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict
from typing import Any

from primeslurm.base.errors import PrimeslurmError, UsageError

# Control characters except tab and newline, including C1, and marks that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Remove characters that control a terminal: rollouts, engines or nodes may have written them."""
    return _CONTROL.sub("", text)


def visible(text: str) -> str:
    r"""Return a text like `plain`, but with control characters written out, such as `\x1b`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. Numbers that are not finite become null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    # JSON has no NaN and no infinity, although Python would write them.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note(text: str) -> None:
    """Print a line for people on stderr."""
    print(plain(text), file=sys.stderr)


def warn(error: PrimeslurmError) -> None:
    note(f"warning: {error}")


def report_json(error: PrimeslurmError) -> None:
    """Print an error as JSON on stdout, for scripts with `--json`."""
    violations = error.violations if isinstance(error, UsageError) else ()
    print_json({"error": str(error), "exit_code": error.exit_code, "violations": [asdict(v) for v in violations]})


def report(error: PrimeslurmError) -> None:
    """Print an error as one message on stderr, with a line for each violation."""
    lines = [str(v) for v in error.violations] if isinstance(error, UsageError) else str(error).splitlines()
    # One problem fits on the line of the error. More are listed below a headline.
    if len(lines) == 1:
        note(f"error: {lines[0]}")
        return
    note(f"error: {len(lines)} problems" if isinstance(error, UsageError) else f"error: {lines[0]}")
    for line in lines if isinstance(error, UsageError) else lines[1:]:
        note(f"  {line}")
