"""The configuration: checked once, then plain frozen data that the rules read.

Shape and meaning of every key: `config/schema.yaml`, and for people `config/README.md`. The checks here are those
that one key alone cannot make. All problems are reported together, each with its key, the value found, what is
allowed and, for a slip of the pen, the nearest valid name.
"""

import difflib
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError

SCHEMA = Path(__file__).parents[1] / "config" / "schema.yaml"

_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PUBLISHED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLACEHOLDERS = ("slug", "layers")
_LONG_RUN = 256  # positions from which a dialogue belongs to gate long_run
_DROPPABLE = ("artifacts", "folders")  # a model file drops an inherited entry of these by setting it to null


@dataclass(frozen=True)
class Form:
    """What a graph form needs: stored weights of a recipe, a compute precision; and whether it is a bundle."""

    recipe: bool
    compute: bool
    bundle: bool


FORMS = {
    "hostcache_core": Form(recipe=True, compute=True, bundle=True),
    "head": Form(recipe=True, compute=True, bundle=True),
    "head_argmax": Form(recipe=True, compute=True, bundle=True),
    "frontend": Form(recipe=False, compute=True, bundle=True),  # its tables are int8 per row in every variant
    "raw_tables": Form(recipe=False, compute=False, bundle=False),
}

# driver -> role -> forms that can play it
DRIVERS: dict[str, dict[str, tuple[str, ...]]] = {
    "hostcache": {
        "frontend": ("frontend",),
        "core": ("hostcache_core",),
        "head": ("head", "head_argmax"),
    },
}


@dataclass(frozen=True)
class CheckpointSource:
    """Where the weights come from; `repository` and `revision` are None for a local folder."""

    source: str
    repository: str | None
    revision: str | None
    allow_moving_revision: bool
    sha256: dict[str, str]


