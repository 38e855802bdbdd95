"""A check reports every fault of a recipe once and in one pass, without its consequences."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.api.checks.recipe_check import Examination, examine
from primeslurm.api.sites import draft_site
from primeslurm.recipe.reading.recipe_files import read_recipe
from tests.support.cli import primeslurm
from tests.support.recipes import model_dir, write_recipe

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "qwen3_30b_a3b_math.yaml"
SITE = ROOT / "sites" / "h200.yaml"
HELD_OUT = "{id: math-problems, name: held-out, args: {path: /data/x.jsonl}}"
EVALUATED = f"evaluation={{interval: 20, environments: [{HELD_OUT}]}}"
FAULTS = {
    # Unknown fields, and values of a wrong type
    "max_step=3": "max_step",
    "foo.bar=1": "foo.bar",
    "learning_rate=1e-6": "learning_rate",
    "slurm.partition=h100": "slurm.partition",
    "trainer.kl_coef=0.1": "trainer.kl_coef",
    "inference.vllm.enable_dbo=true": "inference.vllm.enable_dbo",
    "seed=many": "seed",
    "trainer.optimizer.lr=fast": "trainer.optimizer.lr",
    "trainer.optimizer.type=adam": "trainer.optimizer.type",
    "trainer.loss.type=ppo": "trainer.loss.type",
    "trainer.memory.activation_offload=maybe": "trainer.memory.activation_offload",
    "trainer.lora.rank=12": "trainer.lora.rank",
    "checkpoint.keep=0": "checkpoint.keep",
    "weights.transport=rdma": "weights.transport",
    "orchestrator.advantages=gae": "orchestrator.advantages",
    "orchestrator.oversampling=0.5": "orchestrator.oversampling",
    "inference.gpu_memory_utilization=2": "inference.gpu_memory_utilization",
    "inference.decode.max_num_seqs=0": "inference.decode.max_num_seqs",
    "environments.0.workers=none": "environments.0.workers",
    "evaluation.interval=often": "evaluation.interval",
    "monitor.tensorboard=perhaps": "monitor.tensorboard",
    "slurm.time=soon": "slurm.time",
    "pass_env=[A-B]": "pass_env.0",
    # Contradictions between fields
    "orchestrator.batch_size=250": "orchestrator.batch_size",
    "orchestrator.sampling.max_tokens=16384": "orchestrator.sampling.max_tokens",
    "model.max_len=64": "model.max_len",
    "model.renderer=qwen33": "model.renderer",
    "evaluation.keep_best=held-out/pass@7": "evaluation.keep_best",
    # Contradictions to the model or the site
    "trainer.parallelism.ep=7": "trainer.parallelism.ep",
    "inference.parallel.tp=5": "inference.parallel.tp",
    "inference.prefill.vllm_extra={port: 1}": "inference.prefill.vllm_extra.port",
    "deployment.spares.environments=1": "deployment.spares.environments",
}
"""Overrides of the recipe, and the field of the finding of each."""


def found(*overrides: str, site: Path = SITE) -> Examination:
    draft = read_recipe(RECIPE, [EVALUATED, *overrides])
    return examine(draft, draft_site(site), local=False, environments=False)


def fields(examined: Examination) -> list[str]:
    return sorted(error.field for error in examined.errors)


def test_recipe_without_faults_has_no_findings() -> None:
    assert found().errors == () and found().planned is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_gives_one_finding(fault: str) -> None:
    examined = found(fault)
    assert fields(examined) == [FAULTS[fault]], examined.errors


def samples() -> list[tuple[str, ...]]:
    chance = random.Random(44)
    return [tuple(chance.sample(sorted(FAULTS), chance.randint(2, 7))) for _ in range(40)]


@pytest.mark.parametrize("faults", samples(), ids=lambda faults: " ".join(fault.partition("=")[0] for fault in faults))
def test_each_of_several_faults_gives_one_finding(faults: tuple[str, ...]) -> None:
    examined = found(*faults)
    assert fields(examined) == sorted(FAULTS[fault] for fault in faults), examined.errors


def site_file(place: Path, **changes: Any) -> Path:
    data = yaml.safe_load(SITE.read_text())
    (place / "site.yaml").write_text(yaml.safe_dump(data | changes))
    return place / "site.yaml"


def test_faults_of_the_site_hide_no_faults_of_the_recipe(tmp_path: Path) -> None:
    faulty = site_file(tmp_path, device="tpu", partitions=["a"], node_silent_s="long")
    examined = found("trainer.parallelism.ep=7", "seed=many", site=faulty)
    assert fields(examined) == ["device", "node_silent_s", "partitions", "seed", "trainer.parallelism.ep"]


def test_missing_site_file_hides_no_faults_of_the_recipe(tmp_path: Path) -> None:
    examined = found("trainer.parallelism.ep=7", "seed=many", site=tmp_path / "none.yaml")
    assert fields(examined) == sorted(["--site", "seed", "trainer.parallelism.ep"])


def test_unreadable_recipe_is_the_only_finding(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("a: [1,")
    examined = examine(read_recipe(tmp_path / "r.yaml"), draft_site(SITE), local=False)
    (error,) = examined.errors
    assert "not valid YAML" in error.why


def test_memory_error_caused_by_a_fault_is_not_reported() -> None:
    tight = "trainer.parallelism.activation_checkpointing=none"
    alone = found(tight)
    assert fields(alone) == ["deployment.train"]
    assert fields(found(tight, "trainer.parallelism.cp=many")) == ["trainer.parallelism.cp"]
    assert fields(found(tight, "seed=many")) == ["deployment.train", "seed"]


def test_findings_of_all_stages_are_printed_together(tmp_path: Path) -> None:
    """A misspelt key, an unknown environment, a batch with a partial group, and a model without a chat template."""
    write_recipe(
        tmp_path / "r.yaml",
        model={"path": str(model_dir(tmp_path))},
        environments=[{"id": "no-such-environment"}],
        orchestrator={"batch_size": 58},
        max_step=3,
    )
    result = primeslurm("check", "r.yaml", "--local", "--no-slurm", cwd=tmp_path)
    assert result.code == 2
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].partition(" =")[0].strip() for line in errors] == [
        "max_step",
        "orchestrator.batch_size",
        "model.renderer",
        "environments.0.id",
    ]
    assert result.err.splitlines()[-1].startswith("r.yaml: 4 errors")
    assert list(tmp_path.glob("runs")) == []


@pytest.mark.parametrize("fault", ["model.path=[1]", "model=7"])
def test_placeholder_of_a_faulty_model_gives_no_findings(fault: str) -> None:
    examined = found(fault, "trainer.parallelism.cp=many")
    assert fields(examined) == sorted([fault.partition("=")[0], "trainer.parallelism.cp"])
    assert not [each for each in examined.others if "model" in each.field or "unknown" in str(each)]


@pytest.mark.parametrize("share", ["null", "0", "-0.1", "1", "40"])
def test_impossible_memory_share_of_colocated_engines_is_one_finding(share: str) -> None:
    """The impossible share is not also reported as a trainer that does not fit."""
    shape = "deployment={layout: one_node, colocated: true}"
    examined = found(
        *(shape, "trainer.parallelism.ep=1", "inference={}", "trainer.memory.optimizer_state_offload=true"),
        *("slurm={}", "weights.transport=filesystem", f"inference.gpu_memory_utilization={share}"),
    )
    assert fields(examined) == ["inference.gpu_memory_utilization"], examined.errors


def test_all_roles_that_exceed_one_node_are_reported() -> None:
    shape = "{layout: one_node, train: {nodes: 2, gpus_per_node: 4}, spares: {train: 1}, environments: {nodes: 1}"
    engines = "inference: {type: multi_node, num_replicas: 2}}"
    examined = found(f"deployment={shape}, {engines}", "slurm.inference={partition: other}")
    wrong = ["environments", "inference", "spares", "train.nodes"]
    assert fields(examined) == [*(f"deployment.{field}" for field in wrong), "slurm.inference"], examined.errors


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_missing_recipe_and_missing_site_are_both_reported(verb: str, tmp_path: Path) -> None:
    answer = primeslurm(verb, "none.yaml", "--site", "nowhere.yaml", cwd=tmp_path)
    assert answer.code == 2 and "RECIPE = none.yaml: " in answer.err and "--site = nowhere.yaml: " in answer.err


def test_errors_of_both_sides_of_a_comparison_are_reported(tmp_path: Path) -> None:
    site_file(tmp_path, device="tpu")
    write_recipe(tmp_path / "a.yaml", max_step=1)
    write_recipe(tmp_path / "b.yaml", seeds=1)
    answer = primeslurm("diff", "a.yaml", "b.yaml", cwd=tmp_path)
    starts = [line.strip().partition(":")[0] for line in answer.err.splitlines()]
    assert answer.code == 2 and starts == ["error", "device = 'tpu'", "a.yaml", "b.yaml"], answer.err
    assert "a.yaml: max_step = 1: no such key" in answer.err and "b.yaml: seeds = 1: no such key" in answer.err


def test_deprecated_name_is_a_warning_of_check_and_of_the_submitted_plan() -> None:
    examined = found("trainer.grouped_products=true")
    for findings in (examined.check().findings, examined.refuse().plan.findings):
        (warning,) = [each for each in findings if each.field == "trainer.grouped_products"]
        assert (warning.level, warning.fix) == ("warning", "use grouped_mm")
