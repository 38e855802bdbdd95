"""Environments: loading by name, the order of tasks, outdated packages, and all environments of shipped recipes."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments import TaskStream, checks, probe
from primeslurm.orchestrator.environments.reverse_text import (
    ReverseTextTask,
    ReverseTextTaskset,
    similarity,
    words,
)
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.sandboxes import sees_packages
from primeslurm.recipe.sections.trainer import Model
from scripts.models import tiny_model


def test_reverse_text_has_seeded_words_and_their_reverse() -> None:
    env = environments.load("reverse-text", {"min_length": 2, "max_length": 3, "seed": 1, "n": 5})
    tasks = list(env.taskset)
    assert [task.data.prompt for task in tasks] == [f"Reverse: {word}" for word in words(5, 1, 2, 3)]
    assert all(task.data.answer == task.data.prompt.removeprefix("Reverse: ")[::-1] for task in tasks)
    assert all(2 <= len(task.data.answer) <= 3 and task.data.system_prompt is None for task in tasks)


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [("cba", "cba", 1.0), (" cba\n", "cba", 1.0), ("", "cba", 0.0), ("cbx", "cba", 2 / 3), ("cbaa", "cba", 0.75)],
)
def test_similarity_is_the_fraction_of_matching_positions(reply: str, answer: str, expected: float) -> None:
    assert similarity(reply, answer) == pytest.approx(expected)


def refusal(name: str, **args: Any) -> str:
    with pytest.raises(UsageError) as raised:
        environments.load(name, args)
    return str(raised.value)


def test_unknown_name_gets_a_suggestion_and_wrong_argument_is_named() -> None:
    assert "did you mean reverse-text?" in refusal("reverse-txt")
    assert "environments.args.colour = red: " in refusal("reverse-text", colour="red")


@pytest.mark.parametrize(
    ("harness", "fields"),
    [
        ("no-such", ["harness.id", "args.colour"]),
        ("bsh", ["harness.id", "args.colour", "harness.foo"]),  # checked as bash, which is nearest
        ("default", ["harness.id", "args.colour", "harness.foo"]),
    ],
)
def test_unknown_harness_does_not_hide_other_wrong_options(harness: str, fields: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        environments.load("reverse-text", {"colour": "red"}, {"harness": {"id": harness, "foo": 1}})
    assert [each.field for each in raised.value.violations] == [f"environments.{field}" for field in fields]


@pytest.mark.parametrize("kind", [ReverseTextTaskset, ReverseTextTask])
def test_toolsets_method_without_classmethod_is_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "toolsets", lambda self, config: [])
    message = refusal("reverse-text")
    assert f"environments.id = {kind.__name__}.toolsets: " in message and "`@classmethod`" in message


def test_environment_that_exits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker would otherwise exit without a message to the orchestrator.
    def leave(config: object) -> None:
        raise SystemExit("usage: env.py FILE")

    monkeypatch.setattr(environments, "load_environment", leave)
    message = refusal("reverse-text")
    assert "environments.id = reverse-text: " in message and "SystemExit: usage: env.py FILE" in message


def test_unshuffled_stream_starts_in_order_and_reorders_later_epochs() -> None:
    env = environments.load("reverse-text", {"n": 6})
    stream = TaskStream(env.taskset, seed=0, shuffle=False)
    read = [stream[i].data.answer for i in range(18)]
    epochs = [tuple(read[i : i + 6]) for i in (0, 6, 12)]
    assert list(epochs[0]) == [task.data.answer for task in env.taskset]
    assert len({frozenset(epoch) for epoch in epochs}) == 1 and len(set(epochs)) == 3
    again = TaskStream(env.taskset, seed=0, shuffle=False)
    assert [again[i].data.answer for i in (13, 2)] == [read[13], read[2]]


def test_seed_shuffles_the_first_epoch() -> None:
    env = environments.load("reverse-text", {"n": 50})
    tasks = [task.data.answer for task in env.taskset]
    orders = {}
    for seed in (0, 0, 1):
        stream = TaskStream(env.taskset, seed, shuffle=True)
        orders[seed] = [stream[position].data.answer for position in range(100)]
        assert sorted(orders[seed][:50]) == sorted(orders[seed][50:]) == sorted(tasks)
        assert orders[seed][:50] != orders[seed][50:] and stream.count() == 50
        assert [stream.task(index).data.answer for index in range(50)] == tasks
        again = TaskStream(env.taskset, seed, shuffle=True)
        assert [again[position].data.answer for position in (73, 12)] == [orders[seed][73], orders[seed][12]]
    assert orders[0] != orders[1]


class FailingTaskset:
    """A hundred tasks. The source raises after the first ten, once for each error, as a file system may."""

    bounded = True

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            if number == 10 and self.errors:
                raise self.errors.pop()
            yield number


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_continues_after_its_source_has_raised(shuffle: bool) -> None:
    whole = TaskStream(FailingTaskset(), 0, shuffle)  # type: ignore[arg-type]
    stream = TaskStream(FailingTaskset(OSError("stale"), SystemExit(1)), 0, shuffle)  # type: ignore[arg-type]
    for error in (SystemExit, OSError):
        with pytest.raises(error):
            stream[50]
    assert [stream[position] for position in range(300)] == [whole[position] for position in range(300)]
    assert stream.count() == 100


class EndlessTaskset:
    """Numbers without end. `made` counts those that were read."""

    bounded = False
    made = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.made = number + 1
            yield number


def test_endless_taskset_is_shuffled_in_windows_and_read_as_needed() -> None:
    source = EndlessTaskset()
    stream: Any = TaskStream(source, 0, shuffle=True)  # type: ignore[arg-type]
    order = [stream[position] for position in range(2048)]
    assert source.made == 2048
    for first in (0, 1024):
        window = order[first : first + 1024]
        assert sorted(window) == list(range(first, first + 1024)) != window
    again: Any = TaskStream(EndlessTaskset(), 0, shuffle=True)  # type: ignore[arg-type]
    assert [again[2000], again[5]] == [order[2000], order[5]]
    lazy = EndlessTaskset()
    in_order: Any = TaskStream(lazy, 0, shuffle=False)  # type: ignore[arg-type]
    assert in_order[7] == 7 and lazy.made == 8


ROOT = Path(__file__).resolve().parents[3]
NAMED = [
    pytest.param(environment, id=f"{path.stem}-{environment.label}")
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
    for environment in load_recipe(path).environments
]


@pytest.mark.parametrize("environment", NAMED)
def test_environment_of_a_recipe_loads(environment: Environment, tmp_path: Path) -> None:
    # Paths of the cluster are replaced by files of the same form.
    dapo = tmp_path / "dapo.parquet"
    row = {"prompt": "In triangle ABC, ...", "solution": "34"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), dapo)
    stand_ins = {
        "/shared/data/dapo/en/train-00000-of-00001.parquet": str(dapo),
        "/shared/data/swe": str(ROOT / "examples" / "harbor"),
    }
    args = {name: stand_ins.get(str(value), value) for name, value in environment.args.items()}
    env = environments.load(environment.id, args, environments.agent_options(environment))
    task = next(iter(env.taskset))
    assert task.data.prompt
    assert checks.without_reward(environment, env, task) == []
    assert checks.side_effects(environment, env) == [], "rollouts download their harness"


@pytest.mark.parametrize(("module", "rewarded"), [("broken-tool", False), ("fine-words", True)])
def test_environment_without_reward_is_noted(module: str, rewarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "support" / "environments")
    answer = probe.probe(Environment.model_validate({"id": module}))
    assert answer.violations == [] and [note.value for note in answer.notes] == ([] if rewarded else [module])


def test_prompts_that_leave_no_room_for_an_answer_are_counted(tmp_path: Path) -> None:
    tiny_model.tokenizer().save_pretrained(tmp_path)
    problems = [{"question": question, "answer": "2"} for question in ("1 + 1?", "1 + 1? " * 200, "1 + 1? " * 100)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, problems)))
    args = {"path": str(tmp_path / "data.jsonl")}
    environment = Environment.model_validate({"id": "math-problems", "args": args})
    answer = probe.probe(environment, Model(path=str(tmp_path)), max_len=256)
    assert answer.tasks == 3 and not answer.violations
    (warning,) = answer.warnings
    assert warning.why.startswith("2 of 3 prompts leave no room for an answer: the prompt of task 2 has ")
    assert probe.probe(environment, Model(path=str(tmp_path)), max_len=8192).warnings == []
    assert probe.probe(environment, Model(path="no-model"), max_len=256).warnings == []


def test_recipes_name_the_command_that_installs_their_harness() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        for environment in load_recipe(path).environments:
            if environment.harness is not None and sees_packages(environment.runtime):
                assert f"`primeslurm install --harness {environment.harness.id}`" in path.read_text(), path.name
                assert (ROOT / "requirements" / "harnesses" / f"{environment.harness.id}.txt").is_file()


def test_environments_of_recipes_are_documented_and_their_packages_locked() -> None:
    page = (ROOT / "docs" / "how-to" / "environments.md").read_text()
    assert {f"`{environment.values[0].id}`" for environment in NAMED} <= set(page.split())
    head = (ROOT / "examples" / "textarena.yaml").read_text()
    pins = [word for word in head.split() if "==" in word]
    lock = (ROOT / "requirements" / "games.txt").read_text().splitlines()
    assert pins and {line for line in lock if not line.startswith("#")} == set(pins), (
        "`primeslurm install --games` installs something else"
    )


def test_models_of_demo_recipes_have_a_warm_start() -> None:
    warm_starts = set(re.findall(r"^  ([a-z-]+)\)$", (ROOT / "scripts" / "warm_start.sh").read_text(), re.MULTILINE))
    texts = [path.read_text() for folder in ("recipes", "examples") for path in sorted((ROOT / folder).glob("*.yaml"))]
    named = {name for text in texts for name in re.findall(r"path: \.primeslurm/([a-z-]+)/model", text)}
    assert named and named <= warm_starts


CLASS = "import verifiers as vf\nclass Words(vf.SingleTurnEnv):\n    pass\n"
NAME = "from verifiers import Rubric\n"
MODULE = "from verifiers.utils.data_utils import extract_boxed_answer\n"
LAZY = "def load_environment(**kwargs):\n    import verifiers as vf\n    return vf.SingleTurnEnv()\n"
BROKEN = "raise KeyError('data')\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("of_old_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(directory: Path, module: str, text: str, *requirements: str) -> None:
    (directory / f"{module}.py").write_text(text)
    about = directory / f"{module}-1.0.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {module}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requirements)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (about / "top_level.txt").write_text(f"{module}\n")
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("module", "text", "sign"),
    [
        ("of_old_class", CLASS, "it uses verifiers.SingleTurnEnv"),
        ("of_old_name", NAME, "it uses verifiers.Rubric"),
        ("of_old_module", MODULE, "it uses verifiers.utils"),
        ("of_old_entry", LAZY, "it has load_environment() and exports no taskset"),
    ],
)
def test_removed_parts_of_verifiers_reveal_an_old_package(module: str, text: str, sign: str, packages: Path) -> None:
    install(packages, module, text, "verifiers>=0.1", "datasets")
    name = module.replace("_", "-")
    message = refusal(name)
    assert f"environments.id = {name}: it is made for verifiers before 0.4 ({sign}), and verifiers 0.4" in message
    assert "(install a version for verifiers 0.4, or port it" in message


@pytest.mark.parametrize(
    "requirement",
    ["verifiers<0.2", "verifiers>=0.1.9,<0.4 ; python_version > '3'", "verifiers==0.1.*", "verifiers[all]~=0.1.8"],
)
def test_requirements_reveal_an_old_package(requirement: str, packages: Path) -> None:
    install(packages, "of_old_requirement", BROKEN, "not a requirement !", requirement)
    assert "before 0.4 (of_old_requirement requires verifiers" in refusal("of-old-requirement")


@pytest.mark.parametrize("requirement", ["verifiers>=0.4", "verifiers>=0.5", "verifiers==99.*", "verifiers"])
def test_error_of_a_newer_package_is_described(requirement: str, packages: Path) -> None:
    install(packages, "of_old_error", BROKEN, requirement)
    assert "KeyError: 'data' (of_old_error.py, line 1" in refusal("of-old-error")
