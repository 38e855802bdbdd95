"""`./just test` and `./just campaigns` run all tests."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]


def test_every_test_directory_is_run() -> None:
    words = set(re.findall(r"[\w/]+", (ROOT / "scripts" / "test.sh").read_text()))
    directories = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert directories - words == set()


def test_nightly_workflow_runs_every_campaign() -> None:
    campaigns = re.findall(r"^    (\w+)\) ", (ROOT / "scripts" / "campaigns.sh").read_text(), re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    assert workflow["jobs"]["campaign"]["strategy"]["matrix"]["name"] == campaigns
