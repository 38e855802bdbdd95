"""Read recipes and site files: strict YAML, `extends`, `--set`, and all violations in one pass."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from primeslurm.base import files
from primeslurm.base.errors import UsageError, Violation, signature
from primeslurm.base.paths import exists, is_file, shipped
from primeslurm.recipe.fields.section import deprecated_keys
from primeslurm.recipe.fields.strings import string_problems
from primeslurm.recipe.fields.suggestions import closest_ready_recipes, nearest, suggestion
from primeslurm.recipe.reading.valid_variants import Rules, path_of, valid_variants
from primeslurm.recipe.reading.validation_errors import RECIPE, SITE_FILE, InputFault, OtherFile, faults
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.site import Site

M = TypeVar("M", bound=BaseModel)
_OTHER: dict[type[BaseModel], OtherFile] = {Recipe: OtherFile(SITE_FILE, Site), Site: OtherFile(RECIPE, Recipe)}
# Includes the values that YAML aliases repeat. A recipe has a few hundred values.
_MAX_VALUES = 100_000


@dataclass(frozen=True)
class Draft(Generic[M]):
    """A recipe or site file after reading, valid or not."""

    model: type[M]
    rules: Rules[M]
    """Returns the contradictions in a valid value."""
    data: Mapping[str, Any]
    """The input, with `extends` and overrides applied."""
    value: M | None
    """None if the input has faults."""
    faults: tuple[InputFault, ...] = ()

    @property
    def violations(self) -> list[Violation]:
        return [fault.violation for fault in self.faults]

    @property
    def deprecations(self) -> list[Violation]:
        """Deprecated names of fields that the input uses. They are no faults."""
        return [
            Violation(path, "", "is a deprecated name of the field", f"use {new}")
            for path, new in deprecated_keys(self.model, self.data)
        ]

    def valid_value(self) -> M:
        """Return the recipe or site. Raises UsageError with all violations."""
        if self.value is None:
            raise UsageError(self.violations)
        return self.value

    def variants(self, suspects: Sequence[Violation] = ()) -> list[M]:
        """Return the values for further checks: the value itself, or valid variants of it.

        Args:
            suspects: violations of further checks. The variants have other values in their fields, too.
        """
        if self.value is not None and not suspects:
            return [self.value]
        all_faults = (*self.faults, *_as_faults(suspects))
        return valid_variants(self.model, self.data, all_faults, self.rules) if self.data else []


def read_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    name: str | None = None,
    complete: Callable[[dict[str, Any]], list[InputFault]] = lambda _: [],
) -> Draft[Recipe]:
    """Read a recipe, merge it into the recipe that it extends, apply overrides, and validate it.

    Args:
        overrides: texts of the form `a.b=value`, where the value is YAML.
        name: name of the run, in place of the name in the recipe.
        complete: adds sections that the file may not have to the data, and returns faults.
    """
    repeated: list[InputFault] = []
    try:
        data = _read_extended(path, (), repeated)
    except UsageError as error:
        return _unreadable(Recipe, error)
    data, input_faults = _apply_overrides(data, overrides)
    if name is not None:
        data["name"] = name
    input_faults = [*repeated, *input_faults, *complete(data)]
    return _draft(Recipe, data, str(path), lambda recipe: string_problems(recipe) + violations(recipe), input_faults)


def read_site(path: Path) -> Draft[Site]:
    repeated: list[InputFault] = []
    try:
        data = {"schema": 1, **read_mapping(path, repeated)}
    except UsageError as error:
        return _unreadable(Site, error)
    return _draft(Site, data, str(path), string_problems, repeated)


def load_recipe(path: Path, overrides: Sequence[str] = (), name: str | None = None) -> Recipe:
    """Read a recipe as `read_recipe` does. Raises UsageError with all violations."""
    return read_recipe(path, overrides, name).valid_value()


def ready_recipes() -> dict[str, Path]:
    """Return the files of the ready recipes, which ship with the package, by name."""
    return {path.stem: path for path in files.listing(shipped("recipes"), "*.yaml")}


def file_or_ready(path: Path) -> Path:
    """Return the file of a ready recipe if the path is its bare name and no such file exists; else the path."""
    if path.parent != Path() or is_file(path):
        return path
    return ready_recipes().get(path.name.removesuffix(".yaml"), path)


def find_recipe(path: Path) -> Path:
    """Return the recipe file for a command-line argument: the user's file, or a ready recipe by its bare name.

    Raises:
        UsageError: there is neither.
    """
    recipe = file_or_ready(path)
    if recipe.parent == Path() and recipe.name and not exists(recipe):
        why = "no such file, and no ready recipe has this name"
        near = nearest(path.name, _recipes_beside(path))
        fix = f"did you mean {near}?" if near else closest_ready_recipes(path.name, list(ready_recipes()))
        raise UsageError([Violation("RECIPE", str(path), why, fix)])
    return recipe


def load_site(path: Path) -> Site:
    """Read a site file. Raises UsageError with all violations."""
    return read_site(path).valid_value()


def _unreadable(model: type[M], error: UsageError) -> Draft[M]:
    return Draft(model, lambda _: (), {}, None, tuple(InputFault(each, ()) for each in error.violations))


def _draft(
    model: type[M], data: Mapping[str, Any], source: str, rules: Rules[M], input_faults: list[InputFault]
) -> Draft[M]:
    try:
        value = model.model_validate(data)
    except ValidationError as error:
        value, other = None, _OTHER.get(model)
        input_faults = [
            *input_faults,
            *(fault for details in error.errors() for fault in faults(model, details, source, other)),
        ]
    # Rules need a valid recipe. Those of a faulty recipe are applied to its valid variants.
    if value is not None and not input_faults:
        variants = [value]
    else:
        variants = valid_variants(model, data, input_faults, lambda _: ())
    contradictions = independent([rules(each) for each in variants], [fault.path for fault in input_faults])
    input_faults = [*input_faults, *_as_faults(contradictions)]
    return Draft(model, rules, data, None if input_faults else value, tuple(input_faults))


def _as_faults(problems: Sequence[Violation]) -> list[InputFault]:
    return [InputFault(each, path_of(each.field)) for each in problems]


def independent(by_variant: Sequence[Sequence[Violation]], faulty: Sequence[Sequence[str]]) -> list[Violation]:
    """Return the violations that all variants have, without those of fields that are already reported as faulty."""

    def identity(violation: Violation) -> tuple[str, str]:
        # Numbers in the reason may depend on the variant.
        return violation.field, signature(violation.why)

    if not by_variant:
        return []
    common = set.intersection(*({identity(each) for each in problems} for problems in by_variant))
    return [each for each in by_variant[0] if identity(each) in common and not is_below(each.field, faulty)]


def is_below(field: str, faulty: Sequence[Sequence[str]]) -> bool:
    path = path_of(field)
    return any(above and path[: len(above)] == tuple(above) for above in faulty)


def _read_extended(path: Path, seen: tuple[Path, ...], repeated: list[InputFault]) -> dict[str, Any]:
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, or a null byte in the name
        raise UsageError([Violation("extends" if seen else "RECIPE", repr(str(path)), str(error))]) from None
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise UsageError([Violation("extends", path.name, f"goes in a circle: {chain}")])
    data = read_mapping(path, repeated)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise UsageError([Violation("extends", repr(parent), "must be one relative path")])
    base = path.parent / parent
    if not is_file(base):
        # A copy of a ready recipe must find the ready recipe that it extends.
        base = ready_recipes().get(parent.removesuffix(".yaml"), base)
    return merge(_read_extended(base, (*seen, path), repeated), data)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key. All other values replace the base's value, including lists.

    A mapping with another `type` also replaces the base's mapping, because its keys belong to another section.
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
    """Apply overrides of the form `a.b=value`. Return the new data, and the faults of overrides that do not apply."""
    input_faults: list[InputFault] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            input_faults.append(InputFault(Violation("--set", override, "must be key.path=value"), ()))
            continue
        try:
            data = _with(data, keys, parse(text))
        except ValueError:
            violation = Violation(f"--set {path}", text, "the value is not valid YAML")
            input_faults.append(InputFault(violation, tuple(keys)))
        except LookupError as error:
            why = "there is no such place in the recipe"
            input_faults.append(InputFault(Violation(f"--set {path}", text, why, error.args[0]), ()))
    return data, input_faults


def _with(node: Any, keys: Sequence[str], value: Any, above: str = "") -> Any:
    """Return a copy of `node` with a value at a path below it.

    Raises:
        LookupError: the path leads through a single value, or past the end of a list.
    """
    # A copy, because YAML aliases may share parts of `node`.
    if not keys:
        return value
    key, below = keys[0], (keys[1:], value, f"{above}.{keys[0]}".lstrip("."))
    if node is None or isinstance(node, Mapping):
        node = node or {}
        return {**node, key: _with(node.get(key), *below)}
    if not isinstance(node, list):
        raise LookupError(f"{above} is not a section")
    if not (key.isdecimal() and int(key) < len(node)):
        raise LookupError(f"{above} has {f'entries 0 to {len(node) - 1}' if node else 'no entries'}")
    i = int(key)
    return [*node[:i], _with(node[i], *below), *node[i + 1 :]]


class _Loader(yaml.SafeLoader):
    """A YAML loader that lists repeated keys, refuses excessive aliases, and reads dates as text.

    PyYAML uses the last of several equal keys, and makes dates of text that looks like one. With aliases, a few lines
    can stand for billions of values or contain themselves.
    """

    # ruamel.yaml would refuse repeated keys. It would still need the other rules, reads `yes` and `010` in another way,
    # and takes 0.1 s to import instead of 0.01 s.

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated_keys: list[yaml.ScalarNode] = []

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count_values(node, {}) > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"aliases repeat more than {_MAX_VALUES:,} values")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        values: dict[tuple[str, str], yaml.Node] = {}
        for i, (key, value) in enumerate(node.value):
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in values:
                self.repeated_keys.append(key)
                if isinstance(values[name], yaml.MappingNode) and isinstance(value, yaml.MappingNode):
                    # Sections are joined. Otherwise, required fields of the first one would seem to be missing.
                    value = yaml.MappingNode(value.tag, [*values[name].value, *value.value], value.start_mark)
                    node.value[i] = (key, value)
            values[name] = value
        return node


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Count the values of a node, including those that aliases repeat.

    `counts` holds the results by node, and None for the nodes above this one.
    """
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


