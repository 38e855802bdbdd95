"""Write the generated pages of docs/; with --check, only say whether they are current."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from primeslurm.families import GENERIC, Capabilities, bundled, model_types
from primeslurm.plan.checks.compatibility import as_markdown
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reference import markdown
from scripts.cli_reference import cli_reference

DOCS = Path(__file__).resolve().parents[1] / "docs"
WRITTEN = "Written by `./just docs` from the code; a test keeps it current."


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    recipe = f"# Recipe reference\n\n{WRITTEN} How to use it: [recipes](recipe.md).\n\n{markdown(Recipe)}"
    site = f"# Site reference\n\n{WRITTEN} How to use it: [sites](site.md).\n\n{markdown(Site)}"
    compatibility = f"""# What goes with what

{WRITTEN} `primeslurm check RECIPE` applies all of it at once. Errors are refused, warnings are printed.

{as_markdown()}
### Models that the trainer has

What a family does not have may be asked for: `plan`, `check` and `--dry-run` work with it; a real `submit` refuses it
as `blocked`, `--emulate` runs it.

{_families()}

Under `model.impl: auto` or `hf`, any other causal language model of transformers is trained by its code there, unless
it has layers that carry state in another way than by attention (Mamba, linear attention): rows hold several documents.
With `model.vlm` it must [read images as Qwen2-VL does](recipe.md#models-that-see-images).
"""
    found = {"reference.md": recipe, "site-reference.md": site, "compatibility.md": compatibility}
    found["reference/cli.md"] = cli_reference(WRITTEN)
    return {DOCS / name: text.rstrip() + "\n" for name, text in found.items()}


def _families() -> str:
    names = [field.name for field in fields(Capabilities) if field.type == "bool"]
    rows = [("model type", *(name.replace("_", " ") for name in names)), ("---",) * (len(names) + 1)]
    able_by_type = {f"`{name}`": able for name, able in model_types(bundled()).items()} | {"any other": GENERIC}
    for model_type, able in able_by_type.items():
        rows.append((model_type, *("yes" if getattr(able, name) else "" for name in names)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Write or check the pages; exit code 1 if one is not current."""
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"run `./just docs`: not current: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages()[path])


if __name__ == "__main__":
    main()
