"""`verify` finds every altered byte of a release and names the file that holds it, and only that one."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import release_inputs as given
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from tests.conftest import ordinary_user
from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError
from workflow_scripts.files import canonical_json, sha256_text
from workflow_scripts.release import seal, statement, sums, verify
from workflow_scripts.release.names import RECORDS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release that was copied away from where it was built; tests that alter it put it back."""
    root = tmp_path_factory.mktemp("built")
    release = given.build_release(root, given.release_inputs(root), given.release_params())
    return Path(shutil.copytree(release, tmp_path_factory.mktemp("downloads") / "a copy é"))


@pytest.fixture()
def release(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "release"))


def files_of(release: Path) -> list[Path]:
    return sorted(path for path in release.rglob("*") if path.is_file())


def flip(path: Path, position: int, mask: int) -> bytes:
    """Flip bits of one byte; returns the bytes as they were."""
    before = path.read_bytes()
    altered = bytearray(before)
    altered[position] ^= mask
    path.write_bytes(altered)
    return before


def problems(release: Path) -> dict[str, str]:
    return verify.verify(release).problems


def test_a_whole_release_is_summed_up_in_one_line(built: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify.main([str(built)]) == 0
    size = sum(path.stat().st_size for path in files_of(built))
    expected = f"gemma-4-tiny (gemma4_tiny): {len(files_of(built))} files, {size:,} bytes, all as released\n"
    assert capsys.readouterr().out == expected


def test_a_flipped_byte_in_any_file_names_that_file(built: Path, capsys: pytest.CaptureFixture) -> None:
    chance = random.Random(7)
    for path in files_of(built):
        before = flip(path, chance.randrange(path.stat().st_size), 1 << chance.randrange(8))
        try:
            assert verify.main([str(built)]) == 1
        finally:
            path.write_bytes(before)
        named, summary = capsys.readouterr().out.splitlines()
        assert named.startswith(f"{path.relative_to(built).as_posix()}: altered")
        assert summary.startswith("1 of")
    assert not problems(built)


@settings(max_examples=250)
@examples(data=st.data())
def test_a_flipped_byte_anywhere_in_the_records_is_told_apart(built: Path, data: st.DataObject) -> None:
    path = built / data.draw(st.sampled_from([*RECORDS, "README.md"]))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    before = flip(path, position, data.draw(st.integers(1, 255)))
    try:
        assert problems(built).keys() == {path.name}
    finally:
        path.write_bytes(before)


@settings(max_examples=60)
@examples(data=st.data())
def test_two_altered_files_are_both_named(built: Path, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(files_of(built)), min_size=2, max_size=2, unique=True))
    positions = [data.draw(st.integers(0, path.stat().st_size - 1)) for path in chosen]
    before = {path: flip(path, position, 0x10) for path, position in zip(chosen, positions, strict=True)}
    try:
        found = problems(built).keys()
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    named = {path.relative_to(built).as_posix() for path in chosen}
    # What follows the subjects' digest in a statement can only be held against a whole release.json.
    assert found == named or (named == {"release.json", "statement.json"} and found == {"release.json"})


@pytest.mark.parametrize(
    "alter",
    [
        lambda data: data + b"\n",
        lambda data: data[:-1],
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: b"",
    ],
    ids=["longer", "shorter", "crlf", "bom", "empty"],
)
@pytest.mark.parametrize("name", [*RECORDS, "README.md", "macos/gemma4_plan.json"])
def test_other_alterations_are_found(release: Path, name: str, alter) -> None:
    (release / name).write_bytes(alter((release / name).read_bytes()))
    assert problems(release).keys() == {name}


def test_every_missing_file_is_named(release: Path) -> None:
    for path in files_of(release):
        before = path.read_bytes()
        path.unlink()
        assert problems(release) == {path.relative_to(release).as_posix(): "missing"}
        path.write_bytes(before)


def test_stray_files_are_named(release: Path) -> None:
    given.write_files(
        release, {"macos/old.aimodel/main.mlirb": "old", "measured_too.json": "{}", "bad\udcff\n": ""}
    )
    assert problems(release) == dict.fromkeys(
        ["macos/old.aimodel/main.mlirb", "measured_too.json", "bad\udcff\n"], "not part of the release"
    )
    assert verify.main([str(release)]) == 1  # also prints names that are no text