# Without the resolver of timestamps, dates stay text.
_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> Any:
    """Parse a YAML text. Raises ValueError with one line of text, which begins with line and column if known."""
    data, repeated_keys = _parse(text)
    if repeated_keys:
        raise ValueError(f": {repeated_keys[0].value} is given twice")
    return data


def _parse(text: str) -> tuple[Any, list[yaml.ScalarNode]]:
    try:
        loader = _Loader(text)
        return loader.get_single_data(), loader.repeated_keys
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise ValueError(": not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f": not valid YAML: {str(error).splitlines()[0]}") from None


def read_mapping(path: Path, repeated: list[InputFault]) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, and add a fault to `repeated` for each key given twice.

    Raises UsageError if the file cannot be read.
    """
    text = _read(path)
    try:
        data, repeated_keys = _parse(text)
    except ValueError as error:
        where, _, why = str(error).partition(": ")
        raise UsageError([Violation(f"{path}{where}", "", why)]) from None
    for key in repeated_keys:
        place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
        repeated.append(InputFault(Violation(place, "", f"{key.value} is given twice", "keep one of them"), ()))
    if not isinstance(data, dict):
        kind = "empty" if data is None else "a list" if isinstance(data, list) else "a single value"
        raise UsageError([Violation(str(path), "", f"must be a mapping of keys to values, is {kind}")])
    return data


def _read(path: Path) -> str:
    fix = ""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may block forever
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
