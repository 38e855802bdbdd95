"""The wheel without a checkout has all files that commands read, and no message suggests `./just`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from primeslurm import __version__
from primeslurm.slurm import inventory
from tests.support.unmeasured import unmeasured

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield a directory with the content of the wheel, for PYTHONPATH."""
    place = tmp_path_factory.mktemp("wheel")
    # The set-up has built the project with the same back end, which is in uv's cache.
    build = [sys.executable, "-m", "uv", "build", "--wheel", "--offline", "--quiet", "--out-dir", str(place), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    assert wheel.name == f"primeslurm-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "installed")
    return place / "installed"


FORKS = """
import json, os, sys
import primeslurm.api.checks.recipe_check, primeslurm.api.submission, primeslurm.cli
output, codes = sys.argv[1], []
for number, words in enumerate(json.loads(sys.argv[2])):
    if not (child := os.fork()):
        for target, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{output}/{number}.{name}", os.O_CREAT | os.O_WRONLY, 0o644), target)
        sys.argv = ["primeslurm", *words]
        primeslurm.cli.main()
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def run(installed: Path, cwd: Path, code: str, *words: str) -> str:
    """Return the output of a program that imports the wheel's content."""
    # Coverage measures the checkout, and its report needs each measured file to exist.
    env = {**unmeasured(), "PYTHONPATH": str(installed), "HOME": str(cwd), "COLUMNS": "160"}
    argv = [sys.executable, "-P", "-c", code, *words]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_commands_work_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    """The commands run one after the other, in processes that are forked after the imports."""
    site = str(installed / "primeslurm" / "shipped" / "sites" / "h200.yaml")
    local = ("--local",)
    commands: list[tuple[tuple[str, ...], int | None]] = [
        (("init",), 0),
        (("check", "recipe.yaml", *local), 0),
        (("check", "recipe.yaml", *local, "--set", "learning_rate=1"), 2),  # reads the table of aliases
        (("submit", "recipe.yaml", *local, "--dry-run"), 0),
        (("submit", "recipe.yaml", *local), 2),  # the model is missing, and the message says how to make it
        (("check", "reverse_text", *local), 0),
        (("recipes", "show", "reverse_text_sft"), 0),
        (("recipes", "copy", "glm5_r3"), 0),
        (("render", "glm5_r3.yaml", "--site", site), 0),
        (("submit", "glm5_pd", "--site", site, "--dry-run"), 0),
        (("install", "--gpu", "--to", "env", "--dry-run"), 0),
        (("install", "--harness", "mini_swe_agent", "--dry-run"), 0),
        (("doctor", "--json"), None),
    ]
    place, output = tmp_path / "place", tmp_path / "output"
    place.mkdir()
    output.mkdir()
    codes = json.loads(run(installed, place, FORKS, str(output), json.dumps([words for words, _ in commands])))
    for number, ((words, expected), code) in enumerate(zip(commands, codes, strict=True)):
        out, err = ((output / f"{number}.{name}").read_text() for name in ("out", "err"))
        assert expected in (None, code), (words, code, err)
        assert "Traceback" not in err, (words, err)
        text = err if words[:2] == ("recipes", "show") else out + err
        assert "./just" not in text and str(ROOT) not in text.replace(sys.prefix, ""), (words, text)
        if words[0] == "doctor":
            wrong = json.loads(out)["differences"]
            assert not [each for each in wrong if each["part"] == "primeslurm"], wrong


def test_wheel_has_the_checkouts_locks(installed: Path, tmp_path: Path) -> None:
    code = "import json; from primeslurm.slurm import inventory as i; "
    code += "print(json.dumps([i.locked_versions('cuda'), i.locked_versions('cpu')]))"
    expected = [inventory.locked_versions("cuda"), inventory.locked_versions("cpu")]
    assert json.loads(run(installed, tmp_path, code)) == expected


def test_wheel_has_all_shipped_files(installed: Path) -> None:
    shipped = installed / "primeslurm" / "shipped"
    for directory in ("recipes", "sites", "templates", "examples", "requirements", "scripts/models"):
        there = {path.relative_to(shipped) for path in (shipped / directory).rglob("*") if path.is_file()}
        tracked = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", directory], capture_output=True, text=True, check=False
        )
        if tracked.returncode == 0:
            assert {Path(line) for line in tracked.stdout.split()} <= there
        assert there and not [path for path in there if "__pycache__" in path.parts]
    # files that only a checkout can use
    assert not (installed / "tests").exists() and not (installed / "benchmarks").exists()


def test_wheel_has_the_pages_of_the_dashboard(installed: Path) -> None:
    pages = Path("primeslurm", "dashboard", "static")
    ours = sorted(path.relative_to(ROOT) for path in (ROOT / pages).rglob("*") if path.is_file())
    assert len(ours) > 15
    assert sorted(path.relative_to(installed) for path in (installed / pages).rglob("*") if path.is_file()) == ours


def test_links_of_its_description_are_absolute(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"""(?:src|href)="([^"]+)""", text)
    assert len(links) > 5 and [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    assert "Project-URL: Repository, https://github.com/primeslurm/primeslurm" in text
