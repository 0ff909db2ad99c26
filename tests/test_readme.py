"""README.md of a release as the Hub and its readers take it: a model card, commands that work, files that are there."""

import copy
import re
import shlex
import subprocess
import sys

import pytest
import release_inputs as given
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from workflow_scripts.release import readme, schema
from workflow_scripts.release.catalog import catalog

HUB = {"kind": "huggingface", "repository": "nobody/gemma-4-tiny", "commit": "cd" * 20}
TABLES = "ios-frontend/gemma4_gather_raw"
TARGET = {
    "platform": "iOS",
    "architecture": "h18p",
    "preferred_compute": "gpu",
    "min_deployment_version": "27.0",
    "expect_frequent_reshapes": False,
}
# folder -> published name, form, digest (the tables' is the last one), what is compiled of it, platforms
PUBLISHED = {
    "macos": ("core_int8.aimodel", "hostcache_metal", "a", "core_int8_aotc_h16c", None),
    "ios-gpu": ("core_int4.aimodel", "hostcache_metal", "b", "core_int4_aotc_h18p", None),
    "ios-ane": ("chunk1.aimodel", "ane_chunk", "c", None, None),
    "gpu-pipelined/x_tbl": ("x_tbl.aimodel", "decode_tbl", "d", "x_tbl_aotc_h18p", ["macos", "ios"]),
    "gpu-pipelined/x_wide": ("x_wide.aimodel", "decode", "e", None, ["macos"]),
    "ios-frontend": ("gemma4_gather_raw", "raw_tables", "f", None, None),
}
DRIVERS = {"hostcache_metal": "hostcache", "ane_chunk": "chunks", "decode_tbl": "decode", "decode": "decode"}


def published(form, folder, digest, stage, params, platforms=None, **inputs):
    return {
        "form": form,
        "recipe": None if form == "raw_tables" else "int8-kmeans-g32",
        "compute": None if form == "raw_tables" else "fp16",
        "folders": [folder],
        "bytes": 1000,
        "artifact": "x",
        "stage": stage,
        "digest": digest * 64,
        "params": params,
        "inputs": inputs,
        "tools": {"numpy": "2.0"},
        **({"platforms": platforms} if platforms else {}),
    }


def document(built=True, **changes):
    """The content of a whole release.json, checked by its schema; `built`: whether the host had Apple's compiler."""
    reads = [{"path": TABLES, "digest": "f" * 64}]
    artifacts, folders, aot = {}, {}, {}

    def add(folder, name, entry, driver):
        artifacts[name] = entry
        reading = reads if driver and folder != "macos" else []
        facts = {"digest": "0" * 64, "driver": driver, "tables": reading, "files": 2, "bytes": 1200}
        folders[folder] = {**facts, "contents": [name]}

    for folder, (name, form, digest, compiled, platforms) in PUBLISHED.items():
        made_with = {} if form == "raw_tables" else {"tables": "f" * 64}
        add(
            folder,
            name,
            published(form, folder, digest, "export", {}, platforms, **made_with),
            DRIVERS.get(form),
        )
        if compiled:
            architecture = compiled.rpartition("_")[2]
            target = {**TARGET, "architecture": architecture}
            target["platform"] = "macOS" if architecture == "h16c" else "iOS"
            outer = folder.rpartition("/")[0] if form == "decode_tbl" else folder
            aot[f"{outer}/{compiled}"] = {
                "bundle": f"{folder}/{name}",
                "target": target,
                "devices": ["iPhone 17 Pro"] if architecture == "h18p" else [],
                "not_built": None if built else "no xcrun | on this host",
                "tool": "coreai-build 3600.83.1" if built else None,
            }
            if built:
                result = f"{name.removesuffix('.aimodel')}.{architecture}.aimodelc"
                entry = published(form, f"{outer}/{compiled}", "9", "aot", target, bundle=digest * 64)
                add(f"{outer}/{compiled}", result, entry, None)
    names = [f"{entry['folders'][0]}/{name}/data" for name, entry in artifacts.items()]
    names += [f"{folder}/provenance.json" for folder in folders] + ["compile.sh", "catalog.json"]
    gate = {"reason": None, "bounds": {}, "checks": [], "required": True, "inputs": {}}
    whole = {
        "format": 1,
        "model": "gemma-4-tiny",
        "slug": "gemma4_tiny",
        "checkpoint": {"digest": "1" * 64, "origin": HUB, "files": {}, "result_digest": "2" * 64},
        "licence": {"name": "apache-2.0", "link": None, "files": []},
        "recipes": {"int8-kmeans-g32": {"digest": None, "total": None}},
        "folders": folders,
        "artifacts": artifacts,
        "aot": aot,
        "gates": {
            "numbers_a": {**gate, "gate": "numbers", "target": "a", "verdict": "pass"},
            "numbers_b": {**gate, "gate": "numbers", "target": "b", "verdict": "pass"},
        },
        "tools": {"coreai-core": ["1.0.0b3"]},
        "files": [{"path": path, "size": 600, "sha256": "3" * 64} for path in sorted(names)],
        **copy.deepcopy(changes),
    }
    schema.check_release(whole)
    return whole


