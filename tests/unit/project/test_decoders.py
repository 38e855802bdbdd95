"""msgspec's decoders are made where one thread makes them: two that decode a type for the first time together crash."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "primeslurm"
MAKES_THEM = {"wire/decoding.py"}


def findings(tree: ast.Module) -> list[int]:
    """Lines that make a decoder of a type while they run. One that is made with its module is made by one thread."""
    with_module = {id(node.value) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in with_module:
            continue
        name = ast.unparse(node.func)
        typed = any(keyword.arg == "type" for keyword in node.keywords)
        decodes = any(name == f"msgspec.{each}.decode" for each in ("json", "msgpack", "yaml", "toml"))
        makes = any(name.endswith(f"{each}.Decoder") for each in ("json", "msgpack"))
        if makes or (decodes and typed):
            found.append(node.lineno)
    return found


def test_no_other_module_makes_a_decoder_while_threads_run() -> None:
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    made = {name: lines for name, path in modules.items() if (lines := findings(ast.parse(path.read_text())))}
    assert made.keys() <= MAKES_THEM, f"wire.decoding are for this: {made}"


def test_the_check_sees_what_it_looks_for() -> None:
    text = """
import msgspec
MADE_ONCE: object = msgspec.json.Decoder(int)
any_value = msgspec.json.decode(b"1")
def read(data):
    msgspec.json.decode(data, type=int)
    return msgspec.msgpack.Decoder(int).decode(data)
"""
    assert findings(ast.parse(text)) == [6, 7]
