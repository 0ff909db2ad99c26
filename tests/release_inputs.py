"""Small inputs of the package and release stages, with real manifests, and the stages run on them."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.closure import ROOT
from workflow_scripts.files import canonical_json
from workflow_scripts.manifest import Ingredients, manifest_path, read_manifest, write_manifest
from workflow_scripts.stages import runner

TINY = ROOT / "resources" / "gemma-4-tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_files(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Write files below a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def result(
    root: Path, stage: str, artifact: str, files: dict[str, bytes | str], inputs: dict[str, str] | None = None
) -> Path:
    """A result folder as a stage leaves it; returns its manifest."""
    tree = write_files(root / stage / artifact, files)
    tools = {"python": "3.11", "numpy": "2.0"}
    write_manifest(
        tree,
        Ingredients(
            stage, artifact, {"a.py": "0" * 64}, {"bits": 4}, inputs or {}, tools, {"python": "3.11"}
        ),
    )
    return manifest_path(tree)


HUB = {"kind": "huggingface", "repository": "nobody/gemma-4-tiny", "commit": "cd" * 20}
LOCAL = {"kind": "local"}
CHECKPOINT_DIGEST = "ab" * 32


def checkpoint(
    root: Path, extra: dict[str, bytes | str] | None = None, origin: dict[str, str] | None = None
) -> Path:
    """A `checkpoint` result around the tokenizer files and the config of the embedded checkpoint."""
    raw = json.loads((TINY / "config.json").read_text())
    record = {
        "format": 1,
        "digest": CHECKPOINT_DIGEST,
        "origin": origin or HUB,
        "files": {},
        "text_config": parse_text_config(raw, "config.json").to_json(),
        "tensors": {},
    }
    files: dict[str, bytes | str] = {f"source/{name}": (TINY / name).read_bytes() for name in TOKENIZER_FILES}
    files |= {
        "checkpoint.json": canonical_json(record),
        "source/README.md": "---\nlicense: apache-2.0\nlicense_link: https://example.org/licence\n---\n# A card\n",
        "source/LICENSE": "Use it as you like.\n",
    }
    return result(root, "checkpoint", "checkpoint", {**files, **(extra or {})})


def digest(manifest: Path) -> str:
    """Digest of a result."""
    return read_manifest(manifest).digest


def bundle(
    root: Path,
    name: str,
    content: bytes,
    inputs: dict[str, str] | None = None,
    made_from: str = CHECKPOINT_DIGEST,
) -> Path:
    """An export result that looks like a bundle, with the digest of the checkpoint that it says it was made from."""
    return result(
        root,
        "export",
        f"{name}.aimodel",
        {
            "main.mlirb": content,
            "metadata.json": canonical_json(
                {"creatorDefinedMetadata": {"checkpoint": made_from}, "producer": "x"}
            ),
        },
        inputs,
    )


def tables(root: Path, checkpoint_digest: str, made_from: str = CHECKPOINT_DIGEST) -> Path:
    """A raw gather dump in name only, with figures of one host beside it; `made_from` as for `bundle`."""
    files: dict[str, bytes | str] = {
        "ple.i8": bytes(range(256)),
        "meta.json": canonical_json({"checkpoint": made_from}),
        "measured.json": '{"s": 1.5}\n',
    }
    return result(root, "tables", "gather_raw", files, {"checkpoint": checkpoint_digest})


def gate(
    root: Path,
    name: str,
    verdict: str = "pass",
    reason: str | None = None,
    inputs: dict[str, str] | None = None,
) -> Path:
    """A gate result; `inputs` are the digests of what it judged."""
    record = {
        "gate": name,
        "target": "tiny_core.aimodel",
        "verdict": verdict,
        "reason": reason,
        "bounds": {"max_abs_error": 1e-4},
        "checks": [{"name": "tokens", "passed": True, "expected": "all equal", "found": "all equal"}],
        "tokens": {"expected": [5, 6, 106], "found": [5, 6, 106]},
    }
    files: dict[str, bytes | str] = {
        "verdict.json": canonical_json(record),
        "measured.json": canonical_json({"max_abs_error": 3.25e-05}),
    }
    return result(root, "gate", name, files, inputs)


def package_params(**changes: Any) -> dict[str, Any]:
    """Parameters of the package stage for the `macos` folder."""
    return {
        "folder": "macos",
        "slug": "tiny",
        "driver": "hostcache",
        "bundles": {"core": "tiny_core.aimodel", "head": "tiny_head.aimodel"},
        "tables": ["tiny_gather_raw"],
        "tables_in": None,
        "tokenizer": True,
        "context": 64,
        "chunks": None,
        "language": None,
        **changes,
    }


def package_inputs(root: Path) -> dict[str, Path]:
    """Inputs that go with `package_params`."""
    source = checkpoint(root)
    return {
        "checkpoint": source,
        "bundle_core": bundle(root, "core_fp16", b"core" * 50),
        "bundle_head": bundle(root, "head_fp16", b"head" * 50),
        "tables_0": tables(root, digest(source)),
    }


def build_package(root: Path, inputs: dict[str, Path], params: dict[str, Any]) -> Path:
    """Run the package stage; returns the manifest of its folder."""
    output = root / "package" / f"{params['folder']}.manifest.json"
    runner.execute("package", inputs, params, output)
    return output


def release_params(**changes: Any) -> dict[str, Any]:
    """Parameters of the release stage for the `macos` folder."""
    artifacts = {
        "tiny_core.aimodel": {"form": "hostcache", "recipe": "fp16", "compute": "gpu"},
        "tiny_head.aimodel": {"form": "head", "recipe": "fp16", "compute": "gpu"},
    }
    return {
        "model": "gemma-4-tiny",
        "slug": "gemma4_tiny",
        "folders": ["macos"],
        "required_gates": ["numbers"],
        "artifacts": artifacts,
        "compiled": {},
        "not_built": None,
        **changes,
    }


def release_inputs(root: Path) -> dict[str, Path]:
    """Inputs that go with `release_params`; a gate that no host here can run is among them."""
    inputs = package_inputs(root)
    return {
        "checkpoint": inputs["checkpoint"],
        "folder_macos": build_package(root, inputs, package_params()),
        "gate_numbers": gate(root, "numbers"),
        "gate_device": gate(root, "device", "not_run", "needs a Mac | and a phone"),
        "weights_fp16": result(root, "weights", "fp16", {"report.json": '{"total": {"snr_db": 74.5}}\n'}),
    }


def build_release(root: Path, inputs: dict[str, Path], params: dict[str, Any]) -> Path:
    """Run the release stage; returns the release folder."""
    output = root / "release.manifest.json"
    runner.execute("release", inputs, params, output)
    return root / "release"
