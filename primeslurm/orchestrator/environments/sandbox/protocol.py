"""What the program within a sandbox, `inside`, says to the worker outside: each message is one of these, as JSON.

Whoever runs in a sandbox may write in its name, so nothing else than these fields is taken.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from primeslurm.wire.decoding import Count


class SandboxReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """It takes requests."""


class ProgramExited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exited"):
    """A program that it had started has ended."""

    pid: Count
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    """Exit code, or the number of the signal that ended it, below zero."""


class RequestAnswered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answered"):
    """It has done what a request asked for, or could not. Sockets that were asked for come with it."""

    id: Count
    """Of the request."""
    pid: Count | None = None
    """Of the program that was started."""
    error: str = ""
    """Why it could not; empty if it could."""


SandboxAnswer = SandboxReady | ProgramExited | RequestAnswered