def card(whole):
    """The text as the Hub's own library takes it apart."""
    return ModelCard(readme.render(whole))


def head(licence, origin=HUB):
    checkpoint = {**document()["checkpoint"], "origin": origin}
    return card(document(licence=licence, checkpoint=checkpoint)).data.to_dict()


def stated(name, link=None, files=()):
    return {"name": name, "link": link, "files": list(files)}


# --- the head ------------------------------------------------------------------------------------


def test_the_hub_knows_what_it_is_and_what_it_was_made_of():
    found = card(document())
    assert found.data.to_dict() == {
        "license": "apache-2.0",
        "base_model": "nobody/gemma-4-tiny",
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "library_name": "coreai",
        "tags": ["coreai", "core-ai", "apple", "on-device", "gemma4"],
    }
    assert found.text.startswith("# gemma-4-tiny: Core AI release\n")


def test_a_local_checkpoint_is_no_model_of_the_hub():
    found = head(stated("mit"), {"kind": "local"})
    assert "base_model" not in found and "base_model_relation" not in found


IN_THE_REPOSITORY = f"https://huggingface.co/nobody/gemma-4-tiny/blob/{'cd' * 20}/"


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        (stated("gemma", "https://x.org/terms"), {"license": "gemma", "license_link": "https://x.org/terms"}),
        (stated("mit", "./LICENSE", ["LICENSE"]), {"license": "mit", "license_link": "LICENSE"}),
        (
            stated("Gemma: Terms of Use\n", "TERMS.md"),
            {
                "license": "other",
                "license_name": "gemma-terms-of-use",
                "license_link": f"{IN_THE_REPOSITORY}TERMS.md",
            },
        ),
        (
            stated("other", files=["LICENSE"]),
            {"license": "other", "license_name": "other", "license_link": "LICENSE"},
        ),
        (
            stated(None, files=["LICENSE"]),
            {"license": "other", "license_name": "custom", "license_link": "LICENSE"},
        ),
        (stated("???"), {"license": "other", "license_name": "custom"}),
        (stated(None), {"license": "unknown"}),
    ],
)
def test_the_licence_is_stated_as_the_hub_takes_it(licence, expected):
    assert {key: value for key, value in head(licence).items() if key.startswith("license")} == expected


def test_a_licence_file_that_is_nowhere_is_not_linked():
    assert "license_link" not in head(stated("mit", "TERMS.md"), {"kind": "local"})


# --- what is in it -------------------------------------------------------------------------------


def rows(text, heading):
    """Cells of the first table after a heading, row by row."""
    lines = text.partition(f"## {heading}\n")[2].splitlines()
    table = [line for line in lines[: next(i for i, x in enumerate(lines) if x.startswith("## "))] if line]
    start = next(i for i, line in enumerate(table) if line.startswith("|---"))
    body = []
    for line in table[start + 1 :]:
        if not line.startswith("|"):
            break
        body.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return body


def test_the_sets_say_where_they_run_and_what_they_read():
    assert rows(readme.render(document()), "What is in it") == [
        ["`gpu-pipelined/x_wide/`", "macOS", f"`{TABLES}/`", "2.20 kB"],
        ["`macos/`", "macOS, GPU", "-", "1.20 kB"],
        ["`gpu-pipelined/x_tbl/`", "macOS, iOS", f"`{TABLES}/`", "2.20 kB"],
        ["`ios-ane/`", "iOS, Neural Engine", f"`{TABLES}/`", "2.20 kB"],
        ["`ios-gpu/`", "iOS, GPU", f"`{TABLES}/`", "2.20 kB"],
    ]


def downloads(text, files):
    """What each `hf download` of the text would fetch, chosen as the Hub's client chooses."""
    for line in re.findall(r"^hf download .*$", text, re.M):
        words = shlex.split(line)
        wanted = [words[i + 1] for i, word in enumerate(words) if word == "--include"]
        unwanted = [words[i + 1] for i, word in enumerate(words) if word == "--exclude"]
        yield set(filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=unwanted or None))


def test_the_downloads_fetch_what_they_say_and_no_more():
    whole = document()
    files = [entry["path"] for entry in whole["files"]]
    one_set, compiled = downloads(readme.render(whole), files)
    assert one_set == {
        "gpu-pipelined/x_wide/x_wide.aimodel/data",
        "gpu-pipelined/x_wide/provenance.json",
        f"{TABLES}/data",
    }
    assert compiled == {path for path in files if path.startswith("gpu-pipelined/x_tbl_aotc_h18p/")} != set()
    left_out = ("gpu-pipelined/x_wide", "gpu-pipelined/x_tbl", "ios-ane")
    fewer = {name: folder for name, folder in whole["folders"].items() if name not in left_out}
    first, _ = downloads(readme.render(document(folders=fewer)), files)
    assert first == {"ios-gpu/core_int4.aimodel/data", "ios-gpu/provenance.json", f"{TABLES}/data"}


