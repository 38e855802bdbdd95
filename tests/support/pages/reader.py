"""Types the code blocks of one page into one shell, as a reader with a checkout would.

Programs that need a network, another machine or a long time are replaced (`PROGRAMS`). A replacement checks its
arguments, and writes the files that the page uses later. All other programs are real, above all `primeslurm`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import yaml

from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import read_recipe
from tests.support.forks import server
from tests.support.pages.blocks import Block, matches
from tests.support.unmeasured import unmeasured

ROOT = Path(__file__).resolve().parents[3]
CHECKOUT = (
    "recipes",
    "examples",
    "sites",
    "scripts",
    "docs",
    "benchmarks",
    "requirements",
    "third_party",
    "pyproject.toml",
)
"""Parts of the checkout that a reader sees."""
TIMEOUT_S = 600
COMMAND = (
    "tests.support.pages.command",
    "primeslurm.api.runs.run",
    "primeslurm.api.checks.environments",
    "primeslurm.orchestrator.environments.reverse_text",
    "verifiers.v1.tasksets",
)
"""Modules that most commands import, and those of environments, which `check` loads."""
BASE = {
    "schema": 1,
    "name": "base",
    "seq_len": 32768,
    "model": {"path": "Qwen/Qwen3-8B"},
    "environments": [{"id": "math-problems", "args": {"path": "math.jsonl"}}],
    "evaluation": {"environments": [{"id": "math-problems", "name": "test", "args": {"path": "test.jsonl"}}]},
    "deployment": {"train": {"nodes": 1}, "inference": {"type": "multi_node"}},
}
"""Recipe into which a block with sections of a recipe is merged."""
SITE = {"schema": 1, "name": "site", "runs": "/runs", "nodes": {"default": {"partition": "gpu", "gpus": 8, "cpus": 96}}}
"""Site file into which a block with sections of a site file is merged."""
ROWS = {
    "openai/gsm8k": (
        ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        {"question": "Ann has 2 apples and buys 3. How many has she?", "answer": "2 + 3 = 5\n#### 5"},
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        ("en/train-00000-of-00001.parquet",),
        {"prompt": "What is 2 + 3?", "solution": "5"},
    ),
}
"""Files, with one row, of each data set that pages download."""
PROGRAMS = {
    "primeslurm": """exec 8>&1 9>&2  # bash itself redirects 1 while it echoes
answer={home}/answer.$$
mkfifo $answer
printf '%s\\0' "$PWD" "$@" >{home}/words.$$
env -0 >{home}/env.$$
echo $$ >{home}/requests
read -r code <$answer
exit $code""",
    "python": """[[ ${{1:-}} == *.py ]] && set -- -m tests.support.pages.command python "$@"
PYTHONPATH="{root}:${{PYTHONPATH:-}}" exec {python} "$@\"""",
    "hf": 'PYTHONPATH="{root}" exec {python} -m tests.support.pages.download "$@"',
    "git": '[[ $1 == clone ]] || {{ echo "git: only clone is replaced" >&2; exit 9; }}; '
    '[[ "$*" != *abundant-ai/SWE-gen-JS* ]] || '
    '{{ mkdir -p "${{@: -1}}"; cp -r {root}/examples/harbor "${{@: -1}}/tasks"; exit; }}; '
    '[[ $2 == https://github.com/primeslurm/primeslurm ]] || {{ echo "git: no repository $2" >&2; exit 9; }}; '
    'cp -r {home}/checkout "${{3:-primeslurm}}"',
    "uv": "[[ $1 =~ ^(pip|python|tool|venv|run)$ ]]",
    "uvx": """[[ "$1 $2 $3 $6" == "--python 3.12 --from dataset" ]] || exit 9
shift 2
[[ $5 != download ]] || {{ mkdir -p "$8"; cp -r {root}/examples/harbor "$8/${{6##*/}}"; }}""",
    "just": """cd {root}; {bin}/just --dry-run "$@" 2>/dev/null || {bin}/just --dry-run "$@"
cd "$OLDPWD"
case $1 in
  model) where=$2 ;;
  warm-start) where=${{2:-reverse-text}} ;;
  demo) where=reverse-text ;;
  *) exit 0 ;;
esac
[[ -d .primeslurm/$where ]] || {{ mkdir -p .primeslurm/$where; cp -r {home}/model/ .primeslurm/$where/model; }}
[[ $1 != demo ]] || primeslurm submit "${{2:-recipes/reverse_text.yaml}}" --local --name demo-1128-114820""",
}
"""Replaced programs by name, as bash scripts."""


