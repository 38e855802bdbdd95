"""Slurm options of recipe and site: refused values with advice, and values in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.base.errors import UsageError
from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.slurm.render import render
from tests.support.recipes import site, write_recipe


def problems(path: Path, **slurm: Any) -> list[str]:
    """Return the violations of a recipe with these Slurm options."""
    with pytest.raises(UsageError) as caught:
        load_recipe(write_recipe(path / "r.yaml", slurm=slurm))
    return [str(violation) for violation in caught.value.violations]


def plan(path: Path, slurm: dict[str, Any], changes: dict[str, Any] | None = None) -> Plan:
    """Return the plan of a recipe with these Slurm options on a site with these changes."""
    return derive(load_recipe(write_recipe(path / "r.yaml", slurm=slurm)), site(**(changes or {})), Path("/runs/x"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": 86400}, 'slurm.time = 86400: must be HH:MM:SS or D-HH:MM:SS, in quotes (nearest: "24:00:00")'),
        ({"time": "4:30"}, "slurm.time = '4:30': must be HH:MM:SS or D-HH:MM:SS, in quotes (nearest: \"04:30:00\")"),
        (
            {"train": {"mem": "200 GB"}},
            "slurm.train.mem = '200 GB': must be a whole number with K, M, G or T, for example 200G (nearest: 200G)",
        ),
        ({"acount": "x"}, "slurm.acount = 'x': no such key (did you mean account?)"),
        ({"train": {"nodelsit": "x"}}, "slurm.train.nodelsit = 'x': no such key (did you mean nodelist?)"),
        (
            {"dependency": "afterOK:12"},
            "slurm.dependency = 'afterOK:12': 'afterOK' is not a kind of dependency (did you mean afterok?)",
        ),
        (
            {"dependency": "afterok"},
            "slurm.dependency = 'afterok': afterok needs job ids (for example afterok:123 or afterok:123:456)",
        ),
        (
            {"dependency": "afterok:1,afterany:2?singleton"},
            "slurm.dependency = 'afterok:1,afterany:2?singleton': mixes , (all conditions) and ? (any condition) "
            "(use one of them)",
        ),
        (
            {"mail": {"types": ["FAILED"]}},
            "slurm.mail.types.0 = 'FAILED': is not a valid choice (did you mean FAIL?)",
        ),
        ({"mail": {"user": "a b"}}, "slurm.mail.user = 'a b': must be one user or mail address"),
        (
            {"train": {"switches": "1@2h"}},
            "slurm.train.switches = '1@2h': must be COUNT or COUNT@HH:MM:SS (for example \"1@02:00:00\")",
        ),
        ({"extra": ["-p x"]}, "slurm.extra.0 = '-p x': must be one long option of sbatch (for example --wckey=x)"),
        (
            {"extra": ["--partition=x"]},
            "slurm.extra.0 = '--partition=x': --partition is set by the plan (use partition of a component)",
        ),
        # sbatch accepts any unambiguous prefix
        ({"extra": ["--outp=x"]}, "slurm.extra.0 = '--outp=x': --output is set by the plan (leave it out)"),
        (
            {"container": {"type": "pyxi", "image": "x"}},
            "slurm.container.type = 'pyxi': is not a valid choice (did you mean pyxis?)",
        ),
        (
            {"container": {"type": "pyxis", "image": "x", "mounts": ["data:/data"]}},
            "slurm.container.mounts.0 = 'data:/data': must be /source, /source:/target or /source:/target:flags "
            "(paths must not contain : or ,)",
        ),
        ({"account": "a b"}, "slurm.account = 'a b': must be one name of letters, digits and . _ - @ + :"),
        ({"licenses": "a;b"}, "slurm.licenses = 'a;b': must be NAME or NAME:COUNT, separated by commas"),
    ],
)
def test_a_bad_option_is_refused_with_the_nearest_good_one(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    assert problems(tmp_path, **given) == [said]


def test_all_bad_options_come_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, time="x", account="a b", train={"mem": "x"}, extra=["--nodes=2"])
    assert [line.split(" = ")[0] for line in found] == [
        "slurm.time",
        "slurm.account",
        "slurm.extra.0",
        "slurm.train.mem",
    ]


@pytest.mark.parametrize(
    ("slurm", "changes", "said"),
    [
        ({"exclude": "n[3-1]"}, {}, "slurm.exclude = 'n[3-1]': not a Slurm host list, range '3-1' runs backwards: "),
        ({}, {"nodes": {"default": {"nodelist": "a,,b"}}}, "site test-site: nodes.default.nodelist = 'a,,b': "),
        ({"time": "01:00:00", "time_min": "02:00:00"}, {}, "slurm.time_min = 02:00:00: is longer than time = 01:00:00"),
        ({"time": "00:02:00"}, {}, "slurm.checkpoint_signal_s = 120: the job only runs for 2 min (nearest: 60)"),
        ({"train": {"mem": "1G", "mem_per_gpu": "1G"}}, {}, "slurm.train.mem_per_gpu = 1G: contradicts mem"),
        ({}, {"runs": "/a/%j/b%t"}, "site test-site: runs = /a/%j/b%t: submitit would replace %j and %t in /a/%j/b%t/"),
    ],
)
def test_contradictions_are_found_with_the_site(
    tmp_path: Path, slurm: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, slurm, changes)
    assert str(caught.value).startswith(said)


def test_the_recipe_comes_before_the_site(tmp_path: Path) -> None:
    defaults = {"account": "site", "qos": "low", "time": "02:00:00", "extra": ["--wckey=x"], "exclude": "bad1"}
    given = plan(tmp_path, {"qos": "high", "nice": 0}, {"slurm": defaults})
    job = given.job
    assert (job.account, job.qos, job.time, job.extra, job.exclude, job.nice) == (
        ("site", "high", "02:00:00", ("--wckey=x",), "bad1", 0)
    )


def test_components_take_what_their_nodes_say_unless_the_recipe_does(tmp_path: Path) -> None:
    kind = {"constraint": "nvme", "exclusive": True, "mem": "1000G", "switches": "1"}
    slurm = {"train": {"constraint": "ib", "mem_per_gpu": "100G"}, "inference": {"exclusive": False}}
    control, train, inference = plan(tmp_path, slurm, {"nodes": {"default": kind}}).groups
    assert (control.constraint, control.exclusive, control.mem) == (None, False, None)
    assert (train.constraint, train.exclusive, train.mem, train.switches) == ("ib", True, "800G", "1")
    assert (inference.constraint, inference.exclusive, inference.mem) == ("nvme", False, "1000G")


def test_containers_see_the_run_directory(tmp_path: Path) -> None:
    pyxis = {"type": "pyxis", "image": "nvcr.io#a/b:c", "mounts": ["/data:/d:ro"], "workdir": "/w"}
    assert plan(tmp_path, {"container": pyxis}).job.srun == (
        "--container-image=nvcr.io#a/b:c",
        "--container-mounts=/runs/x:/runs/x,/data:/d:ro",
        "--container-readonly",
        "--no-container-mount-home",
        "--container-workdir=/w",
    )
    apptainer = {"type": "apptainer", "image": "/i.sif", "mounts": ["/data"], "options": ["--writable-tmpfs"]}
    job = plan(tmp_path, {"container": apptainer}).job
    assert job.srun == ()
    assert job.launcher == (
        *("apptainer", "exec", "--nv", "--bind", "/runs/x:/runs/x", "--bind", "/data"),
        *("--writable-tmpfs", "/i.sif"),
    )


def test_secrets_are_passed_and_never_written(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", inference={"env": {"HF_TOKEN": "hf_123"}, "vllm_extra": {"api_key": "x"}})
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    found = {violation.field: violation.fix for violation in caught.value.violations}
    assert found["inference.env.HF_TOKEN"] == "`pass_env: [HF_TOKEN]`, and export HF_TOKEN where you submit"
    assert set(found) == {"inference.env.HF_TOKEN", "inference.vllm_extra.api_key"}
    assert "hf_123" not in str(caught.value)


def test_a_site_is_held_to_the_same_rules(tmp_path: Path) -> None:
    bad = {
        "name": "s",
        "runs": "a\\b",
        "nodes": {"default": {"partition": "a b", "cpus": 1}},
        "env": {"A B": "x"},
        "modules": ["-x"],
        "slurm": {"time": "x"},
        "library_path": ["a:b"],
        "prologue": ["true"] * 13,
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(bad))
    with pytest.raises(UsageError) as caught:
        load_site(tmp_path / "s.yaml")
    fields = [violation.field for violation in caught.value.violations]
    assert fields == [
        *("runs", "nodes.default.partition", "slurm.time", "modules.0", "prologue", "env.A B", "library_path.0")
    ]


def asked(given: Plan) -> dict[str, tuple[str | None, str | None, str | None, str | None, bool]]:
    return {g.name: (g.gres, g.gpus_per_node, g.mem, g.mem_per_cpu, g.exclusive) for g in given.groups}


def kinds(**options: Any) -> dict[str, Any]:
    """Return a site whose nodes have 8 GPUs, 96 cores and these options."""
    return {"nodes": {"default": {"partition": "gpu", "gpus": 8, "cpus": 96, **options}}}


TWO_GPUS = {"deployment": {"train": {"gpus_per_node": 2}}}


def plan_on(path: Path, changes: dict[str, Any], **recipe: Any) -> Plan:
    return derive(load_recipe(write_recipe(path / "r.yaml", **recipe)), site(**changes), Path("/runs/x"))


def test_gpus_are_asked_for_as_the_site_says(tmp_path: Path) -> None:
    typed = plan_on(tmp_path, kinds(request_gpus="gpus-per-node", gres="gpu:h200"), **TWO_GPUS)
    assert asked(typed)["train"] == (None, "h200:2", None, None, False)
    assert "--gpus-per-node=h200:2" in render(typed) and "--gres" not in render(typed)
    plain = plan_on(tmp_path, kinds(request_gpus="gpus-per-node"))
    assert asked(plain)["inference"] == (None, "8", None, None, False)


def test_a_site_without_generic_resources_gets_whole_nodes(tmp_path: Path) -> None:
    given = plan_on(tmp_path, kinds(request_gpus="none", mem="800G"), **TWO_GPUS)
    train = next(group for group in given.groups if group.name == "train")
    assert asked(given)["train"] == (None, None, "800G", None, True)
    assert train.cpus_per_task == 96, "no other job uses the rest of the node"
    assert "gres" not in render(given) and "gpus-per-node" not in render(given)
    shared = plan_on(tmp_path, kinds(request_gpus="none", exclusive=False))
    assert not any(group.exclusive for group in shared.groups)


def test_memory_per_core(tmp_path: Path) -> None:
    given = plan_on(tmp_path, kinds(mem_per_cpu="3968M"), **TWO_GPUS)
    assert asked(given)["train"] == ("gpu:2", None, None, "3968M", False)
    assert asked(given)["inference"][3] == "3968M"
    assert "--mem-per-cpu=3968M" in render(given) and "--mem=" not in render(given)


def test_memory_per_core_and_per_node_do_not_meet_in_one_job(tmp_path: Path) -> None:
    given = plan_on(tmp_path, kinds(mem_per_cpu="4G"), **TWO_GPUS, slurm={"inference": {"mem": "100G"}})
    memory = {name: options[2:4] for name, options in asked(given).items()}
    assert memory["inference"] == ("100G", None) and memory["train"] == ("96G", None)
    assert "--mem-per-cpu" not in render(given)


def test_memory_is_requested_once(tmp_path: Path) -> None:
    said = {"train": {"mem": "1G", "mem_per_gpu": "2G", "mem_per_cpu": "3G"}}
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, said)
    assert [str(violation) for violation in caught.value.violations] == [
        "slurm.train.mem_per_gpu = 2G: contradicts mem (keep one of them)",
        "slurm.train.mem_per_cpu = 3G: contradicts mem (keep one of them)",
    ]
