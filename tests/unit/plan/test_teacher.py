"""A teacher in the plan: placement and commands of its engines, and checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primeslurm.api.checks.recipe_check import read_file_metadata
from primeslurm.api.recipes.loading import load
from primeslurm.base.errors import UsageError, Violation
from primeslurm.plan.checks.files import with_absolute_paths
from primeslurm.plan.model import Plan, Process
from primeslurm.plan.planner import derive
from primeslurm.plan.stand_ins import STAND_INS, emulate
from primeslurm.recipe import Recipe
from tests.support.planning import reviewed
from tests.support.recipes import model_dir, recipe_data, site, write_recipe

RUN = Path("/shared/runs/test-run")
H200 = {"nodes": {"default": {"gres": "gpu:h200"}}}


def recipe(changes: dict[str, Any] | None = None, **teacher: Any) -> Recipe:
    teacher = {"type": "engines", "path": "/models/teacher", **teacher}
    return Recipe.model_validate(recipe_data(orchestrator={"advantages": "opd"}, teacher=teacher, **(changes or {})))


def plan_for(changes: dict[str, Any] | None = None, **teacher: Any) -> Plan:
    return derive(recipe(changes, **teacher), site(), RUN)


def teachers(plan: Plan) -> list[Process]:
    return [process for process in plan.processes() if process.role == "teacher"]


def option(process: Process, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


@pytest.mark.parametrize("layout", ["het", "single"])
def test_its_engines_have_nodes_of_their_own(layout: str) -> None:
    changes = {"deployment": {"layout": layout}}
    plan = plan_for(changes, nodes=2, tp=4)
    found = teachers(plan)
    assert [(p.name, p.gpus) for p in found] == [
        ("teacher-0", (0, 1, 2, 3)),
        ("teacher-1", (4, 5, 6, 7)),
        ("teacher-2", (0, 1, 2, 3)),
        ("teacher-3", (4, 5, 6, 7)),
    ]
    assert {plan.nodes[p.node].role for p in found} == {"teacher"}
    without = derive(Recipe.model_validate(recipe_data(**changes)), site(), RUN)
    assert plan.totals.nodes == without.totals.nodes + 2 and plan.totals.gpus == without.totals.gpus + 16
    assert (plan.totals.engines, plan.totals.teacher_engines) == (without.totals.engines, 4)
    if layout == "het":
        assert [group.name for group in plan.groups] == ["control", "train", "inference", "teacher"]
    assert plan.replicas == without.replicas, "it has no router, and gets no weight updates"
    assert option(plan.process("orchestrator"), "--teachers") == "teacher-0,teacher-1,teacher-2,teacher-3"
    assert "--teachers" not in without.process("orchestrator").argv


def test_its_command_is_that_of_a_served_model() -> None:
    plan = plan_for(dtype="float32", max_num_batched_tokens=512, env={"A": "b"}, vllm_extra={"max_num_seqs": 1})
    process = teachers(plan)[0]
    assert option(process, "--model") == "/models/teacher" and option(process, "--dtype") == "float32"
    assert option(process, "--max-model-len") == "129", (
        "the longest sequence, and the one token that each request generates"
    )
    assert option(process, "--max-num-batched-tokens") == "512" and option(process, "--max-num-seqs") == "1"
    assert option(process, "--middleware").endswith(".LivenessGate") and "--weight-transfer-config" not in process.argv
    assert process.env["A"] == "b" and process.restart == "in_place" and set(process.ports) == {"http"}
    assert process.health is not None and process.health.path == "/health"


def test_its_nodes_are_those_of_inference_unless_the_site_says_otherwise() -> None:
    kinds = {"inference": {"partition": "serve", "gpus": 4, "cpus": 8}}
    assert derive(recipe(), site(nodes=kinds), RUN).groups[-1].partition == "serve"
    kinds["teacher"] = {"partition": "old", "gpus": 2, "cpus": 8}
    changes = {"slurm": {"teacher": {"constraint": "a100"}}, "deployment": {"spares": {"teacher": 1}}}
    group = derive(recipe(changes), site(nodes=kinds), RUN).groups[-1]
    assert (group.partition, group.constraint, group.nodes, group.spares) == ("old", "a100", 2, 1)


def test_gpus_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UsageError, match=r"teacher\.tp = 3: must divide the 8 GPUs .* \(nearest: 2\)"):
        plan_for(tp=3)
    with pytest.raises(UsageError, match=r"teacher\.gpus_per_node = 16: .* have 8 GPUs"):
        plan_for(gpus_per_node=16)


def test_what_is_served_elsewhere_takes_no_node_and_its_key_is_handed_on() -> None:
    served = {"type": "served", "base_url": "https://teachers:8000/v1", "model": "big", "key_env": "TEACHER_KEY"}
    fields = recipe_data(orchestrator={"advantages": "opd"}, teacher=served)
    plan = derive(Recipe.model_validate(fields), site(), RUN)
    assert not teachers(plan) and "TEACHER_KEY" in plan.pass_env
    assert "--teachers" not in plan.process("orchestrator").argv


def test_it_is_emulated_like_any_engine(tmp_path: Path) -> None:
    process = teachers(emulate(plan_for()))[0]
    assert process.argv[2] == STAND_INS["engine"]
    served = {"type": "served", "base_url": "http://t", "model": "m"}
    path = write_recipe(tmp_path / "r.yaml", orchestrator={"advantages": "opd"}, teacher=served)
    with pytest.raises(UsageError, match=r"teacher\.type = served: has no stand-in"):
        load(path, emulate=True)


def tokenizer(directory: Path, *tokens: str) -> Path:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return directory


def problems(asked: Recipe) -> list[Violation]:
    """Return problems of the teacher's files. Those of the policy have none."""
    return list(read_file_metadata(asked).problems)


