"""From YAML on disk to validated models: `extends`, `--set`, and every violation at once.

YAML is read strictly, with PyYAML and not ruamel.yaml, which refuses equal keys by itself: it would need the other
rules as well, reads `yes` and `010` differently from what recipes have meant so far, and takes 0.1 s to be imported
instead of 0.01 s.
"""

from __future__ import annotations

import contextlib
import difflib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from primeslurm.base import files
from primeslurm.base.errors import UsageError, Violation, signature
from primeslurm.base.paths import exists, is_file, shipped
from primeslurm.recipe.fields.text import text_problems
from primeslurm.recipe.reading.explain import RECIPE, SITE_FILE, InputFault, OtherFile, closest, faults, suggestion
from primeslurm.recipe.reading.repair import Rules, path_of, sound_variants
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.rules import violations
from primeslurm.recipe.site import Site

M = TypeVar("M", bound=BaseModel)
_OTHER: dict[type[BaseModel], OtherFile] = {Recipe: OtherFile(SITE_FILE, Site), Site: OtherFile(RECIPE, Recipe)}
_MOST_VALUES = 100_000
"""Values in one file, those that YAML aliases repeat included. A recipe has a few hundred."""


@dataclass(frozen=True)
class Draft(Generic[M]):
    """A recipe or site file as it was read, sound or not."""

    model: type[M]
    rules: Rules[M]
    """Finds contradictions within it."""
    data: Mapping[str, Any]
    value: M | None
    """None if anything is wrong."""
    faults: tuple[InputFault, ...] = ()

    @property
    def violations(self) -> list[Violation]:
        """Everything that is wrong."""
        return [fault.violation for fault in self.faults]

    def sound(self) -> M:
        """Return the recipe or site. Raises UsageError with everything that is wrong."""
        if self.value is None:
            raise UsageError(self.violations)
        return self.value

    def variants(self, doubted: Sequence[Violation] = ()) -> list[M]:
        """List what later checks can look at: the value itself, or sound variants of it.

        Args:
            doubted: what later checks found; variants have other values in these fields, too.
        """
        if self.value is not None and not doubted:
            return [self.value]
        found = (*self.faults, *(InputFault(each, path_of(each.field)) for each in doubted))
        return sound_variants(self.model, self.data, found, self.rules) if self.data else []


def read_recipe(path: Path, overrides: Sequence[str] = (), name: str | None = None) -> Draft[Recipe]:
    """Read a recipe, merge what it extends, apply `a.b=value` overrides and another name, and validate it."""
    try:
        data = _read_extended(path, seen=())
    except UsageError as error:
        return _unreadable(Recipe, error)
    data, found = _apply_overrides(data, overrides)
    if name is not None:
        data["name"] = name
    return _draft(Recipe, data, str(path), lambda recipe: text_problems(recipe) + violations(recipe), found)


def read_site(path: Path) -> Draft[Site]:
    """Read a site file, and validate it."""
    try:
        data = {"schema": 1, **read_mapping(path)}
    except UsageError as error:
        return _unreadable(Site, error)
    return _draft(Site, data, str(path), text_problems, [])


def load_recipe(path: Path, overrides: Sequence[str] = (), name: str | None = None) -> Recipe:
    """Read a sound recipe, as `read_recipe`. Raises UsageError with everything that is wrong."""
    return read_recipe(path, overrides, name).sound()


def ready_recipes() -> dict[str, Path]:
    """Return the recipes that ship with the package, by name."""
    return {path.stem: path for path in files.listing(shipped("recipes"), "*.yaml")}


def file_or_ready(path: Path) -> Path:
    """Return a ready recipe's file if a path is its bare name and no such file exists; otherwise the path."""
    if path.parent != Path() or is_file(path):
        return path
    return ready_recipes().get(path.name.removesuffix(".yaml"), path)


def find_recipe(path: Path) -> Path:
    """Return the file that a recipe argument names: a file of the user, or a ready recipe by its bare name.

    Raises:
        UsageError: a bare name is neither; the error names the closest.
    """
    found = file_or_ready(path)
    if found.parent == Path() and found.name and not exists(found):
        why = "no such file, and no ready recipe has this name"
        beside = difflib.get_close_matches(path.name, _recipes_beside(path), n=1, cutoff=0.5)
        fix = f"did you mean {beside[0]}?" if beside else closest(path.name, list(ready_recipes()))
        raise UsageError([Violation("RECIPE", str(path), why, fix)])
    return found


def load_site(path: Path) -> Site:
    """Read a sound site file. Raises UsageError with everything that is wrong."""
    return read_site(path).sound()


def _unreadable(model: type[M], error: UsageError) -> Draft[M]:
    return Draft(model, lambda _: (), {}, None, tuple(InputFault(each, ()) for each in error.violations))


def _draft(model: type[M], data: Mapping[str, Any], source: str, rules: Rules[M], found: list[InputFault]) -> Draft[M]:
    """Validate data. `found`: what is wrong with the data already."""
    try:
        value = model.model_validate(data)
    except ValidationError as error:
        found = [
            *found,
            *(fault for details in error.errors() for fault in faults(model, details, source, _OTHER.get(model))),
        ]
        value = None
    looked_at = [value] if value is not None and not found else sound_variants(model, data, found, lambda _: ())
    contradictions = independent([rules(each) for each in looked_at], [fault.path for fault in found])
    found = [*found, *(InputFault(each, path_of(each.field)) for each in contradictions)]
    return Draft(model, rules, data, None if found else value, tuple(found))


