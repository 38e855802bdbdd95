"""Hostile strings in every field are refused, or reach the processes unchanged. They are never executed.

The fields come from the models, so new fields are tested automatically. The rendered script runs under real bash, with
fake programs `srun` and `module` that record their arguments and environment.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from primeslurm.base.errors import UsageError
from primeslurm.node.agent.node_context import resolve
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site, merge
from primeslurm.slurm.render import exports, render, sbatch_lines
from primeslurm.wire.transport.addresses import Addresses
from tests.support import model_strings
from tests.support.recipes import recipe_data, site

# A file that the fragments below try to create in the directory where the script runs.
CANARY = "canary"
FRAGMENTS = [
    *(f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY} ;", f"' ; touch {CANARY} ; '"),
    *(f'"; touch {CANARY}; "', f"\ntouch {CANARY}\n", f"| touch {CANARY}", f"& touch {CANARY} &", f"> {CANARY}"),
    *(f"${{x:=$(touch {CANARY})}}", f"\\\n touch {CANARY}", f"<(touch {CANARY})", f"!touch {CANARY}"),
    *("'", '"', "\\", "\\\\", "#", "%", "%j", "$", "$HOME", "${HOME}", "${host}", "*", "?", "~", "[a-z]", "{a,b}"),
    *("-", "--", "-x", "--output=/x", "\t", "\r", "\0", "\x1b[31m", "\x7f", "\u202e", "\u00a0", "\u2028", "é", "日本"),
    *("🚀", "a:b", "a,b", "a=b", "a b", " ", "..", "/", "../../x", "\n#SBATCH --uid=0", "EOF\n", "x" * 2000, ""),
]
# All fragments that are valid in a free text.
WORST = " ".join(text for text in FRAGMENTS if text.isprintable() and "${" not in text and len(text) < 100)
HOSTILE = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=3).map("".join) | st.text(max_size=20)
# Prefixes that satisfy the syntax of a field. The prefix of other fields is `model_strings.WORD`.
VALID_PREFIXES = {
    **{"extra": "--wckey=", "mounts": "/data", "library_path": "/opt/x", "runs": "/shared", "time": "01:00:00"},
    **{"time_min": "01:00:00", "mem": "1G", "mem_per_gpu": "1G", "switches": "1", "dependency": "afterok:1"},
    "base_url": "http://x1",
}
RECORD = '#!/bin/bash\nprintf "%s\\0" "$@" > {name}.argv\nenv -0 > {name}.env\n'


def places(model: type[Recipe] | type[Site]) -> list[Any]:
    return [
        pytest.param(path, data, id=f"{model.__name__.lower()}.{'.'.join(map(str, path))}")
        for path, data in dict(model_strings.places(model)).items()
        if path[0] != "prologue"  # lines of a shell script
    ]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with programs that record their arguments and environment."""
    directory = tmp_path_factory.mktemp("tools")
    for name in ("srun", "module"):
        (directory / name).write_text(RECORD.format(name=name))
        (directory / name).chmod(0o755)
    return directory


ONE_FIELD = settings(max_examples=3, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(("path", "data"), places(Recipe))
@ONE_FIELD
@given(value=HOSTILE, prefixed=st.booleans())
@example(value=WORST, prefixed=True)
def test_string_of_a_recipe_is_refused_or_arrives_unchanged(
    path: model_strings.Path, data: dict[str, Any], value: str, prefixed: bool, tmp_path: Path, tools: Path
) -> None:
    value = _valid_prefix(path) + value if prefixed else value
    data = merge(merge(recipe_data(), data), {"name": "test-run", "model": {"path": "/models/tiny"}})
    if "teacher" in data:
        data = merge(data, {"orchestrator": {"advantages": "opd"}})  # a teacher needs a use
    if data.pop("tenant", None):
        del data["deployment"]
        data = merge(
            data, {"trainer": {"lora": {}}, "tenant": {"service": "http://x1", "router": "http://x1", "adapters": "x1"}}
        )
    if "mlflow" in data.get("monitor", {}):
        data = merge(data, {"monitor": {"mlflow": {"tracking_uri": "http://x1"}}})  # a word is no address
    text = yaml.safe_dump(model_strings.put(merge(data, _parents(data, path)), path, value))
    try:
        (tmp_path / "r.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "r.yaml")
        plan = derive(recipe, site(modules=["cuda"]), Path("/shared/runs") / recipe.name)
    except UsageError as error:
        _check_refusal(error, path)
        return
    _check_plan(plan, tmp_path, tools)


@pytest.mark.parametrize(("path", "data"), places(Site))
@ONE_FIELD
@given(value=HOSTILE, prefixed=st.booleans())
@example(value=WORST, prefixed=True)
def test_string_of_a_site_file_is_refused_or_arrives_unchanged(
    path: model_strings.Path, data: dict[str, Any], value: str, prefixed: bool, tmp_path: Path, tools: Path
) -> None:
    value = _valid_prefix(path) + value if prefixed else value
    base = {"name": "s", "modules": ["cuda"], "nodes": {"default": {"partition": "gpu", "gpus": 8, "cpus": 96}}}
    data = merge(base, data)
    for kind in data["nodes"].values():
        kind["gpus"] = 8
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data()))
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(model_strings.put(data, path, value)))
    try:
        given_site = load_site(tmp_path / "s.yaml")
        plan = derive(load_recipe(tmp_path / "r.yaml"), given_site, Path("/shared", given_site.runs, "test-run"))
    except UsageError as error:
        _check_refusal(error, path)
        return
    _check_plan(plan, tmp_path, tools)


