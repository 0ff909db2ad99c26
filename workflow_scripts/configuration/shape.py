"""The configuration's shape: the JSON Schema, with its errors in plain words."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workflow_scripts.configuration.wording import allowed, join, show

SCHEMA = Path(__file__).parents[2] / "config" / "schema.yaml"


def key_problems(value: Any, path: str = "") -> Iterator[str]:
    """Keys that YAML read as something else than text, such as `1:` or `yes:`."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                yield f"{path or 'top level'}: the key {key!r} is not text; put it in quotes"
            else:
                yield from key_problems(entry, join(path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from key_problems(entry, f"{path}[{index}]")


def shape_problems(raw: dict[str, Any]) -> Iterator[str]:
    """Whatever the schema refuses."""
    for error in _validator().iter_errors(raw):
        yield from _explain(error)


@cache
def _validator() -> Any:
    import yaml
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def whole_text(_: Any, pattern: str, found: Any, __: Any) -> Iterator[Any]:
        if isinstance(found, str) and not re.fullmatch(pattern, found):  # `$` alone lets a final newline pass
            yield ValidationError(f"{found!r} does not match {pattern}")

    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    return extend(Draft202012Validator, {"pattern": whole_text})(schema)


def _explain(error: Any) -> Iterator[str]:
    """One line per slip of a jsonschema error, in the words of the schema's own descriptions."""
    path = ""
    for part in error.absolute_path:
        path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
    schema, found = error.schema, error.instance
    match error.validator:
        case "additionalProperties":
            known = schema["properties"]
            for key in found:
                if key not in known:
                    yield (
                        f"{join(path, key)}: unknown key (its value: {show(found[key])}); "
                        f"{allowed(key, known, 'allowed here')}"
                    )
        case "required":
            for key in schema["required"]:
                if key not in found and f"'{key}'" in error.message:
                    yield f"{join(path, key)}: missing. {schema['properties'][key]['description']}"
        case "enum":
            yield f"{path}: found {show(found)}; {allowed(found, schema['enum'])}"
        case "type":
            yield f"{path}: found {show(found)}, needs {_TYPES[schema['type']]}. {schema['description']}"
        case "pattern" if "propertyNames" in error.absolute_schema_path:
            yield f"{path}: the name {show(found)} cannot be used. Allowed: {schema['description']}"
        case "pattern":
            yield f"{path}: found {show(found)}. Allowed: {schema['description']}"
        case "minimum" | "maximum":
            low, high = schema.get("minimum", "any"), schema.get("maximum", "any")
            yield f"{path}: found {show(found)}, needs {low} to {high}. {schema['description']}"
        case "minLength" | "minItems" | "minProperties":
            yield f"{path}: is empty. {schema['description']}"
        case "uniqueItems":
            yield f"{path}: found {show(found)}, needs each entry once"
        case _:
            yield f"{path}: {error.message}. {schema.get('description', '')}"


_TYPES = {
    "object": "keys with values",
    "array": "a list",
    "string": "a text (in quotes, if it looks like a number)",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
