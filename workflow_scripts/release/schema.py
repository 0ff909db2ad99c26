"""The JSON Schemas of a release's records, and their check."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workflow_scripts.closure import data_file
from workflow_scripts.errors import UserError

_RELEASE = data_file(__file__, "release.schema.yaml")
_STATEMENT = data_file(__file__, "statement.schema.yaml")
_SHOWN = 5


def check_release(document: Mapping[str, Any]) -> None:
    """Raise UserError where the content of release.json is not of its schema, naming each place (at most five)."""
    _check(document, _RELEASE, "release.json")


def check_statement(document: Mapping[str, Any]) -> None:
    """Raise UserError where the content of statement.json is no in-toto Statement with SLSA provenance."""
    _check(document, _STATEMENT, "statement.json")


def _check(document: Mapping[str, Any], schema: Path, name: str) -> None:
    problems = list(_problems(document, schema))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{name} is not of its schema: {'; '.join(problems[:_SHOWN])}{more}")


def _problems(document: Mapping[str, Any], schema: Path) -> Iterator[str]:
    import yaml  # both are slow to import, and most who import this module check nothing
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(yaml.safe_load(schema.read_text(encoding="utf-8")))
    for error in sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.path))):
        yield f"{'/'.join(map(str, error.path)) or 'the document'}: {error.message[:200]}"