def independent(found: Sequence[Sequence[Violation]], faulty: Sequence[Sequence[str]]) -> list[Violation]:
    """Return what was found in every variant, outside of the fields that are known to be faulty."""
    if not found:
        return []
    everywhere = set.intersection(*({_identity(each) for each in violations} for violations in found))
    return [each for each in found[0] if _identity(each) in everywhere and not is_below(each.field, faulty)]


def is_below(field: str, faulty: Sequence[Sequence[str]]) -> bool:
    """Whether a field is one of the faulty ones, or lies in one of them."""
    path = path_of(field)
    return any(above and path[: len(above)] == tuple(above) for above in faulty)


def _identity(violation: Violation) -> tuple[str, str]:
    """What makes two violations the same: numbers in the text may follow from other fields."""
    return violation.field, signature(violation.why)


def _read_extended(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with a null byte
        raise UsageError([Violation("extends" if seen else "RECIPE", repr(str(path)), str(error))]) from None
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise UsageError([Violation("extends", path.name, f"goes in a circle: {chain}")])
    data = read_mapping(path)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise UsageError([Violation("extends", repr(parent), "must be one relative path")])
    return merge(_read_extended(_base(path.parent, parent), (*seen, path)), data)


def _base(directory: Path, name: str) -> Path:
    """The file that `extends` names: beside the recipe, or else a ready recipe. So a copied recipe finds its base."""
    beside = directory / name
    return beside if is_file(beside) else ready_recipes().get(name.removesuffix(".yaml"), beside)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge: mappings merge key by key, everything else (lists too) replaces.

    A mapping with another `type` replaces too: its keys belong to another kind of section.
    """
    if "type" in over and over["type"] != base.get("type", over["type"]):
        return dict(over)
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[InputFault]]:
    """Apply `a.b=value` words. Return the data with those that can be applied, and what is wrong with the others."""
    found: list[InputFault] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            found.append(InputFault(Violation("--set", override, "must be key.path=value"), ()))
            continue
        try:
            data = _with(data, keys, parse(text))
        except ValueError:
            found.append(InputFault(Violation(f"--set {path}", text, "the value is not valid YAML"), tuple(keys)))
        except LookupError as error:
            why = "there is no such place in the recipe"
            found.append(InputFault(Violation(f"--set {path}", text, why, error.args[0]), ()))
    return data, found


def _with(node: Any, keys: Sequence[str], value: Any, above: str = "") -> Any:
    """A copy of `node` with a value at a path below it; what an alias shares with it stays as it is.

    Raises:
        LookupError: something on the path is neither a section nor a list that is long enough.
    """
    if not keys:
        return value
    key, below = keys[0], (keys[1:], value, f"{above}.{keys[0]}".lstrip("."))
    if node is None or isinstance(node, Mapping):
        node = node or {}
        return {**node, key: _with(node.get(key), *below)}
    if not isinstance(node, list):
        raise LookupError(f"{above} is no section")
    if not (key.isdecimal() and int(key) < len(node)):
        raise LookupError(f"{above} has {f'entries 0 to {len(node) - 1}' if node else 'no entries'}")
    i = int(key)
    return [*node[:i], _with(node[i], *below), *node[i + 1 :]]


class _Loader(yaml.SafeLoader):
    """PyYAML lets the last of several equal keys win, and makes dates of text that looks like one.

    It also shares what an alias repeats: a few lines can stand for billions of values, or contain themselves.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.equal_keys: list[yaml.ScalarNode] = []

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if self.equal_keys:
            lines = [f"{key.value} is given twice (line {key.start_mark.line + 1})" for key in self.equal_keys]
            raise yaml.constructor.ConstructorError(None, None, ", ".join(lines), self.equal_keys[0].start_mark)
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"aliases repeat more than {_MOST_VALUES:,} values")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    self.equal_keys.append(key)
                seen.add((key.tag, key.value))
        return node


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Count the values of a node, with those that aliases repeat. `counts`: by node; None for those above this one."""
    count = counts.get(id(node), 0)
    if count is None:
        raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
    if count:
        return count
    counts[id(node)] = None
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        below = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = node.value
    counts[id(node)] = count = 1 + sum(_count_values(each, counts) for each in below)
    return count


_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> Any:
    """Read the value of a YAML text. Raises ValueError in one line, with line and column if they are known."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise ValueError(": not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f": not valid YAML: {str(error).splitlines()[0]}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises UsageError."""
    text = _read(path)
    try:
        data = parse(text)
    except ValueError as error:
        where, _, why = str(error).partition(": ")
        raise UsageError([Violation(f"{path}{where}", "", why)]) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else "a list" if isinstance(data, list) else "a single value"
        raise UsageError([Violation(str(path), "", f"must be a mapping of keys to values, is {kind}")])
    return data


def _read(path: Path) -> str:
    fix = ""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device might never end
            why = "is a directory" if path.is_dir() else "is not a regular file"
        else:
            return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        why = f"not text in UTF-8 (byte {error.start})"
    except FileNotFoundError as error:
        why, fix = f"cannot be read: {error.strerror}", suggestion(path.name, _recipes_beside(path))
    except (OSError, ValueError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise UsageError([Violation(str(path), "", why, fix)])


def _recipes_beside(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml") and is_file(file))
    return []