@dataclass(frozen=True)
class Dialogue:
    """One dialogue for the oracle, given by exactly one of `turns` and `prompt_ids`."""

    name: str
    turns: tuple[str, ...] | None
    prompt_ids: tuple[int, ...] | None
    new_tokens: int
    expect_text: str | None
    expect_ids: tuple[int, ...] | None
    stops: bool
    numbers: bool
    skip_ties: bool

    def params(self) -> dict[str, Any]:
        """The dialogue as JSON for the oracle stage; keys that were not given are left out."""
        given = {key: value for key, value in asdict(self).items() if value not in (None, False)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


@dataclass(frozen=True)
class Oracle:
    """What the original model is asked; `dialogues` by name, in the order of the file."""

    min_margin: float
    dialogues: dict[str, Dialogue]


@dataclass(frozen=True)
class Artifact:
    """One artifact; `published` is its file or folder name, with `.aimodel` if it is a bundle."""

    key: str
    form: str
    recipe: str | None
    compute: str | None
    published: str

    @property
    def is_bundle(self) -> bool:
        """Whether it is an `.aimodel`."""
        return FORMS[self.form].bundle


@dataclass(frozen=True)
class Folder:
    """One release folder; `bundles` maps a role to an artifact key, `tables` lists artifact keys."""

    name: str
    driver: str | None
    bundles: dict[str, str]
    tables: tuple[str, ...]
    tokenizer: bool

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Keys of everything that lies in the folder."""
        return (*self.bundles.values(), *self.tables)

    @property
    def can_chat(self) -> bool:
        """Whether the folder alone answers a prompt."""
        return self.driver is not None and self.tokenizer


@dataclass(frozen=True)
class Gates:
    """Gates that a release needs, the unshipped artifacts they also judge, and the chat that is the last of them."""

    required: tuple[str, ...]
    evidence: tuple[str, ...]
    chat_prompt: str
    chat_expect: str


@dataclass(frozen=True)
class StoreConfig:
    """Places of the store's two levels; None where the default, or no shared level, is meant."""

    folder: str | None
    shared: str | None


@dataclass(frozen=True)
class Config:
    """A whole valid configuration."""

    model: str
    slug: str
    num_hidden_layers: int
    context: int
    checkpoint: CheckpointSource
    oracle: Oracle
    artifacts: dict[str, Artifact]
    folders: dict[str, Folder]
    gates: Gates
    store: StoreConfig

    def bundles(self) -> dict[str, Artifact]:
        """The artifacts that are `.aimodel` bundles, by key."""
        return {key: artifact for key, artifact in self.artifacts.items() if artifact.is_bundle}

    def judged(self) -> dict[str, Artifact]:
        """The bundles that a release's gates judge, by key: all that are shipped, and the evidence."""
        shipped = {key for folder in self.folders.values() for key in folder.artifacts}
        return {
            key: bundle for key, bundle in self.bundles().items() if key in shipped | set(self.gates.evidence)
        }

    def recipes(self) -> tuple[str, ...]:
        """The weight recipes that some artifact needs, sorted."""
        return tuple(sorted({a.recipe for a in self.artifacts.values() if a.recipe is not None}))


def load_config(raw: dict[str, Any]) -> Config:
    """Check a parsed configuration and give it as data; one UserError lists every problem found."""
    if not isinstance(raw, Mapping):
        raise UserError(f"configuration: found {_show(raw)}, needs keys with values")
    raw = _without_dropped(raw)
    for check in (_key_problems, _shape_problems, _meaning_problems):  # each relies on the one before
        problems = list(check(raw))
        if problems:
            raise UserError("\n  ".join(["the configuration is not valid:", *problems]))
    return _build(raw)


def _without_dropped(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the entries that a model file set to null."""
    return {
        section: {key: value for key, value in entries.items() if value is not None}
        if section in _DROPPABLE and isinstance(entries, Mapping)
        else entries
        for section, entries in raw.items()
    }


# --- shape: the JSON Schema -------------------------------------------------------------------------------------


def _key_problems(value: Any, path: str = "") -> Iterator[str]:
    """Keys that YAML read as something else than text, such as `1:` or `yes:`."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                yield f"{path or 'top level'}: the key {key!r} is not text; put it in quotes"
            else:
                yield from _key_problems(entry, _join(path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _key_problems(entry, f"{path}[{index}]")


def _shape_problems(raw: dict[str, Any]) -> Iterator[str]:
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
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    schema, found = error.schema, error.instance
    match error.validator:
        case "additionalProperties":
            allowed = schema["properties"]
            for key in found:
                if key not in allowed:
                    yield (
                        f"{_join(path, key)}: unknown key (its value: {_show(found[key])}); "
                        f"{_allowed(key, allowed, 'allowed here')}"
                    )
        case "required":
            for key in schema["required"]:
                if key not in found and f"'{key}'" in error.message:
                    yield f"{_join(path, key)}: missing. {schema['properties'][key]['description']}"
        case "enum":
            yield f"{path}: found {_show(found)}; {_allowed(found, schema['enum'])}"
        case "type":
            yield f"{path}: found {_show(found)}, needs {_TYPES[schema['type']]}. {schema['description']}"
        case "pattern" if "propertyNames" in error.absolute_schema_path:
            yield f"{path}: the name {_show(found)} cannot be used. Allowed: {schema['description']}"
        case "pattern":
            yield f"{path}: found {_show(found)}. Allowed: {schema['description']}"
        case "minimum" | "maximum":
            low, high = schema.get("minimum", "any"), schema.get("maximum", "any")
            yield f"{path}: found {_show(found)}, needs {low} to {high}. {schema['description']}"
        case "minLength" | "minItems" | "minProperties":
            yield f"{path}: is empty. {schema['description']}"
        case "uniqueItems":
            yield f"{path}: found {_show(found)}, needs each entry once"
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


# --- meaning: what one key alone cannot say ---------------------------------------------------------------------


def _meaning_problems(raw: dict[str, Any]) -> Iterator[str]:
    yield from _checkpoint_problems(raw["checkpoint"])
    yield from _oracle_problems(raw["oracle"], raw["context"])
    yield from _artifact_problems(raw)
    for name, folder in raw["folders"].items():
        yield from _folder_problems(f"folders.{name}", folder, raw["artifacts"])
    yield from _twice({f"folders.{name}": name for name in raw["folders"]})
    yield from _gate_problems(raw)


def _checkpoint_problems(checkpoint: dict[str, Any]) -> Iterator[str]:
    source = checkpoint["source"]
    if "://" not in source:
        return
    found = f"checkpoint.source: found {_show(source)}"
    hub = _HUB.fullmatch(source)
    if hub is None:
        yield f"{found}; allowed: a local folder, or hf://owner/name@<40-hex commit>"
    elif not _COMMIT.fullmatch(hub["revision"]) and not checkpoint["allow_moving_revision"]:
        yield (
            f"{found}; `{hub['revision']}` is not a full commit, so the weights could change under the same name. "
            f"Allowed: 40 hex digits, or any revision with checkpoint.allow_moving_revision: true"
        )


def _oracle_problems(oracle: dict[str, Any], context: int) -> Iterator[str]:
    if not math.isfinite(oracle["min_margin"]):
        yield f"oracle.min_margin: found {oracle['min_margin']}, needs a finite number"
    dialogues = oracle["dialogues"]
    yield from _twice({f"oracle.dialogues[{index}].name": d["name"] for index, d in enumerate(dialogues)})
    for index, dialogue in enumerate(dialogues):
        yield from _dialogue_problems(f"oracle.dialogues[{index}] ({dialogue['name']})", dialogue, context)


def _dialogue_problems(path: str, dialogue: dict[str, Any], context: int) -> Iterator[str]:
    given = [key for key in ("turns", "prompt_ids") if key in dialogue]
    if len(given) != 1:
        yield f"{path}: found {' and '.join(given) or 'no prompt'}, needs exactly one of turns, prompt_ids"
    new_tokens = dialogue["new_tokens"]
    known = len(dialogue.get("prompt_ids", [])) or 1  # the length of a text is known to its tokenizer only
    if known + new_tokens > context:
        at_least = "" if "prompt_ids" in dialogue else "at least "
        yield (
            f"{path}: {at_least}{known} prompt tokens and new_tokens: {new_tokens} do not fit context: {context}; "
            f"raise context or ask for fewer tokens"
        )
    expected = len(dialogue.get("expect_ids", []))
    if expected > new_tokens:
        yield f"{path}: expect_ids has {expected} ids, more than new_tokens: {new_tokens}"


def _artifact_problems(raw: dict[str, Any]) -> Iterator[str]:
    published: dict[str, str] = {}
    for key, artifact in raw["artifacts"].items():
        path = f"artifacts.{key}"
        yield from _precision_problems(path, artifact)
        problem = _name_problem(artifact["name"])
        if problem:
            yield f"{path}.name: found {_show(artifact['name'])}; {problem}"
        else:
            published[f"{path}.name"] = _published(artifact, raw)
    yield from _twice(published)


def _precision_problems(path: str, artifact: dict[str, Any]) -> Iterator[str]:
    form = artifact["form"]
    for key in ("recipe", "compute"):
        needed = getattr(FORMS[form], key)
        if needed and key not in artifact:
            yield f"{path}.{key}: missing; form {form} needs a {key}"
        if not needed and key in artifact:
            yield f"{path}.{key}: found {_show(artifact[key])}; form {form} has no {key}, leave it out"
    if artifact.get("recipe") == "fp32" and artifact.get("compute") == "fp16":
        yield f"{path}.compute: found 'fp16' with recipe fp32; allowed: compute fp32, or recipe fp16"


def _name_problem(template: str) -> str | None:
    """What is wrong with the template of a published name, or None."""
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as problem:
        return f"its braces do not match ({problem}); allowed placeholders: {{slug}}, {{layers}}"
    for _, placeholder, spec, conversion in fields:
        if placeholder not in _PLACEHOLDERS:
            return f"unknown placeholder {{{placeholder}}}; {_allowed(placeholder, _PLACEHOLDERS)}"
        if spec or conversion:
            return f"{{{placeholder}}} takes no format; write it bare"
    if not _PUBLISHED.fullmatch(template.format(slug="slug", layers=1)):
        return "allowed: letters, digits, dots, hyphens, underscores and the placeholders {slug}, {layers}"
    if template.endswith(".aimodel"):
        return "leave .aimodel out; bundles get it by themselves"
    return None


def _folder_problems(path: str, folder: dict[str, Any], artifacts: dict[str, Any]) -> Iterator[str]:
    driver, bundles, tables = folder.get("driver"), folder.get("bundles", {}), folder.get("tables", [])
    places = {f"{path}.bundles.{role}": key for role, key in bundles.items()}
    places |= {f"{path}.tables[{index}]": key for index, key in enumerate(tables)}
    if not places:
        yield f"{path}: has neither bundles nor tables, so nothing would lie in it"
    for place, key in places.items():
        if key not in artifacts:
            yield f"{place}: there is no artifact {_show(key)}; {_allowed(key, artifacts)}"
    for index, key in enumerate(tables):
        form = artifacts.get(key, {}).get("form", "raw_tables")
        if form != "raw_tables":
            yield f"{path}.tables[{index}]: artifact {key} is of form {form}; allowed: form raw_tables"
    if driver is None:
        if bundles:
            yield f"{path}.driver: missing; bundles need a driver to run them. {_allowed(None, DRIVERS)}"
        return
    yield from _role_problems(path, driver, bundles, artifacts)


def _role_problems(
    path: str, driver: str, bundles: dict[str, str], artifacts: dict[str, Any]
) -> Iterator[str]:
    roles = DRIVERS[driver]
    for role in bundles:
        if role not in roles:
            yield f"{path}.bundles.{role}: driver {driver} has no such role; {_allowed(role, roles)}"
    for role, forms in roles.items():
        if role not in bundles:
            yield f"{path}.bundles.{role}: missing; driver {driver} needs the roles {', '.join(roles)}"
            continue
        form = artifacts.get(bundles[role], {}).get("form", forms[0])
        if form not in forms:
            yield (
                f"{path}.bundles.{role}: artifact {bundles[role]} is of form {form}; "
                f"allowed: form {' or '.join(forms)}"
            )


def _gate_problems(raw: dict[str, Any]) -> Iterator[str]:
    required, artifacts = raw["gates"]["required"], raw["artifacts"]
    for index, key in enumerate(raw["gates"]["evidence"]):
        if key not in artifacts:
            yield f"gates.evidence[{index}]: there is no artifact {_show(key)}; {_allowed(key, artifacts)}"
        elif not FORMS[artifacts[key]["form"]].bundle:
            yield f"gates.evidence[{index}]: artifact {key} is no bundle, so no gate judges it"
    chats = [f for f in raw["folders"].values() if f.get("driver") and f.get("tokenizer")]
    if "chat" in required and not chats:
        yield "gates.required: has chat, but no folder has both a driver and tokenizer: true to chat from"
    dialogues = raw["oracle"]["dialogues"]
    if "numbers" in required and not any(d.get("numbers") for d in dialogues):
        yield "gates.required: has numbers, but no entry of oracle.dialogues has numbers: true to compare"
    longest = max(len(d.get("prompt_ids", [])) + d["new_tokens"] for d in dialogues)
    if "long_run" in required and longest < _LONG_RUN:
        yield f"gates.required: has long_run, but no entry of oracle.dialogues has new_tokens of {_LONG_RUN} or more"


# --- wording ----------------------------------------------------------------------------------------------------


def _twice(names: dict[str, str]) -> Iterator[str]:
    """Names (by key) that meet in one place; letter case does not tell files apart on a Mac."""
    first: dict[str, str] = {}
    for where, name in names.items():
        other = first.setdefault(name.casefold(), where)
        if other != where:
            yield f"{where}: {_show(name)} is taken by {other}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allowed(found: Any, names: Iterable[str], label: str = "allowed") -> str:
    """`allowed: a, b, c`, with the name that was probably meant."""
    names = list(names)
    nearest = difflib.get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f". Did you mean {nearest[0]}?" if nearest else ""
    return f"{label}: {', '.join(names)}{hint}"


# --- building ---------------------------------------------------------------------------------------------------


def _published(artifact: dict[str, Any], raw: dict[str, Any]) -> str:
    stem = artifact["name"].format(slug=raw["slug"], layers=int(raw["num_hidden_layers"]))
    return f"{stem}.aimodel" if FORMS[artifact["form"]].bundle else stem


def _build(raw: dict[str, Any]) -> Config:
    gates = raw["gates"]
    return Config(
        model=raw["model"],
        slug=raw["slug"],
        num_hidden_layers=int(raw["num_hidden_layers"]),  # 10.0 is a whole number to a JSON Schema
        context=int(raw["context"]),
        checkpoint=_build_checkpoint(raw["checkpoint"]),
        oracle=_build_oracle(raw["oracle"]),
        artifacts={
            key: Artifact(
                key, entry["form"], entry.get("recipe"), entry.get("compute"), _published(entry, raw)
            )
            for key, entry in raw["artifacts"].items()
        },
        store=StoreConfig(
            folder=None if raw["store"]["folder"] == "default" else raw["store"]["folder"],
            shared=None if raw["store"]["shared"] == "off" else raw["store"]["shared"],
        ),
        folders={name: _build_folder(name, entry) for name, entry in raw["folders"].items()},
        gates=Gates(
            tuple(gates["required"]),
            tuple(gates["evidence"]),
            gates["chat"]["prompt"],
            gates["chat"]["expect"],
        ),
    )


def _build_checkpoint(entry: dict[str, Any]) -> CheckpointSource:
    hub = _HUB.fullmatch(entry["source"])
    return CheckpointSource(
        source=entry["source"],
        repository=hub["repository"] if hub else None,
        revision=hub["revision"] if hub else None,
        allow_moving_revision=entry["allow_moving_revision"],
        sha256=dict(entry["sha256"]),
    )


def _build_oracle(entry: dict[str, Any]) -> Oracle:
    dialogues = {dialogue["name"]: _build_dialogue(dialogue) for dialogue in entry["dialogues"]}
    return Oracle(float(entry["min_margin"]), dialogues)


def _build_dialogue(entry: dict[str, Any]) -> Dialogue:
    return Dialogue(
        name=entry["name"],
        turns=tuple(entry["turns"]) if "turns" in entry else None,
        prompt_ids=_ids(entry.get("prompt_ids")),
        new_tokens=int(entry["new_tokens"]),
        expect_text=entry.get("expect_text"),
        expect_ids=_ids(entry.get("expect_ids")),
        stops=entry.get("stops", False),
        numbers=entry.get("numbers", False),
        skip_ties=entry.get("skip_ties", False),
    )


def _build_folder(name: str, entry: dict[str, Any]) -> Folder:
    return Folder(
        name=name,
        driver=entry.get("driver"),
        bundles=dict(entry.get("bundles", {})),
        tables=tuple(entry.get("tables", ())),
        tokenizer=entry.get("tokenizer", False),
    )


def _ids(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(value) for value in values)
