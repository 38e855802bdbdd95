"""Container images with a shell, Debian's busybox and the libraries of this machine's Python, made locally."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

DOCKERFILE = """FROM scratch
COPY root /
RUN ["/bin/busybox", "--install", "-s", "/bin"]
WORKDIR /testbed
"""


def lacking() -> str:
    """Return why such images cannot be made here; empty if they can."""
    if _python().is_relative_to("/usr"):
        return "Python is the system's, which containers do not see"
    absent = [name for name in ("bash", "busybox") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else ""


def make_context(directory: Path) -> None:
    """Write the Dockerfile of an image and the directory `root` with its files."""
    root = directory / "root"
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "usr/bin", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    programs = [shutil.which("bash"), shutil.which("busybox")]
    for program in programs:
        assert program is not None
        shutil.copy(program, root / "bin")
    (root / "bin/sh").symlink_to("busybox")
    (root / "usr/bin/env").symlink_to("/bin/busybox")
    (root / "usr/bin/python3").symlink_to(_python())
    extensions = (_python().parents[1] / "lib").glob("python3*/lib-dynload/*.so")
    compiled = importlib.util.find_spec("pydantic_core._pydantic_core")  # packages of harnesses need it
    assert compiled is not None and compiled.origin is not None
    for library in _libraries("/bin/bash", _python(), compiled.origin, *extensions):
        copy = root / library.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    (directory / "Dockerfile").write_text(DOCKERFILE)


def _python() -> Path:
    return Path(sys.executable).resolve()


def _libraries(*files: str | Path) -> set[str]:
    """Return the system's libraries, as paths that the loader uses."""
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    words = {word for line in output.splitlines() if line[:1].isspace() for word in line.split() if word[:1] == "/"}
    return {word for word in words if not Path(word).is_relative_to(_python().parents[1])}
