"""A stage's code is what its module can reach, found from the source."""

import ast

import pytest

from workflow_scripts import closure
from workflow_scripts.coreml.installed import why_no_coremltools
from workflow_scripts.errors import UserError

# Those of the Core ML reference, whose tool is an extra, are asked for theirs only where it is installed.
STAGES = sorted(
    p.stem
    for p in (closure.PACKAGE / "stages").glob("*.py")
    if p.stem not in ("__init__", "job", "runner") and not ("coreml" in p.stem and why_no_coremltools())
)
COREML = {stage for stage in STAGES if "coreml" in stage}

PACKAGING = {"manifest.py"}  # a release reads the manifests of what it packs


def names(stage):
    return {path.relative_to(closure.PACKAGE).as_posix() for path in closure.stage_sources(stage)}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_runnable_module_and_known_tools(stage):
    tree = ast.parse(closure.stage_module(stage).read_text())
    assert "run" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert f"stages/{stage}.py" in names(stage)
    assert "python" in closure.stage_host(stage) and "python" not in closure.stage_tools(stage)


def test_an_authoring_module_belongs_to_the_stages_that_import_it():
    users = {stage for stage in STAGES if "model/frontend.py" in names(stage)}
    assert users - COREML == {"export_frontend", "export_decode", "export_decode_tbl", "export_decode_ring"}
    assert {stage for stage in STAGES if "model/ring_core.py" in names(stage)} == {"export_ring_core"}
    decoders = {stage for stage in STAGES if "model/decoder.py" in names(stage)}
    assert {"export_hostcache", "reference"} <= decoders
    assert not decoders & {"export_head", "export_frontend", "weights", "tables", "oracle"}
    assert {stage for stage in STAGES if "model/heads.py" in names(stage)} >= {"export_head", "reference"}


def test_the_quantizer_is_no_code_of_an_export():
    """A graph edit must not repeat k-means, nor the other way round."""
    for stage in STAGES:
        if stage.startswith("export_"):
            assert "quantize/palette.py" not in names(stage)
    assert "model/decoder.py" not in names("weights")


def test_the_runner_and_the_store_are_no_code_of_any_stage():
    """They bring results into place and cannot change them: an edit there must rebuild nothing."""
    for stage in STAGES:
        reached = names(stage)
        assert "stages/runner.py" not in reached
        assert (
            not {name for name in reached if name.startswith("store/") or name == "manifest.py"} - PACKAGING
        )


def test_light_stages_do_not_need_torch():
    heavy = {stage for stage in STAGES if "torch" in closure.stage_tools(stage)}
    exports = {stage for stage in STAGES if stage.startswith("export_")}
    assert heavy == {"oracle", "reference", "decode_reference", "gate_fp16"} | exports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own to reach through."""
    root = tmp_path / "workflow_scripts"
    (root / "stages").mkdir(parents=True)
    (root / "room").mkdir()
    for folder in (root, root / "stages", root / "room"):
        (folder / "__init__.py").write_text("")
    monkeypatch.setattr(closure, "PACKAGE", root)
    monkeypatch.setattr(closure, "ROOT", tmp_path)
    return root


def test_imports_inside_functions_and_data_files_count(package):
    (package / "stages/one.py").write_text("def run(job):\n    from workflow_scripts.room import deep\n")
    (package / "room/deep.py").write_text("import yaml\nPATH = data_file(__file__, 'kernel.metal')\n")
    (package / "room/kernel.metal").write_text("kernel")
    (package / "room/unused.py").write_text("")
    assert names("one") == {
        "__init__.py",
        "stages/one.py",
        "room/__init__.py",
        "room/deep.py",
        "room/kernel.metal",
    } | ({"stages/__init__.py"} & names("one"))
    assert set(closure.stage_tools("one")) == {"pyyaml"}
    before = closure.stage_code("one")
    (package / "room/kernel.metal").write_text("kernel // edited")
    assert closure.stage_code("one") != before
    (package / "room/kernel.metal").write_text("kernel")
    assert closure.stage_code("one") == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from . import two\n", "relative import"),
        ("data_file(__file__, name)\n", "literal file name"),
        ("data_file(__file__, 'absent.metal')\n", "not beside it"),
    ],
)
def test_what_cannot_be_found_from_the_source_is_refused(package, source, message):
    (package / "stages/one.py").write_text(source)
    with pytest.raises(UserError, match=message):
        closure.stage_sources("one")


def test_an_unknown_stage_and_a_missing_tool_are_named(package):
    with pytest.raises(UserError, match="no stage `two`"):
        closure.stage_sources("two")
    (package / "stages/one.py").write_text("import absent_library\n")
    with pytest.raises(UserError, match="absent-library, which is not installed"):
        closure.stage_tools("one")


def test_a_mac_repeats_nothing_but_what_needs_one(monkeypatch):
    """What Linux built and judged keeps its key; the GPU's gate and the compiler's stage feel the system."""
    before = {stage: closure.stage_host(stage) for stage in STAGES}
    for name, value in (
        ("system", "Darwin"),
        ("machine", "arm64"),
        ("mac_ver", ("27.0", ("", "", ""), "arm64")),
    ):
        monkeypatch.setattr(f"platform.{name}", lambda value=value: value)
    assert {stage for stage in STAGES if closure.stage_host(stage) != before[stage]} == {"aot", "gate_gpu"}
