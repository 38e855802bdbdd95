"""Images for GPU nodes: both definitions have the same content, which is that of the set-up."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
DEFINITION = (ROOT / "containers" / "primeslurm.def").read_text()


def packages(text: str) -> list[str]:
    """Return the packages that apt installs."""
    command = re.search(r"--no-install-recommends \\\n((?:.*\\\n)*.*)", text)
    assert command
    return [word for word in command[1].partition("&&")[0].split() if re.fullmatch(r"[a-z0-9-]+", word)]


def test_both_images_have_the_same_base_and_packages() -> None:
    assert re.findall(r"nvidia/cuda:\S+", DOCKERFILE) == re.findall(r"nvidia/cuda:\S+", DEFINITION)
    wanted = packages(DOCKERFILE)
    assert len(wanted) > 5 and packages(DEFINITION)[: len(wanted)] == wanted
    for text in (DOCKERFILE, DEFINITION):
        assert "uv pip install --no-cache --requirement requirements/gpu.txt" in text


def test_uv_and_nccl_have_one_version_everywhere() -> None:
    for pattern, more in ((r"uv==([\d.]+)", ["just", "requirements/cpu.txt"]), (r"nccl-cu13==([\d.]+)", [])):
        texts = [DOCKERFILE, DEFINITION, *((ROOT / name).read_text() for name in more)]
        versions_by_file = [re.findall(pattern, text) for text in texts]
        assert all(versions_by_file) and len({version for versions in versions_by_file for version in versions}) == 1
    nccl = re.search(r'^nccl = "(.*)"', (ROOT / "third_party" / "deepep" / "manifest.toml").read_text(), re.MULTILINE)
    assert nccl and f"nvidia-nccl-cu13=={nccl[1]}" in DOCKERFILE


def test_copied_files_exist() -> None:
    for source in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists(), source
    section = DEFINITION[DEFINITION.index("%files") : DEFINITION.index("%post")]
    copied = [line.split()[0] for line in section.splitlines()[1:] if line.strip()]
    assert len(copied) > 5 and all((ROOT / name).exists() for name in copied)
