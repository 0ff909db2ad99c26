"""The entry of coreai-kit's catalog for a release."""

import copy

import pytest

from workflow_scripts.release.catalog import catalog, variants

TABLES = {"int8": "1" * 64, "int4": "4" * 64}


def artifact(form, folder, digest, stage="export_decode_tbl", params=None, platforms=None, **inputs):
    return {
        "form": form,
        "folders": [folder],
        "digest": digest * 64,
        "stage": stage,
        "params": params or {},
        "inputs": inputs,
        **({"platforms": platforms} if platforms else {}),
    }


def release(**artifacts):
    """The parts of release.json that matter: every artifact has one file of 1.5 MB, the tables of 2.2 MB."""
    tables = {
        "gather_raw": artifact("raw_tables", "ios-frontend", "1", "tables"),
        "gather_raw_int4": artifact("raw_tables_int4", "ios-frontend", "4", "tables_int4"),
    }
    everything = {**artifacts, **tables}
    folders: dict = {}
    for name, entry in everything.items():
        folders.setdefault(entry["folders"][0], {"contents": []})["contents"].append(name)
    files = [
        {"path": f"{entry['folders'][0]}/{name}/data", "size": 2_200_000 if name in tables else 1_500_000}
        for name, entry in everything.items()
    ]
    return {"model": "gemma-4-tiny", "artifacts": everything, "folders": folders, "files": files}


DECODER = artifact("decode_tbl", "gpu-pipelined/x_tbl", "a", tables=TABLES["int8"])
OTHERS = {
    "x.aimodel": artifact("decode", "gpu-pipelined/x", "b", tables=TABLES["int8"]),
    "core.aimodel": artifact("hostcache_core", "macos", "c"),
}


def compiled(*architectures, platform="iOS", bundle="a", stem="x_tbl"):
    """What becomes of a bundle ahead of time, by its published name: each in a folder of its own."""
    return {
        f"{stem}.{architecture}.aimodelc": artifact(
            "decode_tbl",
            f"gpu-pipelined/{stem}_aotc_{architecture}",
            "de"[index],
            "aot",
            {"platform": platform, "architecture": architecture},
            bundle=bundle * 64,
        )
        for index, architecture in enumerate(architectures)
    }


def test_macos_takes_the_bundle_and_ios_what_was_compiled_of_it():
    document = release(**{"x_tbl.aimodel": DECODER, **compiled("h18p"), **OTHERS})
    assert catalog(document) == {
        "version": 1,
        "models": [
            {
                "id": "gemma-4-tiny",
                "name": "gemma-4-tiny",
                "repo": None,
                "revision": None,
                "kind": "chat",
                "engine": "pipelined",
                "variants": {
                    "macos": {"path": "gpu-pipelined/x_tbl", "sizeMB": 4},
                    "ios": {"path": "gpu-pipelined/x_tbl_aotc_h18p", "sizeMB": 4},
                },
            }
        ],
    }


def test_the_revision_is_filled_in_after_the_upload():
    document = release(**{"x_tbl.aimodel": DECODER})
    before = copy.deepcopy(document)
    (entry,) = catalog(document, "me/gemma", "c0" * 20)["models"]
    assert (entry["repo"], entry["revision"]) == ("me/gemma", "c0" * 20)
    assert entry["variants"].keys() == {"macos"} and document == before


def test_what_is_not_meant_for_a_platform_is_not_offered_there():
    """A phone's decoder has fewer positions, and for a Mac the kit takes no bundle that was compiled."""
    phones = {
        "a_tbl.aimodel": artifact(
            "decode_tbl", "gpu-pipelined/a_tbl", "b", platforms=["ios"], tables=TABLES["int8"]
        )
    }
    macs = {"x_tbl.aimodel": {**DECODER, "platforms": ["macos"]}}
    compiled_of_both = compiled("h18p", bundle="b", stem="a_tbl") | compiled("h16c", platform="macOS")
    found = variants(release(**phones, **macs, **compiled_of_both))
    assert {platform: variant.folder for platform, variant in found.items()} == {
        "macos": "gpu-pipelined/x_tbl",
        "ios": "gpu-pipelined/a_tbl_aotc_h18p",
    }
    assert {variant.tables for variant in found.values()} == {"ios-frontend/gather_raw"}
    assert variants(release(**phones)) == {}


def test_of_several_architectures_the_oldest_is_named():
    document = release(**{**compiled("h19p", "h18p"), "x_tbl.aimodel": DECODER})
    assert catalog(document)["models"][0]["variants"]["ios"]["path"] == "gpu-pipelined/x_tbl_aotc_h18p"


@pytest.mark.parametrize(
    "artifacts",
    [
        OTHERS,
        {"x_tbl.aimodel": artifact("decode_tbl", "gpu-pipelined/x_tbl", "a", tables=TABLES["int4"])},
        compiled("h18p"),
    ],
    ids=["no such form", "tables that the kit does not read", "the bundle itself is not shipped"],
)
def test_what_the_kit_cannot_load_has_no_entry(artifacts):
    assert catalog(release(**artifacts)) is None
