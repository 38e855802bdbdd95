"""Messages that `sandbox_init` sends to the worker, as JSON.

Any program in the sandbox can forge them. The worker therefore accepts these fields and nothing else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from primeslurm.wire.decoding import Count


class SandboxReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The sandbox accepts requests."""


class ProgramExited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exited"):
    """A program of the sandbox has ended."""

    pid: Count
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    """Exit code, or minus the number of the signal that ended the program."""


class RequestAnswered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answered"):
    """A request was carried out or failed. A requested socket is attached to this message."""

    id: Count
    """Number of the request."""
    pid: Count | None = None
    """Process that a spawn request started, as numbered in the sandbox."""
    error: str = ""
    """Why the request failed; empty on success."""


SandboxAnswer = SandboxReady | ProgramExited | RequestAnswered
