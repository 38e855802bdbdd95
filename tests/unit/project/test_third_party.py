"""Build scripts are pinned, verified and repeatable. Their downloads are replaced here."""

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
    return subprocess.run(["bash", str(directory / "build.sh"), *args], capture_output=True, text=True, check=False)


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
def test_check_prints_commands_and_changes_nothing(name: str, tmp_path: Path) -> None:
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
    """Return a tarball that builds like UCX, but quickly, and its checksum."""
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
def test_build_verifies_and_installs_once(tmp_path: Path) -> None:
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
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    images = tomllib.loads((directory / "manifest.toml").read_text())["images"]
    unpinned = [image for image in images.values() if not image["digest"]]
    assert done.returncode == 1 and done.stderr.count("no digest") == len(unpinned) > 0


PIP = """#!/bin/sh
# pip's part of a build, in no time: NCCL is there, and a "wheel" is the list of what the sources hold.
case "$*" in
    "-m pip show"*) echo "Version: 2.30.7" ;;
    "-m pip wheel"*) for word; do case $word in --wheel-dir=*) out=${word#--wheel-dir=};; esac; last=$word; done
        mkdir -p "$out" && (cd "$last" && find . -name .git -prune -o -type f -print | sort) > "$out/deep_ep.whl" ;;
    "-m pip"*) ;;
    *) exec %s "$@" ;;
esac
"""


@pytest.mark.parametrize(("programs", "code"), [(("uv",), 0), ((), 1)])
def test_a_build_lets_uv_install_a_missing_pip(programs: tuple[str, ...], code: int, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(
        f'#!/bin/sh\ncase "$*" in "-m pip"*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac\n'
    )
    (tmp_path / "uv").write_text('#!/bin/sh\necho "uv was told: $*"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    if not programs:
        (tmp_path / "uv").unlink()
    script = f"source {ROOT}/lib.sh; need_pip"
    bash = tmp_path / "build.sh"
    (tmp_path / "manifest.toml").write_text('name = "x"\nversion = "1"\n')
    bash.write_text(script)
    argv = ["env", f"PATH={tmp_path}:/usr/bin:/bin", "bash", "-e", str(bash)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    expected = f"uv was told: pip install --quiet --python {tmp_path}/python3 pip"
    assert expected in done.stdout if programs else "x: python3 has no pip" in done.stderr


class Sources:
    """A repository with a submodule, not cloned yet, and a directory that builds DeepEP from them."""

    def __init__(self, directory: Path) -> None:
        shutil.copytree(ROOT, directory / "third_party", ignore=shutil.ignore_patterns(".built", "wheels", "nvshmem"))
        self.build = directory / "third_party" / "deepep"
        self.library, self.main = directory / "fmt", directory / "deepep"
        self.inner = self.commit(self.library, "format.h")
        self.pinned = self.commit(self.main, "kernel.cu", f"160000,{self.inner},third-party/fmt")
        self.commit(self.main, "later.cu")
        self.tools = directory / "bin"
        self.tools.mkdir()
        for name, text in {"python3": PIP % sys.executable, "nvcc": "#!/bin/sh\n"}.items():
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        self.pin(self.pinned)

    @staticmethod
    def git(directory: Path, *args: str) -> str:
        """Run git with an anonymous author."""
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", "-C", directory, *who, *args], check=True, capture_output=True, text=True).stdout

    def commit(self, directory: Path, name: str, submodule: str = "") -> str:
        """Commit one more file, and optionally a submodule."""
        directory.mkdir(exist_ok=True)
        self.git(directory, "init", "--quiet")
        (directory / name).touch()
        self.git(directory, "add", name)
        if submodule:
            self.git(directory, "update-index", "--add", "--cacheinfo", submodule)
        self.git(directory, "commit", "--quiet", "--message", name)
        return self.git(directory, "rev-parse", "HEAD").strip()

    def pin(self, commit: str) -> None:
        """Set the commit in the manifest."""
        manifest = self.build / "manifest.toml"
        manifest.write_text(re.sub(r'(?m)^commit = ".*"', f'commit = "{commit}"', manifest.read_text()))

    def run(self, *sources: Path) -> subprocess.CompletedProcess[str]:
        """Run DeepEP's build script with sources."""
        words = [word for source in sources for word in ("--source", str(source))]
        argv = ["env", f"PATH={self.tools}:/usr/bin:/bin", "bash", str(self.build / "build.sh"), *words]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def built(self) -> str:
        """Return the files from which the wheel was built."""
        return (self.build / "wheels" / "deep_ep.whl").read_text()


needs_git = pytest.mark.skipif(
    any(shutil.which(name, path="/usr/bin:/bin") is None for name in ("git", "gcc")), reason="needs git and gcc"
)


@needs_git
def test_sources_that_are_there_are_built_at_the_pinned_commit(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    done = sources.run(sources.main, sources.library)
    assert done.returncode == 0, done.stderr
    assert sources.built() == "./kernel.cu\n./third-party/fmt/format.h\n"  # not later.cu, which is checked out
    assert sources.run(sources.main).stdout.endswith(" is built already\n")


@needs_git
@pytest.mark.parametrize("bare", [False, True], ids=["checkout", "git directory"])
def test_checkout_source_includes_submodules(tmp_path: Path, bare: bool) -> None:
    sources = Sources(tmp_path)
    sources.git(sources.main, "clone", "--quiet", str(sources.library), "third-party/fmt")
    source = sources.main / ".git" if bare else sources.main
    done = sources.run(source)
    if bare:
        missing = f"deepep: no --source has commit {sources.inner} of its submodule third-party/fmt: {source}"
        assert done.returncode == 1 and missing in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "fmt/format.h" in sources.built()


@needs_git
def test_problems_of_sources_are_reported(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    sources.pin("0" * 40)
    done = sources.run(sources.main, sources.library)
    assert done.returncode == 1 and f"no --source has commit {'0' * 40} of deepep: " in done.stderr
    for place in (tmp_path / "nowhere", sources.tools):
        done = sources.run(place)
        assert done.returncode == 2 and f"--source {place}: no git repository" in done.stderr
    (sources.tools / "nvcc").unlink()
    done = sources.run(sources.main)
    assert done.returncode == 1 and done.stderr == "deepep: nvcc is not installed\n"
    done = build(ROOT / "ucx", "--source", str(sources.main))
    assert done.returncode == 2 and done.stderr == "ucx: --source is for what is built from a commit\n"
    assert build(ROOT / "deepep", "--source").returncode == 2
