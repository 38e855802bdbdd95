"""Build scripts: pinned, verified, repeatable. What they fetch is not to be had here; how they do it is."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "third_party"
NAMES = sorted(path.parent.name for path in ROOT.glob("*/manifest.toml"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def build(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a build script."""
    return subprocess.run(
        ["bash", str(directory / "build.sh"), *args], capture_output=True, text=True, check=False, timeout=60
    )


def test_there_are_scripts() -> None:
    assert NAMES == ["deepep", "deepgemm", "llm-d", "nixl", "ucx"]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_pins_what_is_fetched(name: str) -> None:
    manifest = tomllib.loads((ROOT / name / "manifest.toml").read_text())
    assert {"name", "version", "url", "licence", "why"} <= set(manifest)
    assert manifest["name"] == name
    images = manifest.get("images", {})
    assert images or re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", manifest.get("sha256") or manifest["commit"])
    assert all(re.fullmatch(r"(sha256:[0-9a-f]{64})?", image["digest"]) for image in images.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_check_shows_every_command_and_changes_nothing(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "third_party")
    directory = tmp_path / "third_party" / name
    before = sorted(tmp_path.rglob("*"))
    done = build(directory, "--check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("+ ")
    assert sorted(tmp_path.rglob("*")) == before
    assert build(directory, "--wrong").returncode == 2


def test_shellcheck_passes() -> None:
    scripts = [ROOT / "lib.sh", *sorted(ROOT.glob("*/build.sh"))]
    checked = subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def small_release(directory: Path) -> tuple[Path, str]:
    """A tarball that is built as UCX is, in no time, and its checksum."""
    source = directory / "ucx-9"
    (source / "contrib").mkdir(parents=True)
    configure = (
        '#!/bin/sh\nfor word; do case $word in --prefix=*) echo "PREFIX=${word#--prefix=}" > config.mk;; esac; done\n'
    )
    (source / "contrib" / "configure-release").write_text(configure)
    (source / "contrib" / "configure-release").chmod(0o755)
    install = "mkdir -p $(PREFIX)/lib && cp libucp.so.0 $(PREFIX)/lib"
    install = f"include config.mk\nall:\n\ttouch libucp.so.0\ninstall:\n\t{install}\n"
    (source / "Makefile").write_text(install)
    tarball = directory / "ucx-9.tar.gz"
    with tarfile.open(tarball, "w:gz") as archive:
        archive.add(source, "ucx-9")
    return tarball, hashlib.sha256(tarball.read_bytes()).hexdigest()


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("curl") is None, reason="needs make and curl")
def test_a_build_verifies_installs_and_is_not_repeated(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "third_party", ignore=shutil.ignore_patterns("lib", "bin", ".built"))
    directory = tmp_path / "third_party" / "ucx"
    tarball, checksum = small_release(tmp_path)
    manifest = (directory / "manifest.toml").read_text()
    manifest = re.sub(r'url = ".*"', f'url = "{tarball.as_uri()}"', manifest)

    (directory / "manifest.toml").write_text(manifest)  # with the checksum of another release
    refused = build(directory)
    assert refused.returncode == 1 and f"has sha256 {checksum}, not " in refused.stderr
    assert not (directory / "lib").exists()

    (directory / "manifest.toml").write_text(re.sub(r'sha256 = ".*"', f'sha256 = "{checksum}"', manifest))
    done = build(directory)
    assert done.returncode == 0, done.stderr
    assert (directory / "lib" / "libucp.so.0").is_file()
    assert build(directory).stdout == "ucx 1.19.1 is built already\n"


def test_an_image_without_a_digest_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "third_party")
    directory = tmp_path / "third_party" / "llm-d"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apptainer").write_text("#!/bin/sh\nexit 9\n")
    (tools / "apptainer").chmod(0o755)
    argv = ["env", f"PATH={tools}:/usr/bin:/bin", "bash", str(directory / "build.sh")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    images = tomllib.loads((directory / "manifest.toml").read_text())["images"]
    unpinned = [image for image in images.values() if not image["digest"]]
    assert done.returncode == 1 and done.stderr.count("no digest") == len(unpinned) > 0
