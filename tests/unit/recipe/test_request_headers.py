"""`orchestrator.extra_headers_from_state`: which names and fields it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.recipe.reading.recipe_files import load_recipe
from tests.support.recipes import write_recipe

FIELD = "orchestrator.extra_headers_from_state"


@pytest.mark.parametrize(
    "name",
    ["Authorization", "content-type", "Content-Length", "HOST", "cookie", "Proxy-Authorization", "X-Request-Id",
     "X-data-parallel-rank", "X-Primeslurm-Engine", "X Group", "X-Group\r\nAuthorization", "X-Group\n", "X-Größe", ""],
)  # fmt: skip
def test_headers_that_others_set_and_names_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    path = write_recipe(tmp_path / "r.yaml", orchestrator={"extra_headers_from_state": {name: "group_id"}})
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    (violation,) = caught.value.violations
    assert violation.field.startswith(FIELD) and violation.why and "X-Group-ID" in violation.fix


@pytest.mark.parametrize(
    ("headers", "fix"),
    [
        ({"X-Group": "group"}, "did you mean group_id?"),
        ({"X-Group": "group_id", "x-group": "rollout_id"}, "leave one out"),
    ],
)
def test_unknown_fields_and_repeated_names_are_refused(tmp_path: Path, headers: dict[str, str], fix: str) -> None:
    path = write_recipe(tmp_path / "r.yaml", orchestrator={"extra_headers_from_state": headers})
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    (violation,) = caught.value.violations
    assert violation.field.startswith(FIELD) and fix in violation.fix