def test_symlinks_are_named_even_where_their_target_has_the_right_bytes(
    release: Path, tmp_path: Path
) -> None:
    for name in ("macos/gemma4_plan.json", "release.json"):
        moved = shutil.move(release / name, tmp_path / Path(name).name)
        (release / name).symlink_to(moved)
    moved = shutil.move(release / "macos/tokenizer", tmp_path / "tokenizer")
    (release / "macos/tokenizer").symlink_to(moved)
    (release / "dangling").symlink_to("nowhere")
    found = problems(release)
    assert found.keys() == {"macos/gemma4_plan.json", "release.json", "macos/tokenizer", "dangling"}
    assert all("symlink" in problem for problem in found.values())


def test_what_is_no_regular_file_is_never_opened(release: Path) -> None:
    (release / "README.md").unlink()
    os.mkfifo(release / "README.md")  # opening it would wait for ever
    assert problems(release) == {"README.md": "not a regular file"}


def test_what_cannot_be_read_is_named(built: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        release = Path(shutil.copytree(built, Path(place) / "release"))
        (release / "README.md").chmod(0)
        (release / "macos/tiny_core.aimodel").chmod(0)
        with ordinary_user():
            closed = problems(release)
        (release / "macos/tiny_core.aimodel").chmod(0o444)  # names can be listed, nothing can be opened
        with ordinary_user():
            listable = problems(release)
        release.chmod(0)
        with ordinary_user(), pytest.raises(UserError, match="cannot be read"):
            verify.main([str(release)])
        release.chmod(0o755)
        (release / "macos/tiny_core.aimodel").chmod(0o755)
    reason = "cannot be read (Permission denied)"
    assert closed == dict.fromkeys(["README.md", "macos/tiny_core.aimodel"], reason)
    inside = ["macos/tiny_core.aimodel/main.mlirb", "macos/tiny_core.aimodel/metadata.json"]
    assert listable == dict.fromkeys(["README.md", *inside], reason)


def test_a_release_that_may_only_be_read_is_verified(built: Path) -> None:
    """On a disk that was mounted for reading, or of another user: nothing is written beside it."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        release = Path(shutil.copytree(built, Path(place) / "release"))
        for path in [release, *release.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        with ordinary_user():
            found = problems(release)
        for path in [release, *release.rglob("*")]:
            path.chmod(0o755)
    assert found == {}


def test_a_folder_that_is_no_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in [
        (tmp_path, "is no release: it has neither SHA256SUMS nor release.json"),
        (tmp_path / "absent", "is not a folder"),
        (tmp_path / "file", "is not a folder"),
    ]:
        with pytest.raises(UserError, match=message):
            verify.verify(folder)
    command = [sys.executable, "-m", "workflow_scripts", "verify", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("error: ") and "Traceback" not in run.stderr


def test_a_release_of_a_later_format_is_refused(release: Path) -> None:
    document = seal.open_sealed((release / "release.json").read_bytes())
    (release / "release.json").write_text(seal.sealed_text({**document, "format": 2}))
    with pytest.raises(UserError, match="format 2; this version reads 1"):
        verify.verify(release)


@contextmanager
def edited(path: Path, content: str) -> Iterator[None]:
    """A file with other content for a while."""
    before = path.read_bytes()
    path.write_text(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def test_a_verdict_that_was_edited_and_sealed_anew_is_pinned_on_release_json(release: Path) -> None:
    document = seal.open_sealed((release / "release.json").read_bytes())
    document["gates"]["device"]["verdict"] = "pass"
    with edited(release / "release.json", seal.sealed_text(document)):
        assert problems(release).keys() == {"release.json"}


def test_an_edited_digest_is_pinned_on_the_record_that_holds_it(release: Path) -> None:
    """Even where the record carries a digest of itself, made anew: the file is what the other two say it is."""
    document = seal.open_sealed((release / "release.json").read_bytes())
    digests = sums.parse_sums((release / "SHA256SUMS").read_bytes())
    other = {**digests, "README.md": "0" * 64}
    document["files"] = [{**entry, "sha256": other[entry["path"]]} for entry in document["files"]]
    for name, text in {
        "release.json": seal.sealed_text(document),
        "SHA256SUMS": sums.format_sums(other),
        "statement.json": statement.statement_text(document, other),
    }.items():
        with edited(release / name, text):
            assert problems(release).keys() == {name}


def test_a_statement_with_another_story_is_pinned_on_it(release: Path) -> None:
    """Its subjects are right, and so is the digest over them: only what release.json gives differs."""
    told = json.loads((release / "statement.json").read_text())
    told["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"] = "0" * 40
    with edited(release / "statement.json", canonical_json(told)):
        assert problems(release).keys() == {"statement.json"}


@pytest.mark.parametrize("content", [{"format": 1}, {"format": 1, "files": [{"path": 5, "sha256": 5}]}])
def test_a_record_that_was_replaced_is_no_crash(release: Path, content: dict) -> None:
    with edited(release / "release.json", seal.sealed_text(content)):
        assert problems(release).keys() == {"release.json"}
        for name in ("SHA256SUMS", "statement.json"):
            (release / name).unlink()
        assert problems(release) == {
            "release.json": "altered (its seal does not fit its content, or it lists no files)",
            "SHA256SUMS": "missing",
            "statement.json": "missing",
        }


def test_a_release_says_of_release_json_what_it_is(release: Path) -> None:
    """`sha256sum -c` and whoever reads statements check release.json, too."""
    expected = sha256_text((release / "release.json").read_text())
    subjects = json.loads((release / "statement.json").read_text())["subject"]
    assert {"name": "release.json", "digest": {"sha256": expected}} in subjects
    assert sums.parse_sums((release / "SHA256SUMS").read_bytes())["release.json"] == expected


HUBS = {
    ".gitattributes": "*.bin filter=lfs\n",
    ".cache/huggingface/.gitignore": "*",
    ".cache/huggingface/download/README.md.metadata": "abc",
}


def test_what_the_hub_adds_to_a_download_is_passed_over(release: Path) -> None:
    before = verify.verify(release)
    given.write_files(release, HUBS)
    (release / ".cache/huggingface/link").symlink_to("nowhere")
    assert verify.verify(release) == before


def test_nothing_else_that_looks_like_the_hubs_is_passed_over(release: Path) -> None:
    strays = {".cache/other", ".cache/huggingface2", "macos/.gitattributes", "macos/.cache/huggingface/a"}
    given.write_files(release, dict.fromkeys(strays, ""))
    assert problems(release) == dict.fromkeys(strays, "not part of the release")
    (release / ".gitattributes").symlink_to("nowhere")
    (release / ".cache/huggingface").symlink_to(release.parent)
    assert problems(release).keys() == strays | {".cache/huggingface"}


def test_long_work_shows_progress(
    release: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow_scripts.progress._QUIET_SECONDS", 0.0)
    assert verify.main([str(release)]) == 0
    assert "verify" in (shown := capsys.readouterr()).err and "s left" in shown.err


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@examples(st.dictionaries(st.text().filter(lambda key: key != seal.KEY), values, max_size=4), st.data())
def test_a_seal_holds_and_breaks(document: dict, data: st.DataObject) -> None:
    try:
        text = seal.sealed_text(document).encode()
    except UnicodeEncodeError:  # lone surrogates cannot be written as UTF-8 at all
        return
    assert canonical_json(seal.open_sealed(text)) == canonical_json(document)
    altered = bytearray(text)
    altered[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        seal.open_sealed(bytes(altered))


names = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\\"), min_size=1
)


@settings(max_examples=200)
@examples(st.dictionaries(names, st.binary(min_size=32, max_size=32).map(bytes.hex), max_size=5))
def test_sums_come_back(digests: dict[str, str]) -> None:
    assert sums.parse_sums(sums.format_sums(digests).encode()) == digests


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\rb"])
def test_names_that_coreutils_would_escape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        sums.format_sums({name: "0" * 64})
