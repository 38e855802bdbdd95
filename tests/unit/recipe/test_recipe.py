"""Reading of recipes and site files: `extends`, overrides, deprecated names, and one message for each fault."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.base.errors import UsageError
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.types import minutes
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site, read_recipe
from primeslurm.recipe.sections.losses import GrpoClipLoss
from tests.support.recipes import recipe_data, write_recipe


def messages(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return [str(violation) for violation in caught.value.violations]


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_step": 3}, ["max_step = 3: no such key (did you mean max_steps?)"]),
    ({"batch_size": 3}, ["batch_size = 3: no such key (did you mean orchestrator.batch_size or sft.batch_size?)"]),
    ({"trainer": {"ep": 8}}, ["trainer.ep = 8: no such key (did you mean trainer.parallelism.ep?)"]),
    ({"seed": 2**32}, ["seed = 4294967296: must be at most 4294967295 (nearest: 4294967295)"]),
    ({"max_steps": 0}, ["max_steps = 0: must be greater than 0 (nearest: 1)"]),
    ({"max_steps": "many"}, ["max_steps = 'many': must be a whole number"]),
    ({"model": {"dtype": "float"}}, ["model.dtype = 'float': is not a valid choice (did you mean float32?)"]),
    (
        {"deployment": {"inference": {"type": "disagregated"}}},
        ["deployment.inference.type = 'disagregated': is not a valid choice (did you mean disaggregated?)"],
    ),
    (
        {"deployment": {"inference": {"type": "disaggregated", "prefil": {}}}},
        ["deployment.inference.prefil = {{}}: no such key (did you mean prefill?)"],
    ),
    (
        {"environments": [{"idd": "x"}]},
        [
            "environments.0.id: is required but missing in {path}",
            "environments.0.idd = 'x': no such key (did you mean id?)",
        ],
    ),
    ({"environments": []}, ["environments: task rl needs at least one (add `environments: [{{id: reverse-text}}]`)"]),
    (
        {"orchestrator": {"batch_size": 18}},
        ["orchestrator.batch_size = 18: must be a multiple of orchestrator.group_size = 4 (nearest: 16)"],
    ),
    (
        {"orchestrator": {"max_inflight_rollouts": 2}},
        ["orchestrator.max_inflight_rollouts = 2: must be at least orchestrator.group_size = 4 (nearest: 4)"],
    ),
    (
        {"environments": [{"id": "a"}, {"id": "a"}]},
        ["environments = a: names must be unique (give each a `name`)"],
    ),
    (
        {"orchestrator": {"sampling": {"max_tokens": 128}}},
        ["orchestrator.sampling.max_tokens = 128: leaves no room for a prompt in seq_len = 128"],
    ),
    ({"model": {"max_len": 64}}, ["model.max_len = 64: is shorter than seq_len = 128"]),
    ({"task": "sft"}, ["sft: task sft needs this section (add `sft: {{data: {{type: jsonl, path: ...}}}}`)"]),
    ({"task": "serve"}, ["environments = reverse-text: task serve runs none (leave them out, or use task: rl)"]),
    (
        {"orchestrator": {"advantages": "opd"}, "trainer": {"loss": {"type": "ipo", "ref_kl": 0.1}}},
        [
            "trainer.loss.ref_kl = 0.1: needs a teacher (add `teacher: {{type: engines, path: ...}}`)",
            "orchestrator.advantages = opd: needs a teacher (add `teacher: {{type: engines, path: ...}}`)",
        ],
    ),
    (
        {"teacher": {"type": "engines", "path": "x"}, "orchestrator": {"opd_reward": 0.5}},
        [
            "orchestrator.opd_reward = 0.5: advantages: grpo already come from the reward"
            " (leave it out, or use advantages: opd)",
            "teacher = engines: nothing uses its log-probabilities"
            " (set trainer.loss.ref_kl or orchestrator.advantages: opd, or leave it out)",
        ],
    ),
    (
        {"orchestrator": {"algorithm": {"function": "a.b:C"}, "advantages": "max_rl", "opd_reward": 0.5}},
        [
            "orchestrator.advantages = max_rl: orchestrator.algorithm = a.b:C computes the advantages (leave one out)",
            "orchestrator.opd_reward = 0.5: orchestrator.algorithm = a.b:C computes the advantages (leave one out)",
        ],
    ),
    (
        {"orchestrator": {"algorithm": {"type": "custom", "function": "a.b.C"}}},
        ["orchestrator.algorithm.function = 'a.b.C': must be package.module:function"],
    ),
    (
        {"orchestrator": {"algorithm": {"type": "rloo", "function": "a:b", "arguments": {}}}},
        [
            "orchestrator.algorithm.type = 'rloo': is not a valid choice (valid: custom)",
            "orchestrator.algorithm.arguments = {{}}: no such key (did you mean kwargs?)",
        ],
    ),
    (
        {"task": "serve", "environments": [], "teacher": {"type": "engines", "path": "x"}},
        ["teacher = engines: task serve samples no tokens for it (leave it out)"],
    ),
    (
        {"teacher": {"type": "engine", "path": "x"}},
        ["teacher.type = 'engine': is not a valid choice (did you mean engines?)"],
    ),
    ({"teacher": {"path": "x"}}, ["teacher.type: is required but missing in {path} (valid: engines, policy, served)"]),
    (
        {"teacher": {"type": "served", "base_url": "teacher:8000", "model": "m"}},
        ["teacher.base_url = 'teacher:8000': must be an http or https URL, for example http://host:8000/v1"],
    ),
    ({"slurm": {"time": "soon"}}, ["slurm.time = 'soon': must be HH:MM:SS or D-HH:MM:SS, in quotes"]),
    (
        {"name": "Bad Name"},
        [
            "name = 'Bad Name': must be at most 63 of a-z, 0-9 and . _ -, the first a letter or a digit"
            " (nearest: bad-name)"
        ],
    ),
    (
        {"model": None, "environments": 3, "monitor": {"tensorboard": "no idea"}, "name": 7},
        [
            'name = 7: must be text (nearest: "7")',
            "model = null: must be a section of keys and values",
            "environments = 3: must be a list (nearest: [3])",
            "monitor.tensorboard = 'no idea': must be true or false",
        ],
    ),
    (
        {"environments": [{"id": "a", "runtime": {"type": "subprocess", "limits": {"memory": 4}}}]},
        ["environments.0.runtime.limits.memory = 4: no such key (did you mean memory_gb?)"],
    ),
    ({"trainer": {"parallelism": {"ep": True}}}, ["trainer.parallelism.ep = 'true': must be a whole number"]),
    ({"trainer": {"optimizer": {"lr": math.inf}}}, ["trainer.optimizer.lr = inf: must be a finite number"]),
    (
        {"inference": {"gpu_memory_utilization": 2}},
        ["inference.gpu_memory_utilization = 2: must be at most 1 (nearest: 1)"],
    ),
    (
        {"environments": [{"id": "reverse-text", "args": {"a": math.nan}}]},
        [
            "environments.0.args.a = nan: cannot be written as JSON"
            " (valid: finite numbers, text, true, false, null, lists, mappings)"
        ],
    ),
    (
        {
            "orchestrator": {"batch_size": 24, "max_inflight_rollouts": 8},
            "environments": [{"id": "a"}, {"id": "b", "group_size": 6}, {"id": "c", "group_size": 16}],
        },
        [
            "orchestrator.batch_size = 24: must be a multiple of the group_size of c = 16 (nearest: 32)",
            "environments.1.group_size = 6: must be a multiple of orchestrator.group_size = 4:"
            " batches could not be filled with whole groups (nearest: 8)",
            "environments.2.group_size = 16: must be a multiple of the group_size of b = 6: batches could not be filled"
            " with whole groups (nearest: 18)",
            "orchestrator.max_inflight_rollouts = 8: must be at least the group_size of c = 16 (nearest: 16)",
        ],
    ),
    (
        {"environments": [{"id": "a", "sampling": {"max_tokens": 128}, "advantages": "opd", "weight": 0}]},
        [
            "environments.0.weight = 0: no environment would be trained (leave it out for one of the environments)",
            "environments.0.sampling.max_tokens = 128: leaves no room for a prompt of a in seq_len = 128",
            "environments.0.advantages = opd: a needs a teacher (add `teacher: {{type: engines, path: ...}}`)",
        ],
    ),
    (
        {
            "orchestrator": {
                "advantages": "opd",
                "filters": [{"type": "zero_advantage"}, {"type": "truncated"}, {"type": "truncated"}],
            },
            "teacher": {"type": "engines", "path": "x"},
            "environments": [
                {
                    "id": "a",
                    "curriculum": {"hard": 0.8, "shares": {"unseen": 0}},
                    "filters": [{"type": "length", "min_tokens": 9, "max_tokens": 3}],
                },
                {"id": "b"},
            ],
        },
        [
            "orchestrator.filters = truncated: is given twice (keep one filter of each type)",
            "environments.0.filters.0.max_tokens = 3: is less than min_tokens = 9",
            "environments.0.curriculum.hard = 0.8: must be below curriculum.easy = 0.75",
            "environments.0.curriculum.shares.unseen = 0: new examples would never be drawn after the first one"
            " (use a positive weight)",
            "orchestrator.filters = zero_advantage: advantages of b come from the teacher's log-probabilities, not from"
            " the rewards of a group (leave it out)",
        ],
    ),
    (
        {"orchestrator": {"filters": [{"type": "zero_advantage", "action": "mask"}, {"type": "gibberisch"}]}},
        [
            "orchestrator.filters.0.action = 'mask': is not a valid choice (valid: drop, monitor)",
            "orchestrator.filters.1.type = 'gibberisch': is not a valid choice (did you mean gibberish?)",
        ],
    ),
    ({"schema": 2}, ["schema = 2: is not a valid choice (valid: 1)"]),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[str(list(changes)) for changes, _ in BAD])
def test_bad_input_gives_all_violations_at_once(tmp_path: Path, changes: dict[str, Any], expected: list[str]) -> None:
    path = write_recipe(tmp_path / "r.yaml", **changes)
    assert messages(path) == [line.format(path=path) for line in expected]


DOUBLED = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
"""40 lines that stand for a terabyte of values."""
BROKEN = [
    ("a: [1,\nb: 2", "{path}:2:5: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("", "{path}: must be a mapping of keys to values, is empty"),
    ("- a\n", "{path}: must be a mapping of keys to values, is a list"),
    ("\t: x", "{path}:1:1: not valid YAML: found character '\\t' that cannot start any token"),
    ("a: &x {b: *x}\n", "{path}:1:4: not valid YAML: an alias contains itself"),
    (DOUBLED, "{path}: not valid YAML: aliases repeat more than 100,000 values"),
    ("a: !!int x", "{path}: not valid YAML: invalid literal for int() with base 10: 'x'"),
    ("a: " + "[" * 2000, "{path}: not valid YAML: nested too deeply"),
    ("a: \0", "{path}: not valid YAML: unacceptable character #x0000: special characters are not allowed"),
    ("--- 1\n", "{path}: must be a mapping of keys to values, is a single value"),
    ("extends: 3", "extends = 3: must be one relative path"),
    ("extends: r.yaml", "extends = r.yaml: goes in a circle: r.yaml -> r.yaml"),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN, ids=[repr(text) for text, _ in BROKEN])
def test_broken_file_gives_position_and_reason(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert messages(path) == [expected.format(path=path)]


def test_repeated_keys_are_reported_beside_all_other_errors(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", max_steps="x")
    path.write_text(path.read_text() + "model: {dtype: float32, dtype: float64}\nrequired: 1\nrequired: 2\n")
    last = len(path.read_text().splitlines())
    repeated = [line for line in messages(path) if "is given twice" in line]
    places = [f"{path}:{last - 2}:25: dtype", f"{path}:{last - 2}:1: model", f"{path}:{last}:1: required"]
    assert repeated == [f"{place} is given twice (keep one of them)" for place in places]
    others = {line.partition(":")[0].partition(" ")[0] for line in messages(path) if line not in repeated}
    assert others == {"max_steps", "model.dtype", "required"}  # model.path of the first section is not missing


def test_error_of_a_missing_file_suggests_a_similar_name(tmp_path: Path) -> None:
    write_recipe(tmp_path / "reverse_text.yaml")
    assert messages(tmp_path / "revers_text.yaml") == [
        f"{tmp_path}/revers_text.yaml: cannot be read: No such file or directory (did you mean reverse_text.yaml?)"
    ]


def test_only_regular_utf8_files_are_read(tmp_path: Path) -> None:
    loop, pipe, latin = (tmp_path / name for name in ("loop.yaml", "pipe.yaml", "latin.yaml"))
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    latin.write_bytes("name: grün\n".encode("latin-1"))
    assert messages(loop) == [f"RECIPE = '{loop}': Symlink loop from '{loop}'"]
    assert messages(pipe) == [f"{pipe}: is not a regular file"]
    assert messages(tmp_path) == [f"{tmp_path}: is a directory"]
    assert messages(latin) == [f"{latin}: not text in UTF-8 (byte 8)"]


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write_recipe(tmp_path / "base.yaml", environments=[{"id": "a"}, {"id": "b"}])
    child = tmp_path / "sub" / "child.yaml"
    child.parent.mkdir()
    child.write_text("extends: ../base.yaml\nname: child\norchestrator: {group_size: 8}\nenvironments: [{id: c}]\n")
    recipe = load_recipe(child)
    assert (recipe.name, recipe.orchestrator.group_size, recipe.orchestrator.batch_size) == ("child", 8, 16)
    assert [environment.id for environment in recipe.environments] == ["c"]


def test_another_type_replaces_the_whole_section(tmp_path: Path) -> None:
    prefill = {"deployment": {"inference": {"type": "disaggregated", "prefill": {"num_replicas": 2}}}}
    write_recipe(tmp_path / "base.yaml", **prefill)
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\ndeployment: {inference: {type: multi_node, num_replicas: 3}}\n")
    inference = load_recipe(child).deployment.inference
    assert (inference.type, inference.num_replicas) == ("multi_node", 3)


def test_overrides_reach_into_lists_and_parse_yaml(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml")
    overrides = ("max_steps=9", "environments.0.args={min_length: 2}", "trainer.optimizer.max_norm=null")
    recipe = load_recipe(path, overrides)
    assert recipe.max_steps == 9
    assert recipe.environments[0].args == {"min_length": 2}
    assert recipe.trainer.optimizer.max_norm is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_steps", "--set = max_steps: must be key.path=value"),
        (
            "environments.4.id=x",
            "--set environments.4.id = x: there is no such place in the recipe (environments has entries 0 to 0)",
        ),
        (
            "environments.-1.id=x",
            "--set environments.-1.id = x: there is no such place in the recipe (environments has entries 0 to 0)",
        ),
        (
            "max_steps.x.y=1",
            "--set max_steps.x.y = 1: there is no such place in the recipe (max_steps is not a section)",
        ),
        ("trainer..fp8=1", "--set = trainer..fp8=1: must be key.path=value"),
        ("name=[", "--set name = [: the value is not valid YAML"),
    ],
)
def test_bad_override_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    assert messages(write_recipe(tmp_path / "r.yaml"), override) == [expected]


def test_override_does_not_change_values_shared_by_a_yaml_alias(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    text = yaml.safe_dump(recipe_data())
    path.write_text(text + "inference: {prefill: &same {max_num_seqs: 8}, decode: *same}\nmonitor:\n")
    recipe = load_recipe(path, ("inference.decode.max_num_seqs=4", "monitor.tensorboard=false"))
    assert (recipe.inference.prefill.max_num_seqs, recipe.inference.decode.max_num_seqs) == (8, 4)
    assert not recipe.monitor.tensorboard


def test_name_argument_is_not_parsed_as_yaml(tmp_path: Path) -> None:
    assert load_recipe(write_recipe(tmp_path / "r.yaml"), name="12").name == "12"


def test_resolved_recipe_can_be_loaded(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(recipe_data())
    path = tmp_path / "recipe.resolved.json"
    path.write_text(recipe.model_dump_json(by_alias=True))
    assert load_recipe(path) == recipe


def test_site_file_is_validated(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "devise": "cpu", "nodes": {"default": {"partition": "p"}}}))
    with pytest.raises(UsageError) as caught:
        load_site(path)
    assert [str(v) for v in caught.value.violations] == [
        f"nodes.default.cpus: is required but missing in {path}",
        "devise = 'cpu': no such key (did you mean device?)",
    ]


@pytest.mark.parametrize(("text", "expected"), [("00:30:00", 30), ("1-00:00:00", 1440), ("00:00:01", 1)])
def test_slurm_time_in_minutes(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.optimizer.lr=-1", "trainer.optimizer.lr = -1: must be greater than 0"),
        ("max_steps=9223372036854775808", "max_steps = 9.22e+18: is too large (nearest: 9223372036854775807)"),
        (
            "environments.0.args={top: -1" + "0" * 30 + "}",
            "environments.0.args.top = -1e+30: is too large (nearest: -9223372036854775807)",
        ),
        (
            "nodes=4",
            "nodes = 4: no such key (did you mean teacher.nodes or deployment.train.nodes or "
            "deployment.environments.nodes?)",
        ),
        ("nodes={default: {}}", "nodes: belongs in the site file (move it to the site file)"),
    ],
)
def test_advice_names_an_accepted_value(tmp_path: Path, override: str, expected: str) -> None:
    path = write_recipe(tmp_path / "r.yaml")
    assert [str(each) for each in read_recipe(path, [override]).violations] == [expected]


@pytest.mark.parametrize(("key", "shown"), [("on", "True"), ("3", "3"), ("~", "None")])
def test_key_that_is_not_text_is_reported_with_other_faults(tmp_path: Path, key: str, shown: str) -> None:
    path = write_recipe(tmp_path / "r.yaml", seed=-1)
    path.write_text(f"{key}: 4\n{path.read_text()}")
    assert sorted(str(each) for each in read_recipe(path).violations) == sorted(
        [f"{shown}: a key must be text (write it in quotes)", "seed = -1: must be at least 0 (nearest: 0)"]
    )


OLD_NAMES: dict[str, Any] = {
    "trainer": {"loss": {"type": "grpo_clip", "adv_tau": 2.0}, "grouped_products": False},
    "orchestrator": {"staleness": {"at_least": 3}},
}


def test_deprecated_names_are_accepted_with_one_warning_each(tmp_path: Path) -> None:
    draft = read_recipe(write_recipe(tmp_path / "r.yaml", **OLD_NAMES))
    recipe = draft.valid_value()
    assert isinstance(recipe.trainer.loss, GrpoClipLoss) and recipe.trainer.loss.advantage_coef == 2.0
    assert not recipe.trainer.grouped_mm
    assert recipe.orchestrator.staleness.min_rollouts == 3
    assert [(each.field, each.fix) for each in draft.deprecations] == [
        ("orchestrator.staleness.at_least", "use min_rollouts"),
        ("trainer.grouped_products", "use grouped_mm"),
        ("trainer.loss.adv_tau", "use advantage_coef"),
    ]


def test_present_names_give_no_deprecation(tmp_path: Path) -> None:
    draft = read_recipe(write_recipe(tmp_path / "r.yaml", trainer={"grouped_mm": False, "memory": {}}))
    assert draft.deprecations == []


def test_old_and_new_name_together_are_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", trainer={"grouped_products": False, "grouped_mm": True})
    (violation,) = read_recipe(path).violations
    assert violation.field == "trainer.grouped_products" and violation.why == "no such key"


def test_value_of_a_deprecated_name_is_validated(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", trainer={"loss": {"type": "ipo", "adv_tau": -1}})
    assert messages(path) == ["trainer.loss.advantage_coef = -1: must be greater than 0"]
