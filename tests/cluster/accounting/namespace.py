"""A mount namespace with an additional user, so that accounts and permissions of the machine stay unchanged.

The checkout and its Python may lie below a directory that only root may enter, such as /root. The namespace replaces
that directory by an empty one, with only the user's needs mounted inside.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = "ann"
UID = 61001


class UserNamespace:
    """Runs commands that see an additional user of this machine.

    Args:
        directory: directory for the namespace's files and the user's home, which every user may enter.
        needed: directories that the user must be able to read.

    Raises:
        OSError: this process may not create a mount namespace.
    """

    def __init__(self, directory: Path, needed: Sequence[Path]) -> None:
        self.home = directory / "home"
        self.home.mkdir()
        _chown(self.home)
        accounts = {"passwd": f"{USER}:x:{UID}:{UID}::{self.home}:/bin/bash\n", "group": f"{USER}:x:{UID}:\n"}
        mounts = []
        for name, line in accounts.items():
            file = directory / name
            file.write_text(Path("/etc", name).read_text() + line)
            mounts.append(("--bind", file, Path("/etc", name)))
        mounts += _openings(directory / "opened", [directory, *needed])
        script = "".join(f"mount {kind} {shlex.quote(f'{a}')} {shlex.quote(f'{b}')} && " for kind, a, b in mounts)
        argv = ["unshare", "--mount", "--propagation", "private", "bash", "-c", f"{script}echo ready && exec cat"]
        self._holder = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, error = self._holder.communicate()
            raise OSError(f"no mount namespace can be made here: {error.strip()}")

    def as_root(self, argv: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs a command in the namespace."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *map(str, argv)]

    def as_user(self, argv: Sequence[str | Path], env: Mapping[str, str], cwd: Path) -> list[str]:
        """Return the command line that runs a command as the ordinary user, with only these variables."""
        variables = {"HOME": str(self.home), "USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash", **env}
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        words = [f"{name}={value}" for name, value in variables.items()]
        return self.as_root([*become, "env", "-i", f"--chdir={cwd}", *words, *argv])

    def close(self) -> None:
        """End the namespace. Its processes keep it alive until they have ended."""
        self._holder.communicate()


def _openings(directory: Path, needed: Sequence[Path]) -> list[tuple[str, Path, Path]]:
    """Return mounts that make needed directories accessible."""
    stand_ins: dict[Path, Path] = {}
    inner, outer = [], []
    for path in dict.fromkeys(path.resolve() for path in needed):
        closed = next(
            (each for each in [*reversed(path.parents), path] if not each.stat().st_mode & stat.S_IXOTH), None
        )
        if closed is None:
            continue
        if closed == path:
            raise OSError(f"others may not enter {path}")
        if closed not in stand_ins:
            stand_ins[closed] = directory / str(len(stand_ins))
            outer.append(("--rbind", stand_ins[closed], closed))
        mount_point = stand_ins[closed] / path.relative_to(closed)
        mount_point.mkdir(parents=True, exist_ok=True)
        inner.append(("--rbind", path, mount_point))
    return inner + outer


def _chown(path: Path) -> None:
    os.chown(path, UID, UID)


def python_directories() -> list[Path]:
    """Return the directories of this process's Python."""
    return [Path(sys.prefix), Path(sys.base_prefix)]
