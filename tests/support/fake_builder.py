"""A fake of podman, buildah, docker and apptainer. Images are copies of Dockerfiles, and no container runs.

It does what real builders do not do on request: fail, die half-way, or wait for another build. The Dockerfile controls
the build: `RUN false` fails after `LABEL lines=` lines; `LABEL killed` ends the command that requested a SIF half-way,
once; `LABEL beside=NAME` waits until a build of NAME has begun.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

WAIT_S = 60.0


def install(directory: Path, *names: str) -> Path:
    """Write commands with these names, which log their arguments to `asked`. Return their directory."""
    directory.mkdir(exist_ok=True)
    for name in names:
        path = directory / name
        path.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
        path.chmod(0o755)
    return directory


def main(tool: str, words: list[str], store: Path) -> int:
    store.mkdir(exist_ok=True)
    with (store.parent / "asked").open("a") as log:
        print(shlex.join([tool, *words]), file=log)
    image = store / next((word for word in words if word.startswith("localhost/")), "none").replace("/", "_")
    if tool == "apptainer":
        return convert(Path(words[-2]), Path(words[-1].partition(":")[2]), store)
    if words[0] == "build":
        return build(Path(words[-1], "Dockerfile").read_text(), image, store)
    if words[0] in ("save", "push"):
        archive = words[-1].partition(":")[2] if words[0] == "push" else words[words.index("--output") + 1]
        Path(archive).write_text(image.read_text())
    elif words[0] == "rmi":
        image.unlink()
    elif "inspect" in words:
        if not image.exists():
            return 125
        print(next((line.split()[1] for line in image.read_text().splitlines() if line.startswith("WORKDIR")), ""))
    return 0


def build(dockerfile: str, image: Path, store: Path) -> int:
    name = dockerfile.partition("LABEL name=")[2].split("\n")[0]
    (store / f"begun-{name}").touch()
    if other := dockerfile.partition("LABEL beside=")[2].split("\n")[0]:
        ends = time.monotonic() + WAIT_S
        while not (store / f"begun-{other}").exists():
            if time.monotonic() > ends:
                return 9
            time.sleep(0.02)
    if "RUN false" in dockerfile:
        lines = int(dockerfile.partition("LABEL lines=")[2].split("\n")[0] or 0)
        print(*(f"line {number}" for number in range(lines)), sep="\n", end="\n" * bool(lines))
        print("STEP 2: RUN false\nError: building at STEP 2: exit status 1", file=sys.stderr)
        return 1
    image.write_text(dockerfile)
    return 0


def convert(sif: Path, archive: Path, store: Path) -> int:
    """Convert an exported image to a SIF."""
    text = archive.read_text() if archive.is_file() else f"FROM {archive}\n"  # an image in a registry
    sif.write_text(text[: len(text) // 2])
    if "LABEL killed" in text and not (store / "killed").exists():
        (store / "killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
    sif.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:], Path(sys.argv[0]).parent / "store"))
