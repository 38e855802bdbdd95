"""What decodes bytes is in the table of docs/security.md, and fuzzed, or it is said here why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "primeslurm"
DECODE = re.compile(
    r"(json|pickle|torch|np|tomllib)\.loads?|np\.frombuffer|struct\.unpack(_from)?|(py)?base64\.b64decode"
    r"|msgspec\.(json|msgpack|yaml|toml)\.decode|msgspec\.convert|yaml\.(safe_)?load"
    r"|(decoding\.)?(value|json_value)|read_json"
)
OWN = {
    "the model's or the data's files, which the user chose; what is wrong in them is an error that names the file": (
        "api/exporting.py",
        "node/preflight/checks.py",
        "orchestrator/batching/filters.py",
        "orchestrator/environments/harbor_local.py",
        "orchestrator/environments/math_problems.py",
        "orchestrator/rendering/choosing.py",
        "orchestrator/rendering/harmony.py",
        "orchestrator/rollouts/plausible.py",
        "plan/checks/files.py",
        "plan/checks/teacher.py",
        "trainer/data/sft_data.py",
        "trainer/weights/headers.py",
        "trainer/weights/huggingface.py",
        "trainer/weights/tensor_files.py",
    ),
    "what this package, its parent process or this process itself has written": (
        "families/catalog.py",
        "inference/router/serve.py",
        "node/preflight/loaded.py",
        "orchestrator/environments/sandbox/inside.py",
        "orchestrator/environments/sandbox/scripts.py",
        "orchestrator/rendering/probing.py",
        "run/diff.py",
        "slurm/embedded/cluster.py",
        "slurm/inventory.py",
        "trainer/checkpoints/shards.py",
        "wire/environment_probe.py",
    ),
    "the kernel's answer, or a part of what one that is in the table reads": (
        "files.py",
        "node/host/network.py",
        "orchestrator/rendering/deepseek_v31.py",
        "run/status/placement.py",
        "wire/received.py",
    ),
}
ELSEWHERE = {
    "trainer/data/image_reader.py": "tests/trainer/data/test_damaged_images.py",
    "wire/batches/data_uri.py": "tests/unit/wire/test_data_uri.py",
    "rollouts/tool_servers.py": "tests/unit/orchestrator/test_tool_servers.py",
}
"""Damaged beside tests of what they need."""


def decoders() -> set[str]:
    """Modules with a call that turns bytes into values."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and DECODE.fullmatch(ast.unparse(node.func))
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }


def named() -> set[str]:
    """Modules, or beginnings of their names, in the table of what comes in."""
    page = (ROOT / "docs" / "security.md").read_text()
    table = page[page.index("| what | read by |") : page.index("Not looked at:")]
    words = {word for row in table.strip().splitlines()[2:] for word in re.findall(r"`([\w/.]+)`", row.split("|")[2])}
    return {word for word in words if word.endswith(".py") or (PACKAGE / word).is_dir()}


def known(module: str) -> bool:
    return any(module.endswith(word) or module.startswith(f"{word}/") or f"/{word}/" in module for word in named())


def test_every_module_that_decodes_is_in_the_table_or_reads_its_own() -> None:
    own = {module for modules in OWN.values() for module in modules}
    found = decoders()
    assert sorted(module for module in found - own if not known(module)) == []
    assert sorted(own - found) == [], "they decode nothing any more"


def imported(text: str) -> set[str]:
    """Modules, and names in them, that a test imports."""
    found = set(re.findall(r"^from (primeslurm[\w.]*) import", text, re.MULTILINE))
    pairs = re.findall(r"^from (primeslurm[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    return found | {f"{module}.{name.strip()}" for module, names in pairs for name in names.split(",")}


def test_every_module_of_the_table_is_there_and_fuzzed() -> None:
    fuzz = imported("\n".join(path.read_text() for path in (ROOT / "tests" / "unit" / "fuzz").glob("*.py")))
    modules = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*")]
    for word in sorted(named()):
        meant = {f"primeslurm.{each.removesuffix('.py').replace('/', '.')}" for each in modules if each.endswith(word)}
        assert meant, f"docs/security.md names {word}, which is not there"
        tested = imported((ROOT / ELSEWHERE[word]).read_text()) if word in ELSEWHERE else fuzz
        assert any(name.startswith(each) for each in meant for name in tested), f"{word} is read and not fuzzed"
