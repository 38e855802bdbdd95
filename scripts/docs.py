"""Writes the generated pages of docs/reference. With --check, only reports whether they are current."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from primeslurm.models import GENERIC, Capabilities, bundled, model_types
from primeslurm.plan.checks.compatibility import GROUPS
from primeslurm.plan.commands.engine_defaults import BATCHES, ENVIRONMENT, NIXL, OPTIONS
from primeslurm.recipe import Recipe, Site
from scripts.cli_reference import cli_reference
from scripts.generated import write_or_check
from scripts.recipe_reference import markdown

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"


def pages() -> dict[Path, str]:
    """Return the path and text of every generated page."""
    recipe = f"""# Recipe fields

This page lists every field of a recipe, with type, default and meaning. Read [how to write a
recipe](../how-to/recipes.md) first. `primeslurm schema` prints the same as a JSON schema for your editor.

{markdown(Recipe)}"""
    site = f"""# Site fields

This page lists every field of a site file, with type, default and meaning. Read [how to describe a
cluster](../how-to/sites.md) first.

{markdown(Site)}"""
    compatibility = f"""# Compatibility

This page lists which options do not work together, and what the trainer supports for each model family. You do not
need to read it before a run, because `primeslurm check RECIPE` applies every rule. `check` refuses a recipe that breaks
a rule of level error, and prints a warning for the others.

{_rules()}
## Model families

The table shows what the trainer supports for each `model_type` of config.json. `check` and `plan` accept a recipe that
asks for more and mark it as blocked. `submit` refuses it, and `submit --emulate` runs it.

{_families()}

With `model.impl: auto` or `hf`, the trainer uses the implementation of transformers for any other causal language
model. It excludes models with Mamba or linear attention layers, because their state would leak between packed
documents. To train such a model on images, the model must [read images as Qwen2-VL
does](../how-to/data.md#images).
"""
    defaults = f"""# Engine defaults

This page lists the options and environment variables of vLLM engines that a plan sets to other values than vLLM does,
and why. A recipe overrides each of them with its own field, `env` or `vllm_extra`; `primeslurm plan RECIPE` shows the
values of a run.

{_defaults()}"""
    texts = {"recipe.md": recipe, "site.md": site, "compatibility.md": compatibility, "cli.md": cli_reference()}
    texts["engine-defaults.md"] = defaults
    return {REFERENCE / name: text.rstrip() + "\n" for name, text in texts.items()}


def _rules() -> str:
    lines: list[str] = []
    for title, rules in GROUPS.items():
        lines += [f"## {title}", "", "| rule | field | level | what to do | source |", "|---|---|---|---|---|"]
        lines += [f"| {r.rule} | `{r.field}` | {r.level} | {r.fix} | {r.source} |" for r in rules]
        lines.append("")
    return "\n".join(lines)


def _defaults() -> str:
    lines = ["| option or variable | ours | default otherwise | why |", "|---|---|---|---|"]
    rows = (*OPTIONS, *BATCHES, *NIXL, *ENVIRONMENT)
    lines += [f"| `{row.name}` | {row.ours} | {row.default} | {row.why} |" for row in rows]
    return "\n".join(lines)


def _families() -> str:
    names = [field.name for field in fields(Capabilities) if field.type == "bool"]
    rows = [("model type", *(name.replace("_", " ") for name in names)), ("---",) * (len(names) + 1)]
    able_by_type = {f"`{name}`": able for name, able in model_types(bundled()).items()} | {"any other": GENERIC}
    for model_type, able in able_by_type.items():
        rows.append((model_type, *("yes" if getattr(able, name) else "" for name in names)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    write_or_check(pages())
