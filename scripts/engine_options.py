"""Writes engine_options.json, the options of the installed vLLM. With --check, only reports whether it is current.

`primeslurm.recipe.rules.engine_options` checks `vllm_extra` with it where no vLLM is installed. Run this script after
the pin of vLLM has moved.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

import primeslurm.recipe.rules
from scripts.generated import write_or_check

PATH = Path(primeslurm.recipe.rules.__file__).with_name("engine_options.json")
# Keywords of JSON Schema that do not restrict a value
_ANNOTATIONS = ("title", "description", "default", "deprecated", "format", "uniqueItems", "minProperties", "minItems")
_TYPES: dict[object, str] = {int: "integer", float: "number", str: "string"}
_REF = "#/$defs/{model}"


class _Schema(GenerateJsonSchema):
    """JSON Schema of what vLLM accepts in a configuration. Values that only vLLM can judge have an empty schema."""

    def handle_invalid_for_json_schema(self, schema: core_schema.CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        # vLLM takes the names of members in upper and lower case, and their numbers
        numbers = [member.value for member in schema["members"] if isinstance(member.value, int)]
        return {"enum": [member.name for member in schema["members"]] + numbers, "ignoreCase": True}

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        # The function may convert numbers and texts to anything
        inner = self.generate_inner(schema["schema"])
        return inner if _is_closed(inner) else {}

    def function_wrap_schema(self, schema: core_schema.WrapValidatorFunctionSchema) -> JsonSchemaValue:
        # vLLM's functions skip unset fields
        return {"anyOf": [self.generate_inner(schema["schema"]), {"type": "null"}]}

    def field_is_present(self, field: Any) -> bool:
        return field.get("init", True) and super().field_is_present(field)


def _used(schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema refers to."""
    used, unread = dict[str, Any](), [schema]
    while unread:
        names = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(unread.pop()))) - used.keys()
        used |= {name: definitions[name] for name in names}
        unread += [definitions[name] for name in names]
    return used


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _without_annotations(value) for key, value in schema.items() if key not in _ANNOTATIONS}
    if "const" in schema:
        kept["enum"] = [kept.pop("const")]
    if len(kept.get("anyOf", ())) == 1:
        kept = kept["anyOf"][0]
    for key in ("properties", "$defs"):  # their keys are names of fields
        if key in schema:
            kept[key] = {name: _without_annotations(value) for name, value in schema[key].items()}
    return kept


def _is_closed(schema: JsonSchemaValue) -> bool:
    return any(key in schema for key in ("$ref", "enum", "properties")) or any(map(_is_closed, schema.get("anyOf", ())))


def _vllm_parser() -> tuple[argparse.ArgumentParser, dict[str, type]]:
    """Return the parser of vLLM's server, with `CLASS.FIELD` as help texts, and the classes by name."""
    from vllm.engine import arg_utils
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    configs, get_kwargs = dict[str, type](), arg_utils.get_kwargs

    def kwargs_with_origin(config: Any) -> dict[str, dict[str, Any]]:
        options: dict[str, dict[str, Any]] = get_kwargs(config)
        configs[config.__name__] = config
        for name, kwargs in options.items():
            kwargs["help"] = f"{config.__name__}.{name}"
        return options

    arg_utils.get_kwargs = kwargs_with_origin
    try:
        return make_arg_parser(FlexibleArgumentParser()), configs
    finally:
        arg_utils.get_kwargs = get_kwargs


def _schema(action: argparse.Action, schema: JsonSchemaValue | None) -> JsonSchemaValue:
    """Return the schema of an option. `schema` is that of its field; None if it has none."""
    takes_none = getattr(action.type, "__name__", "") == "_optional_type"
    if schema is not None and "anyOf" in schema and not takes_none:
        schema = {"anyOf": [each for each in schema["anyOf"] if each != {"type": "null"}]}
    if isinstance(action, argparse.BooleanOptionalAction):
        return {"type": "boolean"}
    if action.nargs == 0:
        return {"enum": [True]}
    if action.choices is not None:
        choice: JsonSchemaValue = {"enum": list(action.choices)}
        return choice if action.nargs is None else {"type": "array", "items": choice}
    if schema is not None:
        return schema
    word: JsonSchemaValue = {"type": _TYPES[action.type]} if action.type in _TYPES else {}
    return word if action.nargs in (None, "?") else {"type": "array", "items": word}


def installed_options() -> dict[str, Any]:
    """Return the installed vLLM's version and options: for each its schema, short names, and how lists are written."""
    import vllm

    parser, configs = _vllm_parser()
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    inputs: Any = [(name, "validation", TypeAdapter(config)) for name, config in configs.items()]
    schemas, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF, schema_generator=_Schema)
    definitions = shared.get("$defs", {})
    fields = {
        f"{name}.{field}": schema
        for name in configs
        for field, schema in definitions.get(name, schemas[name, "validation"]).get("properties", {}).items()
    }
    options: dict[str, Any] = {}
    for action in actions:
        long = [name[2:].replace("-", "_") for name in action.option_strings if name.startswith("--")]
        negated = {f"no_{name}" for name in long} if isinstance(action, argparse.BooleanOptionalAction) else set()
        name = action.dest if action.dest in long else next(each for each in long if each not in negated)
        others = [each.lstrip("-").replace("-", "_") for each in action.option_strings]
        option: dict[str, Any] = {"schema": _schema(action, fields.get(action.help or ""))}
        if aliases := sorted({each for each in others if each != name and each not in negated}):
            option["aliases"] = aliases
        if action.nargs not in (None, 0, "?"):
            option["words"] = True
        options[name] = option
    data: dict[str, Any] = _without_annotations(
        {"vllm": vllm.__version__.partition("+")[0], "options": options, "$defs": _used(options, definitions)}
    )
    return data


def text() -> str:
    return json.dumps(installed_options(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_or_check({PATH: text()})
