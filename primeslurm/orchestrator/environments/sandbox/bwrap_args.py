"""What a sandbox sees of the node, as a command line of bubblewrap. Pure but for looking at what exists.

Programs get the system read-only, the worker's Python and the packages it may import, and a directory tree of their
own in memory. There are no home directories, no run directory, no /tmp and no processes of the node in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from primeslurm.base import errors

WORKDIR = "/app"
HOME = "/home/user"
_USER = "1000"
_SHM = 64 << 20
"""Bytes of /dev/shm, of those that programs may write: as many as containers of docker have."""
_LARGEST_SHM = 0.25
"""It gets no larger share of them."""
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "default/locale",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "locale.alias",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki",
    "profile",
    "protocols",
    "python3",
    "python3.11",
    "redhat-release",
    "services",
    "shells",
    "ssl",
    "terminfo",
    "timezone",
)
"""What programs ask of /etc; nothing there that only its owner may read."""
_PASSWD = f"root:x:0:0::/root:/bin/sh\nuser:x:{_USER}:{_USER}::{HOME}:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n"
_GROUP = f"root:x:0:\nuser:x:{_USER}:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
NEVER = (Path("/"), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/etc"), Path.home())
FILES = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP, "/etc/hosts": _HOSTS}
"""Files that a sandbox gets instead of the node's."""


def python_paths() -> tuple[Path, ...]:
    """The worker's interpreter and what it imports: prefixes, packages, this package itself."""
    own = Path(errors.__file__).parent
    asked = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # The first entry is where Python was started. An editable installation puts a checkout on the path: of ours, only
    # the package.
    installed = [Path(entry) for entry in sys.path[1:] if entry and Path(entry) != own.parent]
    found = dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), own, *asked, *installed])
    return tuple(path for path in found if path.is_absolute() and path.is_dir() and path not in NEVER)


def bubblewrap(
    visible: Iterable[Path], hidden: Iterable[Path], files: dict[str, int], disk: int, open_network: bool
) -> list[str]:
    """Make the command line up to the program.

    Args:
        visible: directories of the node that programs may read.
        hidden: directories that stay out of sight even where they lie below one of these.
        files: path in the sandbox to the descriptor that its content is read from.
        disk: bytes that programs may write: to /dev/shm, which is another file system, and everywhere else, in all.
        open_network: programs share the node's network.
    """
    shm = min(_SHM, int(_LARGEST_SHM * disk))  # bubblewrap makes the directory itself: it can be no link into /
    network = [] if open_network else ["--unshare-net"]
    words = ["bwrap", "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts", *network]
    words += [
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
    ]
    words += ["--uid", _USER, "--gid", _USER, "--size", str(disk - shm), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    words += [word for link in _LINKS for word in _link(link)]
    words += [word for name in (*_ETC, *(["resolv.conf"] if open_network else [])) for word in _etc(name)]
    words += [word for path, fd in files.items() for word in ("--file", str(fd), path)]
    shown = list(
        outermost(path for path in map(Path.absolute, visible) if path.exists() and not path.is_relative_to("/usr"))
    )
    words += [word for path in shown for word in ("--ro-bind", str(path), str(path))]
    for path in outermost(path.resolve() for path in hidden):
        below = any(path.is_relative_to(place.resolve()) for place in shown)
        if below and path.exists() and not any(place.resolve().is_relative_to(path) for place in shown):
            words += ["--tmpfs", str(path), "--remount-ro", str(path)]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for made in ("/tmp", "/var/tmp", "/run", HOME, WORKDIR):
        words += ["--dir", made]
    return [*words, "--chdir", WORKDIR]


def _link(path: str) -> list[str]:
    if Path(path).is_symlink():
        return ["--symlink", str(Path(path).readlink()), path]
    return ["--ro-bind-try", path, path]


def _etc(name: str) -> list[str]:
    path = Path("/etc") / name
    return ["--ro-bind", str(path.resolve()), str(path)] if path.exists() else []


def outermost(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield paths, and leave out what lies below another one."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
            yield path