def test_its_files_and_tokenizer_are_checked(tmp_path: Path) -> None:
    policy = tokenizer(model_dir(tmp_path / "policy"), "a", "b", "c")
    teacher = tokenizer(model_dir(tmp_path / "teacher"), "a", "c", "b", "d")
    changes = {"model": {"path": str(policy)}}
    (found,) = problems(recipe(changes, path=str(teacher)))
    assert str(found) == (
        f"teacher.path = {teacher}: its tokenizer differs from the policy's in 3 tokens"
        " (use a model with the vocabulary of model.path)"
    )
    tokenizer(teacher, "a", "b", "c")
    assert problems(recipe(changes, path=str(teacher))) == []
    (found,) = problems(recipe({**changes, "seq_len": 4096}, path=str(teacher)))
    assert (found.field, found.value, found.fix) == ("seq_len", "4096", "nearest: 4095")
    files = read_file_metadata(recipe(changes, path="/models/none"))
    assert files.problems == () and files.teacher is not None and files.teacher.absent is not None and files.blocked
    link = tmp_path / "link"
    link.symlink_to(teacher)
    resolved = with_absolute_paths(recipe(changes, path=str(link))).teacher
    assert resolved is not None and resolved.type == "engines" and resolved.path == str(teacher)


def test_its_memory_and_rules_are_those_of_engines() -> None:
    policy = {"model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}}

    def found(**teacher: Any) -> tuple[list[str], list[str]]:
        asked = recipe(policy, **teacher)
        findings, estimate = reviewed(asked, site(**H200))
        assert estimate is not None
        texts = [f"{f.level} {f.field}: {f.text}" for f in findings if f.field.startswith("teacher")]
        return texts, [role.role for role in estimate.roles]

    texts, roles = found(path="Qwen/Qwen3-30B-A3B")
    assert roles == ["train", "inference", "teacher"]
    assert texts == ["blocked teacher.path: is not in the Hugging Face cache on this machine"]
    texts, _ = found(path="Qwen/Qwen3-235B-A22B-Thinking-2507")
    assert any(text.startswith("error teacher: does not fit") for text in texts)
