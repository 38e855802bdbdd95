"""The bubblewrap command line of a sandbox, which decides what programs see of the node.

Programs see the system read-only, the worker's Python and packages, and a writable directory tree in memory. They do
not see home directories, the run directory, the node's /tmp or the node's processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from primeslurm.base import errors

WORKDIR = "/app"
HOME = "/home/user"
_UID = "1000"
# Size of /dev/shm, as in docker.
_SHM_BYTES = 64 << 20
# /dev/shm gets at most this fraction of the disk limit.
_MAX_SHM_FRACTION = 0.25
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Entries of /etc that programs read. All of them are readable by every user of the node.
_ETC = """
    alternatives ca-certificates ca-certificates.conf crypto-policies debian_version default/locale ld.so.cache
    ld.so.conf ld.so.conf.d localtime locale.alias mime.types nsswitch.conf os-release pki profile protocols python3
    python3.11 redhat-release services shells ssl terminfo timezone
"""
_PASSWD = f"root:x:0:0::/root:/bin/sh\nuser:x:{_UID}:{_UID}::{HOME}:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n"
_GROUP = f"root:x:0:\nuser:x:{_UID}:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
# Files that replace the node's.
FILES = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": _HOSTS}
# Directories that are never shown as a whole, even if Python's path names them.
NEVER_SHOWN = (Path("/"), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/etc"), Path.home())


def python_paths() -> tuple[Path, ...]:
    """Return the directories of the worker's interpreter and of everything it can import."""
    package = Path(errors.__file__).parents[1]
    from_variable = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # sys.path[0] is where Python was started. An editable installation puts its whole checkout on the path; of our own
    # checkout, only the package is shown.
    importable = [Path(entry) for entry in sys.path[1:] if entry and Path(entry) != package.parent]
    paths = dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), package, *from_variable, *importable])
    return tuple(path for path in paths if path.is_absolute() and path.is_dir() and path not in NEVER_SHOWN)


def bwrap_args(
    visible: Iterable[Path], hidden: Iterable[Path], files: dict[str, int], disk: int, open_network: bool
) -> list[str]:
    """Return the command line, up to the program.

    Args:
        hidden: directories that stay hidden even below a visible one.
        files: path in the sandbox -> file descriptor with its content.
        disk: most bytes that programs may write, to /dev/shm and everywhere else together.
    """
    # /dev/shm is a file system of its own, because bubblewrap makes it itself: it cannot be a link into /.
    shm = min(_SHM_BYTES, int(_MAX_SHM_FRACTION * disk))
    # No nested user namespaces: in one, a program would have all capabilities, and more of the kernel to attack.
    args = ["bwrap", "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    args += [] if open_network else ["--unshare-net"]
    # --new-session: without a terminal, programs cannot push input to one (CVE-2017-5226).
    args += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    args += ["--hostname", "sandbox", "--uid", _UID, "--gid", _UID]
    # bubblewrap mounts in the order of its arguments: the root in memory, visible directories, then hidden ones.
    args += ["--size", str(disk - shm), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    # On merged-/usr systems these are links, which must exist inside, too.
    args += [arg for link in _SYSTEM_LINKS for arg in _link_args(link)]
    args += [arg for name in (*_ETC.split(), *(["resolv.conf"] if open_network else [])) for arg in _etc_args(name)]
    args += [arg for path, fd in files.items() for arg in ("--file", str(fd), path)]
    absolute = [path.absolute() for path in visible]
    shown = list(outermost(path for path in absolute if path.exists() and not path.is_relative_to("/usr")))
    args += [arg for path in shown for arg in ("--ro-bind", str(path), str(path))]
    # An empty read-only directory covers a hidden one, unless that would also cover a visible directory below it.
    real = [path.resolve() for path in shown]
    below = [path for path in (each.resolve() for each in hidden) if any(path.is_relative_to(other) for other in real)]
    for path in outermost(each for each in below if not any(each in other.parents for other in real)):
        if path.exists():
            args += ["--tmpfs", str(path), "--remount-ro", str(path)]
    # A process list of its own, and a /dev without the node's devices.
    args += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for directory in ("/tmp", "/var/tmp", "/run", HOME, WORKDIR):
        args += ["--dir", directory]
    return [*args, "--chdir", WORKDIR]


def _link_args(path: str) -> list[str]:
    if Path(path).is_symlink():
        return ["--symlink", str(Path(path).readlink()), path]
    return ["--ro-bind-try", path, path]


def _etc_args(name: str) -> list[str]:
    path = Path("/etc") / name
    return ["--ro-bind", str(path.resolve()), str(path)] if path.exists() else []


def outermost(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths that are not below another one."""
    outer_paths: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(outer) for outer in outer_paths):
            outer_paths.append(path)
            yield path
