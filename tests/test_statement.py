"""The records of a release: the schema of release.json, and the in-toto statement that follows from it."""

import copy
import json
import random

import pytest
import release_inputs as given
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_text
from workflow_scripts.release import schema, seal, sums
from workflow_scripts.release.names import STATEMENT
from workflow_scripts.release.statement import altered_records, believed_digests, statement_text

NAMES = ("release.json", "SHA256SUMS", STATEMENT)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    root = tmp_path_factory.mktemp("built")
    return given.build_release(root, given.release_inputs(root), given.release_params())


@pytest.fixture(scope="module")
def document(release):
    return seal.open_sealed((release / "release.json").read_bytes())


@pytest.fixture(scope="module")
def digests(release):
    return sums.parse_sums((release / "SHA256SUMS").read_bytes())


def records_of(document):
    """The three records of a release with this content of release.json, as bytes by name."""
    text = seal.sealed_text(document)
    digests = {entry["path"]: entry["sha256"] for entry in document["files"]}
    digests["release.json"] = sha256_text(text)
    made = (text, sums.format_sums(digests), statement_text(document, digests))
    return {name: content.encode() for name, content in zip(NAMES, made, strict=True)}


def altered(records):
    return altered_records(*(records[name] for name in NAMES))


def test_a_release_holds_the_statement_that_follows_from_its_records(release, document, digests):
    assert (release / STATEMENT).read_text() == statement_text(document, digests)
    assert digests.keys() == {entry["path"] for entry in document["files"]} | {"release.json"}


def test_a_record_that_is_not_of_its_schema_leaves_no_release(tmp_path):
    inputs = given.release_inputs(tmp_path)
    with pytest.raises(UserError, match=r"release.json is not of its schema: slug"):
        given.build_release(tmp_path, inputs, given.release_params(slug="Gemma 4"))
    assert not (tmp_path / "release").exists()


def test_release_json_is_of_its_schema(document):
    schema.check_release(document)
    schema.check_release({**document, "seal": "0" * 64})


def _without_digest(document):
    del document["artifacts"]["tiny_core.aimodel"]["digest"]


def _local_path(document):
    document["files"][0]["path"] = "/somewhere/README.md"


def _above(document):
    document["files"][0]["path"] = "macos/../../README.md"


def _failed(document):
    document["gates"]["numbers"]["verdict"] = "fail"


def _skipped(document):
    document["gates"]["numbers"]["verdict"] = "not_run"


def _silent(document):
    document["gates"]["device"]["reason"] = None


def _host(document):
    document["host"] = "somebody's laptop"


@pytest.mark.parametrize(
    "change, place",
    [
        (_without_digest, "artifacts/tiny_core.aimodel"),
        (_local_path, "files/0/path"),
        (_above, "files/0/path"),
        (_failed, "gates/numbers"),
        (_skipped, "gates/numbers"),
        (_silent, "gates/device"),
        (_host, "the document"),
    ],
)
def test_what_release_json_must_not_be_is_named(document, change, place):
    change(changed := copy.deepcopy(document))
    with pytest.raises(UserError, match=rf"release.json is not of its schema: {place}"):
        schema.check_release(changed)


def test_the_statement_is_an_in_toto_statement_with_slsa_provenance(document, digests):
    statement = json.loads(statement_text(document, digests))
    schema.check_statement(statement)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == digests
    built = statement["predicate"]["buildDefinition"]
    assert built["externalParameters"]["requiredGates"] == ["numbers"]
    assert built["resolvedDependencies"][0] == {
        "name": "checkpoint",
        "uri": f"pkg:huggingface/{given.HUB['repository']}@{given.HUB['commit']}",
        "digest": {"sha256": given.CHECKPOINT_DIGEST, "gitCommit": given.HUB["commit"]},
    }
    run = statement["predicate"]["runDetails"]
    assert {"name": "numpy", "uri": "pkg:pypi/numpy@2.0"} in run["builder"]["builderDependencies"]
    verdicts = {one["name"]: one.get("annotations", {}).get("verdict") for one in run["byproducts"]}
    assert verdicts == {"SHA256SUMS": None, "gates/numbers": "pass", "gates/device": "not_run"}
    assert "metadata" not in run  # times and the invocation, which differ from build to build