class Reader:
    """The shell, home directory and checkout of a reader, which keep their state from block to block.

    `home` is an empty directory, in which `shared` is the `/shared` of the pages. `model` stands for every model that
    `./just` makes.
    """

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        self.shared = home / "shared"
        self.shared.mkdir()
        (home / "model").symlink_to(model)
        self._programs()
        os.mkfifo(home / "requests")
        threading.Thread(target=self._serve, daemon=True).start()
        self._checkout(home / "checkout")
        shutil.copytree(home / "checkout", home / "primeslurm", symlinks=True)
        self.output = ""
        """Output of the last bash block."""
        (home / "state").write_text(f"cd {home}/primeslurm\n")

    def read(self, block: Block) -> None:
        """Execute a block. Raise AssertionError if the result differs from the page."""
        body = block.body.replace("/shared", str(self.shared))
        if block.title:
            self._write(block.title, body)
        match block.language:
            case "bash":
                self._type(block, body)
            case "yaml":
                self._yaml(block, body)
            case "python":
                script = block.title or "block.py"
                if not block.title:
                    self._write(script, body)
                self._run(block, f"python {shlex.quote(script)}")
            case "json":
                json.loads(body)
            case "toml":
                tomllib.loads(body)
            case "text" if block.keyword == "output":
                assert matches(body, self.output), f"{block.where} is not in this output:\n{self.output}"

    def _serve(self) -> None:
        """Fork the shell's `primeslurm` commands from a process that has their imports."""
        # opened for writing as well, so that it never reads an end of file
        with os.fdopen(os.open(self.home / "requests", os.O_RDWR)) as requests:
            for pid in map(str.strip, requests):
                directory, *words = (self.home / f"words.{pid}").read_text().split("\0")[:-1]
                pairs = (self.home / f"env.{pid}").read_text().split("\0")[:-1]
                env = dict(pair.split("=", 1) for pair in pairs)
                env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
                streams = [os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND) for number in (8, 9)]
                command = server(COMMAND).start(
                    "tests.support.pages.command",
                    "primeslurm",
                    *words,
                    stdout=streams[0],
                    stderr=streams[1],
                    env=env,
                    cwd=Path(directory),
                )
                for stream in streams:
                    os.close(stream)
                (self.home / f"answer.{pid}").write_text(f"{command.wait(TIMEOUT_S)}\n")

    def _type(self, block: Block, body: str) -> None:
        self.output = self._run(block, body, int(block.detail) if block.keyword == "exit" else 0)

    def _yaml(self, block: Block, body: str) -> None:
        """Validate the fields of a block. Run `check` on a whole recipe that the page does not store in a file."""
        data = yaml.safe_load(body)
        validate(data)
        if not block.title and isinstance(data, dict) and {"schema", "extends"} & data.keys() and "nodes" not in data:
            self._write("block.yaml", body)
            has_site = (self.home / ".primeslurm" / "site.yaml").exists()
            self._run(block, f"primeslurm check block.yaml {'' if has_site else '--site sites/h200.yaml'}")

    def _run(self, block: Block, script: str, expected: int = 0) -> str:
        state = shlex.quote(str(self.home / "state"))
        keep = f'{{ declare -px; printf "cd %q\\n" "$PWD"; }} >{state}'
        text = f"set -euo pipefail\nsource {state}\ntrap '{keep}' EXIT\n{script}"
        variables = {
            "HOME": str(self.home),
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1",
        }
        # Hide a Slurm that this machine may have.
        env = {name: value for name, value in unmeasured().items() if not name.startswith("SLURM")} | variables
        env.pop("PYTHONPATH", None)
        done = subprocess.run(
            ["bash", "-c", text],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == expected, (
            f"{block.where}: exit code {done.returncode}, expected {expected}\n{script}\n--\n{done.stdout[-4000:]}"
        )
        return done.stdout

    def _write(self, title: str, body: str) -> None:
        """Write a file in the shell's directory."""
        path = title.replace("/shared", str(self.shared)).replace("~", str(self.home))
        here = shlex.split((self.home / "state").read_text().splitlines()[-1])[1]
        target = Path(here, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(body)

    def _programs(self) -> None:
        programs = self.home / "bin"
        programs.mkdir()
        names = {"root": ROOT, "python": sys.executable, "bin": Path(sys.executable).parent, "home": self.home}
        for name, body in PROGRAMS.items():
            program = programs / name
            program.write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{body.format(**names)}\n")
            program.chmod(0o755)

    def _checkout(self, checkout: Path) -> None:
        """Create the files that a reader sees. In recipes, `/shared` is replaced by the reader's directory."""
        checkout.mkdir()
        for name in CHECKOUT:
            if name != "recipes" and (ROOT / name).exists():
                (checkout / name).symlink_to(ROOT / name)
        (checkout / "recipes").mkdir()
        for recipe in (ROOT / "recipes").glob("*.yaml"):
            text = recipe.read_text().replace("/shared", str(self.shared))
            (checkout / "recipes" / recipe.name).write_text(text)
        (checkout / "just").symlink_to(self.home / "bin" / "just")
        (checkout / ".venv" / "bin").mkdir(parents=True)
        for name in ("primeslurm", "python"):
            (checkout / ".venv" / "bin" / name).symlink_to(self.home / "bin" / name)
        (checkout / ".venv" / "bin" / "activate").touch()


def validate(data: Any) -> None:
    """Raise ValueError if a YAML block is not a recipe, a site file, or sections of one.

    A recipe that extends a ready one is validated together with it.
    """
    if not isinstance(data, dict):
        raise ValueError(f"neither a recipe nor a site file: {data!r}")
    base = ROOT / str(data.get("extends", ""))
    data = {key: value for key, value in data.items() if key != "extends"}
    if base.is_file():
        data = merged(dict(read_recipe(base).data), data)
    fields = Recipe.model_fields.keys() | {field.alias for field in Recipe.model_fields.values()}
    if data.keys() <= fields:
        Recipe.model_validate(merged(BASE, data))
    else:
        Site.model_validate(SITE | data)


def merged(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with other sections merged into it."""
    result = dict(base)
    for key, value in part.items():
        old = base.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