# --- how to run it -------------------------------------------------------------------------------


@pytest.mark.parametrize("built", [True, False])
def test_the_kit_is_told_what_the_catalog_says(built):
    whole = document(built)
    text = readme.render(whole)
    swift = text.partition("```swift\n")[2].partition("```")[0]
    (entry,) = catalog(whole)["models"]
    assert entry["variants"].keys() == ({"macos", "ios"} if built else {"macos"})
    for variant in entry["variants"].values():
        assert f'folder = "{variant["path"]}", tables = "{TABLES}"' in swift
        assert f"`{variant['path']}/` for" in text
    assert ("#if os(iOS)" in swift) == built == ("nothing for iOS" not in text)


def test_what_the_kit_cannot_load_is_not_offered_to_it():
    kept = {name: entry for name, entry in document()["artifacts"].items() if "x_tbl" not in name}
    folders = {name: entry for name, entry in document()["folders"].items() if "x_tbl" not in name}
    text = readme.render(document(artifacts=kept, folders=folders))
    assert "swift" not in text and "catalog.json" not in text and "coreai-kit" not in text


def test_the_lines_of_python_load_a_bundle(tmp_path):
    """A real one, in a process that knows nothing of this project."""
    import torch

    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.model.signature import FunctionSpec, TensorSpec

    class Double(torch.nn.Module):
        def forward(self, x):
            return x + x

    spec = FunctionSpec({"x": TensorSpec("float32", (1, 4))}, {"y": TensorSpec("float32", (1, 4))})
    made = tmp_path / "made" / "core.aimodel"
    made.mkdir(parents=True)
    save_bundle([Function("main", Double(), spec)], made, {"checkpoint": given.CHECKPOINT_DIGEST})
    files = {
        path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()
    }
    checkpoint = given.checkpoint(tmp_path)
    inputs = {
        "checkpoint": checkpoint,
        "bundle_core": given.result(tmp_path, "export", "core.aimodel", files),
    }
    params = given.package_params(bundles={"core": "tiny_core.aimodel"}, tables=[])
    release = given.build_release(
        tmp_path,
        {
            "checkpoint": checkpoint,
            "folder_macos": given.build_package(tmp_path, inputs, params),
            "gate_numbers": given.gate(tmp_path, "numbers"),
        },
        given.release_params(artifacts={}),
    )
    text = (release / "README.md").read_text()
    lines = text.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-I", "-c", lines], cwd=release, capture_output=True, text=True, check=False
    )
    assert "main ['x'] ['y'] []" in done.stdout, done.stderr


# --- ahead of time, gates, what was not run ------------------------------------------------------


def test_what_is_compiled_ahead_of_time_is_listed_with_its_devices():
    text = readme.render(document())
    assert rows(text, "Compiled ahead of time") == [
        [
            "`gpu-pipelined/x_tbl_aotc_h18p/`",
            "`gpu-pipelined/x_tbl/x_tbl.aimodel`",
            "iOS h18p, gpu",
            "iPhone 17 Pro",
            "built with coreai-build 3600.83.1",
        ],
        [
            "`ios-gpu/core_int4_aotc_h18p/`",
            "`ios-gpu/core_int4.aimodel`",
            "iOS h18p, gpu",
            "iPhone 17 Pro",
            "built with coreai-build 3600.83.1",
        ],
        [
            "`macos/core_int8_aotc_h16c/`",
            "`macos/core_int8.aimodel`",
            "macOS h16c, gpu",
            "not known",
            "built with coreai-build 3600.83.1",
        ],
    ]
    assert "sh compile.sh OUTPUT" in text and "Ahead-of-time" not in text


def test_what_was_not_compiled_is_said_where_it_is_missed():
    text = readme.render(document(built=False))
    assert {row[4] for row in rows(text, "Compiled ahead of time")} == {
        "not built: no xcrun \\| on this host"
    }
    assert text.partition("## What was not run")[2].count("no xcrun | on this host") == 1
    assert "what is not built here" in text


def test_without_targets_nothing_is_said_of_compiling_but_that_it_was_not_done():
    text = readme.render(document(built=False, aot={}))
    assert "## Compiled ahead of time" not in text and "compile.sh" not in text
    assert "- Ahead-of-time compilation: there is no `.aimodelc`" in text


def test_the_verdicts_are_counted_and_listed():
    text = readme.render(document())
    assert rows(text, "Gates") == [
        ["`numbers`", "outputs against the decoder in float32 with the same stored weights", "2 pass"]
    ]
    details = text.partition("<details>")[2].partition("</details>")[0]
    assert (
        details.count("| pass | yes |") == 2 and "\n\n| gate |" in details
    )  # else the Hub shows it as it is