def test_all_kinds_of_fields_are_tested() -> None:
    names = {str(place.id) for place in [*places(Recipe), *places(Site)]}
    assert {"recipe.name", "recipe.slurm.comment", "recipe.inference.env.KEY1", "recipe.slurm.extra.0"} <= names
    assert {"site.runs", "site.modules.0", "site.nodes.KEY1.partition", "site.library_path.0"} <= names
    assert len(names) > 80


def _valid_prefix(path: model_strings.Path) -> str:
    return next((VALID_PREFIXES[str(name)] for name in path if str(name) in VALID_PREFIXES), model_strings.WORD)


def _parents(data: dict[str, Any], path: model_strings.Path) -> dict[str, Any]:
    """Return the data of the section at the top of `path`, whose lists must replace those of the base recipe."""
    return {str(path[0]): data[str(path[0])]}


def _check_refusal(error: UsageError, path: model_strings.Path) -> None:
    """Check that a violation names the field, or the section that holds it."""
    name = ".".join(map(str, path))
    fields = [violation.field for violation in error.violations]
    assert all(fields) and any(f.removeprefix("site s: ") in name or name in f for f in fields), (name, fields)


def _check_plan(plan: Plan, directory: Path, tools: Path) -> None:
    assert Plan.model_validate_json(plan.to_json()) == plan
    _check_processes(plan)
    _check_headers(plan)
    script = render(plan)
    if _already_ran(directory, script):
        return
    for name in ("srun.argv", "srun.env", "module.argv"):
        (directory / name).unlink(missing_ok=True)
    (directory / "job.sbatch").write_text(script)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sbatch", "w"], cwd=directory, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.fullmatch(rb"primeslurm: start [0-9a-f-]{36}\n", done.stdout)
    assert not (directory / CANARY).exists()
    argv = (directory / "srun.argv").read_bytes().decode().split("\0")[:-1]
    agent = [
        *plan.job.launcher,
        plan.python,
        "-u",
        "-m",
        "primeslurm.node.start_agent",
        f"{plan.run_dir}/submitit",
        "w",
    ]
    assert argv[-len(agent) :] == agent
    step = argv[: -len(agent)]
    assert step[len(step) - len(plan.job.srun) :] == list(plan.job.srun)
    assert all(word.startswith("--") for word in step)
    seen = dict(entry.split("=", 1) for entry in (directory / "srun.env").read_bytes().decode().split("\0")[:-1])
    assert {name: seen[name] for name in exports(plan)} == exports(plan)
    assert seen.get("LD_LIBRARY_PATH", "") == ":".join(plan.library_path)
    modules = (directory / "module.argv").read_bytes().decode().split("\0")[:-1]
    assert modules == ["load", *plan.job.modules]


def _already_ran(directory: Path, script: str) -> bool:
    # Most fields do not appear in the script, so the script of the last example is often the same.
    path = directory / "job.sbatch"
    return path.is_file() and path.read_bytes() == script.encode()


def _check_processes(plan: Plan) -> None:
    """Check that command lines and environments have no placeholder left and no null byte."""
    names = [process.name for process in plan.processes()]
    addresses = Addresses(
        hosts=dict.fromkeys(names, "127.0.0.1"), ports={process.name: process.ports for process in plan.processes()}
    )
    fabric = ("interface", "nccl_interface", "hcas", "hca_ports", "nccl_hcas", "ucx_devices", "ucx_devices_near")
    values = dict.fromkeys(
        ("run_dir", "attempt", "attempt_dir", "run_id", "python", "tmp", "node", "key", *fabric), "/value"
    )
    secrets = {**values, "secret": "s", "generate_token": "g"}
    for process in plan.processes():
        assert "/" not in process.name and ".." not in process.log
        texts = [(text, values) for text in process.argv]
        texts += [(text, secrets) for text in (*process.env.values(), *plan.env.values())]
        for text, known in texts:
            resolved = resolve(text, process.name, addresses, known)
            assert "${" not in resolved and "\0" not in resolved


def _check_headers(plan: Plan) -> None:
    """Check that sbatch reads exactly the options of the plan."""
    for group in plan.groups:
        words = [word for line in sbatch_lines(plan, group) for word in _sbatch_words(line)]
        assert all(word.startswith("--") for word in words)
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
        assert options["partition"] == group.partition
        assert options["output"] == plan.run_dir.replace("%", "%%") + "/slurm-%j.out"
        for name in ("account", "qos", "exclude", "reservation"):
            assert options.get(name) == getattr(plan.job, name)
        if group.index == 0:
            assert options.get("comment") == plan.job.comment
        assert [word for word in words if word in plan.job.extra] == list(plan.job.extra)


def _sbatch_words(line: str) -> list[str]:
    """Split a line like sbatch does. tests/cluster/test_options.py compares this with the real sbatch."""
    words: list[str] = []
    current, quote, escaped, inside = "", "", False, False
    for character in line:
        if escaped:
            current, escaped = current + character, False
        elif character == "\\":
            escaped = inside = True
        elif quote:
            quote = "" if character == quote else quote
            current += character if quote else ""
        elif character in "'\"":
            quote, inside = character, True
        elif character.isspace():
            words, current, inside = [*words, current] if inside else words, "", False
        elif character == "#":
            break
        else:
            current, inside = current + character, True
    assert not quote and not escaped
    return [*words, current] if inside else words