def test_a_statement_of_a_local_checkpoint_names_no_repository(document, digests):
    local = {**document, "checkpoint": {**document["checkpoint"], "origin": given.LOCAL}}
    text = statement_text(local, digests)
    schema.check_statement(json.loads(text))
    assert "huggingface" not in text


def test_a_statement_with_a_time_or_an_unknown_digest_is_refused(document, digests):
    statement = json.loads(statement_text(document, digests))
    statement["predicate"]["runDetails"]["metadata"] = {"startedOn": "2026-01-01T00:00:00Z"}
    statement["subject"][0]["digest"] = {"md5": "0" * 32}
    with pytest.raises(UserError, match=r"runDetails.*subject/0/digest"):
        schema.check_statement(statement)


@settings(max_examples=300)
@examples(data=st.data())
def test_a_flipped_byte_is_pinned_on_its_record(document, data):
    records = records_of(document)
    name = data.draw(st.sampled_from(NAMES))
    content = bytearray(records[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert altered({**records, name: bytes(content)}).keys() == {name}


def test_records_of_one_release_agree(document):
    assert altered(records_of(document)) == {}


@pytest.mark.parametrize("gate", ["numbers", "device"])
def test_an_edited_verdict_is_pinned_on_release_json_though_it_was_sealed_anew(document, gate):
    records, changed = records_of(document), copy.deepcopy(document)
    changed["gates"][gate]["verdict"] = "fail"
    found = altered({**records, "release.json": records_of(changed)["release.json"]})
    assert found.keys() == {"release.json"}
    assert "SHA256SUMS" in found["release.json"] and STATEMENT in found["release.json"]


def test_an_edited_digest_is_pinned_on_the_record_that_holds_it(document):
    changed = copy.deepcopy(document)
    changed["files"][0]["sha256"] = "0" * 64
    records, others = records_of(document), records_of(changed)
    for name in NAMES:
        assert altered({**records, name: others[name]}).keys() == {name}


def test_a_statement_with_another_story_is_not_believed(document):
    """Its subjects are right; the tools that it names are not those of the release."""
    other = records_of({**document, "tools": {"numpy": ["9.9"]}})
    records = records_of(document)
    told = json.loads(records[STATEMENT])
    told["predicate"]["runDetails"]["builder"] = json.loads(other[STATEMENT])["predicate"]["runDetails"][
        "builder"
    ]
    text = json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert altered({**records, STATEMENT: text.encode()}).keys() == {STATEMENT}


def test_two_altered_records_are_both_named(document):
    chance, records = random.Random(3), records_of(document)
    for _ in range(60):
        # What follows the subjects' digest in a statement can only be held against a whole release.json.
        first, second = chance.choice([("release.json", "SHA256SUMS"), ("SHA256SUMS", STATEMENT)])
        damaged = dict(records)
        for name in (first, second):
            content = bytearray(records[name])
            content[chance.randrange(len(content))] ^= 0x10
            damaged[name] = bytes(content)
        assert altered(damaged).keys() == {first, second}


def test_an_emptied_record_is_no_crash(document):
    records = records_of(document)
    for name in NAMES:
        for content in (b"", b"{}", b"[]", b"\xff\xfe", seal.sealed_text({"format": 1}).encode()):
            assert altered({**records, name: content}).keys() == {name}


def test_what_a_statement_says_is_compiled_ahead_of_time_is_the_target_whether_it_was_built_or_not(document):
    target = {"platform": "iOS", "architecture": "h18p"}
    entry = {
        "bundle": "macos/tiny_core.aimodel",
        "target": target,
        "devices": [],
        "not_built": "no xcrun on this host",
    }
    texts = {
        statement_text({**document, "aot": {"macos/compiled": {**entry, **built}}}, {})
        for built in ({}, {"not_built": None})
    }
    (text,) = texts
    asked = json.loads(text)["predicate"]["buildDefinition"]["externalParameters"]["aheadOfTime"]
    assert asked == {"macos/compiled": {"bundle": "macos/tiny_core.aimodel", "target": target}}


def test_the_digests_are_those_of_a_record_that_is_believed(document, digests):
    changed = copy.deepcopy(document)
    changed["files"][0]["sha256"] = "0" * 64
    records, others = records_of(document), records_of(changed)
    for name in NAMES:
        damaged = {**records, name: others[name]}
        assert believed_digests(*(damaged[name] for name in NAMES)) == digests
    assert believed_digests(b"", b"\xff", b"") == {}
