"""`statement.json`: an in-toto Statement (v1) with SLSA provenance (v1) about everything that SHA256SUMS lists.

It follows from release.json and SHA256SUMS alone, so equal releases have equal statements: no times, no host, no
invocation. It is not signed: whoever publishes can sign it, such as with cosign, and whoever checks supply chains can
read it without knowing this pipeline. What its parts mean (this is what `buildType` names):

subject               every file of SHA256SUMS with its sha256, so all but SHA256SUMS, measured.json and itself
externalParameters    what the configuration asked for: model, folders, artifacts, what is compiled ahead of time for
                      which target (built or not), the gates that a release needs
resolvedDependencies  the checkpoint: its commit, its identity (sha256 over text weights and config), its files
builderDependencies   every tool that had a part, by version
byproducts            SHA256SUMS itself, and each gate: its verdict, and the sha256 of its entry in release.json as
                      canonical JSON

The version of the pipeline's own code is left out on purpose: an edit that changes no byte of a release leaves the
release as it is. What proves a release is a second build of the same bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from workflow_scripts.files import canonical_json, sha256_text
from workflow_scripts.release import seal, sums
from workflow_scripts.release.names import RELEASE, STATEMENT, SUMS

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:gemma4-coreai:release:1"
BUILDER = "urn:gemma4-coreai:pipeline"

_NOT_ON_PYPI = ("python", "xcrun", "xcode", "coreai-build")


def statement_text(document: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """The text of statement.json.

    `document` is the content of release.json (with or without its seal), `digests` path -> hex sha256 as SHA256SUMS
    lists them. KeyError where the document is none.
    """
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": path, "digest": {"sha256": digests[path]}} for path in sorted(digests)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": _parameters(document),
                    "resolvedDependencies": _checkpoint(document["checkpoint"]),
                },
                "runDetails": {
                    "builder": {"id": BUILDER, "builderDependencies": _tools(document["tools"])},
                    "byproducts": [_sums(digests), *_gates(document["gates"])],
                },
            },
        }
    )


def altered_records(release: bytes, listed: bytes, statement: bytes) -> dict[str, str]:
    """Which of release.json, SHA256SUMS and statement.json are not as released, and how that shows; empty: none.

    Each of the three says what sha256 every file has, so two that agree convict the third, whatever was edited in it,
    even if it was sealed anew. Where no two agree, whichever carries a digest of its own is believed. One that is not
    there is given as no bytes.
    """
    claims = _claims(release, listed, statement)
    problems = {name: _UNREADABLE[name] for name, claim in claims.items() if claim is None}
    problems |= _outvoted({name: claim for name, claim in claims.items() if claim is not None})
    if not {RELEASE, STATEMENT} & problems.keys():
        problems |= _untold(seal.open_sealed(release), claims[RELEASE] or {}, statement)
    return problems


def believed_digests(release: bytes, listed: bytes, statement: bytes) -> dict[str, str]:
    """Path -> hex sha256 of all listed files, by a record that `altered_records` believes; empty: there is none."""
    claims, altered = _claims(release, listed, statement), altered_records(release, listed, statement)
    return next((claim for name, claim in claims.items() if claim is not None and name not in altered), {})


def _claims(release: bytes, listed: bytes, statement: bytes) -> dict[str, dict[str, str] | None]:
    """What each record says of all files, the most trustworthy first; None where it says nothing that can be used."""
    return {RELEASE: _files(release), STATEMENT: _subjects(statement), SUMS: _parsed_sums(listed)}


def _untold(document: Mapping[str, Any], digests: Mapping[str, str], statement: bytes) -> dict[str, str]:
    """Whether a statement whose subjects are right tells another story than release.json."""
    try:
        expected = statement_text(document, digests)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        return {RELEASE: f"altered (it has no usable {problem})"}
    if expected.encode() == statement:
        return {}
    return {STATEMENT: f"altered (it does not say what {RELEASE} says)"}


_UNREADABLE = {
    RELEASE: "altered (its seal does not fit its content, or it lists no files)",
    STATEMENT: "altered (its subjects are not those whose digest it carries)",
    SUMS: "altered (it is no sorted list of `<sha256>  <path>` lines)",
}


def _outvoted(claims: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """The records that differ from those that agree, or from the first where no two agree."""
    names = list(claims)
    agreeing = [name for name in names if sum(claims[name] == claims[other] for other in names) > 1]
    believed = agreeing or names[:1]
    return {
        name: f"altered (it does not agree with {' and '.join(believed)}: "
        f"{_first_difference(claims[name], claims[believed[0]])})"
        for name in names
        if name not in believed
    }


def _first_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    paths = sorted(found.keys() | expected.keys())
    path = next(path for path in paths if found.get(path) != expected.get(path))
    return f"{path} is {found.get(path, 'missing')[:12]}, there {expected.get(path, 'missing')[:12]}"


def _files(release: bytes) -> dict[str, str] | None:
    """Path -> sha256 by release.json, and of itself; None where its seal is broken or it lists no files."""
    try:
        files = _checked({entry["path"]: entry["sha256"] for entry in seal.open_sealed(release)["files"]})
    except (ValueError, KeyError, TypeError):
        return None
    return {**files, RELEASE: hashlib.sha256(release).hexdigest()}


def _checked(digests: dict[Any, Any]) -> dict[str, str]:
    """The map, if SHA256SUMS could hold it: who edits a record may write anything into it. ValueError, TypeError."""
    return sums.parse_sums(sums.format_sums(digests).encode())


def _parsed_sums(listed: bytes) -> dict[str, str] | None:
    try:
        return sums.parse_sums(listed)
    except ValueError:
        return None


def _subjects(statement: bytes) -> dict[str, str] | None:
    """Path -> sha256 of a statement's subjects; None where they are not those whose digest it carries."""
    try:
        document = json.loads(statement)
        digests = _checked({subject["name"]: subject["digest"]["sha256"] for subject in document["subject"]})
        said = document["predicate"]["runDetails"]["byproducts"][0]
        whole = said == _sums(digests) and len(digests) == len(document["subject"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return digests if whole else None


def _parameters(document: Mapping[str, Any]) -> dict[str, Any]:
    artifacts = {
        name: {key: entry[key] for key in ("form", "recipe", "compute", "stage", "params")}
        for name, entry in document["artifacts"].items()
    }
    return {
        "model": document["model"],
        "slug": document["slug"],
        "folders": {name: entry["contents"] for name, entry in document["folders"].items()},
        "artifacts": artifacts,
        "aheadOfTime": {
            name: {key: entry[key] for key in ("bundle", "target")} for name, entry in document["aot"].items()
        },
        "requiredGates": sorted(name for name, gate in document["gates"].items() if gate["required"]),
    }


def _checkpoint(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checkpoint and its files as ResourceDescriptors; one from the Hub has package URLs."""
    origin = checkpoint["origin"]
    whole: dict[str, Any] = {"name": "checkpoint", "digest": {"sha256": checkpoint["digest"]}}
    files = [
        {"name": f"checkpoint/{path}", "digest": {"sha256": entry["sha256"]}}
        for path, entry in sorted(checkpoint["files"].items())
    ]
    if origin["kind"] != "huggingface":
        return [whole, *files]
    url = f"pkg:huggingface/{origin['repository']}@{origin['commit']}"
    whole |= {"uri": url, "digest": {**whole["digest"], "gitCommit": origin["commit"]}}
    return [whole, *({**entry, "uri": f"{url}#{entry['name'].partition('/')[2]}"} for entry in files)]


def _tools(tools: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """Package URLs of every version of every tool."""
    return [
        {"name": name, "uri": f"pkg:{'generic' if name in _NOT_ON_PYPI else 'pypi'}/{name}@{quote(version)}"}
        for name, versions in sorted(tools.items())
        for version in versions
    ]


def _sums(digests: Mapping[str, str]) -> dict[str, Any]:
    return {"name": SUMS, "digest": {"sha256": sha256_text(sums.format_sums(digests))}}


def _gates(gates: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"gates/{name}",
            "digest": {"sha256": sha256_text(canonical_json(gate))},
            "annotations": {key: gate[key] for key in ("gate", "target", "verdict", "required")},
        }
        for name, gate in sorted(gates.items())
    ]
