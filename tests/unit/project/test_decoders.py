"""msgspec decoders are created by one thread, because two threads that first decode a type at the same time crash."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "primeslurm"
MAKES_THEM = {"wire/decoding.py"}


def findings(tree: ast.Module) -> list[int]:
    """Return the lines that create a decoder of a type at run time. Module-level ones are created by one thread."""
    with_module = {id(node.value) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in with_module:
            continue
        name = ast.unparse(node.func)
        typed = any(keyword.arg == "type" for keyword in node.keywords)
        decodes = any(name == f"msgspec.{each}.decode" for each in ("json", "msgpack", "yaml", "toml"))
        makes = any(name.endswith(f"{each}.Decoder") for each in ("json", "msgpack"))
        if makes or (decodes and typed):
            lines.append(node.lineno)
    return lines


def test_only_decoding_creates_decoders_at_run_time() -> None:
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    made = {name: lines for name, path in modules.items() if (lines := findings(ast.parse(path.read_text())))}
    assert made.keys() <= MAKES_THEM, f"wire.decoding are for this: {made}"


def test_checker_finds_violations() -> None:
    text = """
import msgspec
MADE_ONCE: object = msgspec.json.Decoder(int)
any_value = msgspec.json.decode(b"1")
def read(data):
    msgspec.json.decode(data, type=int)
    return msgspec.msgpack.Decoder(int).decode(data)
"""
    assert findings(ast.parse(text)) == [6, 7]
