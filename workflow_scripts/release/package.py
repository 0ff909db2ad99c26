"""One release folder: published bundles and tables, tokenizer files, the host's plan, and what it was made of."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import place_file, tree_files, write_json
from workflow_scripts.manifest import Manifest, manifest_path, read_manifest
from workflow_scripts.release import tokenizer
from workflow_scripts.release.names import CHUNKS_PLAN, METADATA, PLAN, PROVENANCE, TOKENIZER
from workflow_scripts.release.origin import check_origin, read_identity

_REQUIRED = (tokenizer.TOKENIZER, tokenizer.CONFIG, tokenizer.GENERATION)
_OPTIONAL = ("special_tokens_map.json", tokenizer.TEMPLATE)
_RESERVED = (TOKENIZER, PROVENANCE, PLAN, CHUNKS_PLAN, METADATA)
_BUNDLE_SUFFIXES = (".aimodel", ".aimodelc")


@dataclass(frozen=True)
class Item:
    """A result that goes into the folder under its published name."""

    published: str
    tree: Path


@dataclass(frozen=True)
class Origin:
    """The checkpoint of a folder: the digest of its result, and its identity (`digest` in checkpoint.json)."""

    result: str
    identity: str

    @classmethod
    def of(cls, checkpoint: Path, result: str) -> Self:
        """`checkpoint` is the result folder, `result` the digest of that result."""
        return cls(result, read_identity(checkpoint))


def place_items(items: list[Item], origin: Origin, out: Path) -> None:
    """Place every item in `out` and write `provenance.json`, which says what each was made of.

    Host-measured figures stay behind. Raises UserError for a name that cannot be published or is taken twice,
    for a bundle that is none, and for an item that was made from another checkpoint.
    """
    names = [item.published for item in items]
    for name in names:
        if not name or Path(name).name != name or name in _RESERVED or not name.isprintable():
            raise UserError(f"`{name}` cannot be a published name: it must be a plain, unreserved file name")
        if names.count(name) > 1:
            raise UserError(
                f"`{name}` is published twice in {out.name}: give each artifact a name of its own"
            )
    provenance = {}
    for item in items:
        manifest = read_manifest(manifest_path(item.tree))
        _check_kind(item)
        _check_checkpoint(item, manifest, origin.result)
        check_origin(item.tree, origin.identity)
        for path in tree_files(item.tree):
            if not path.name.startswith("measured"):
                place_file(path, out / item.published / path.relative_to(item.tree))
        provenance[item.published] = describe(manifest)
    write_json(out / PROVENANCE, provenance)


def describe(manifest: Manifest) -> dict[str, Any]:
    """What a result is and was made of: digest, stage, parameters, digests of its inputs, tool versions.

    The code digest and the key are left out: an edit that changes no byte of a bundle must not change the folder.
    """
    made_of = manifest.ingredients
    return {
        "artifact": made_of.artifact,
        "stage": made_of.stage,
        "digest": manifest.digest,
        "params": made_of.params,
        "inputs": made_of.inputs,
        "tools": made_of.tools,
    }


def place_tokenizer(source: Path, out: Path) -> tokenizer.ChatTokenizer:
    """Copy the checkpoint's tokenizer files byte for byte to `out/tokenizer`, and open them there.

    Raises UserError naming what is missing, above all the chat template: a bundle without it cannot chat.
    """
    tokenizer.read_template(source)
    for name in _REQUIRED:
        if not (source / name).is_file():
            raise UserError(f"{source / name} is missing: a release needs it; fetch it with the checkpoint")
    for name in (*_REQUIRED, *_OPTIONAL):
        if (source / name).is_file():
            place_file(source / name, out / TOKENIZER / name)
    return tokenizer.ChatTokenizer.open(out / TOKENIZER)


def read_text_config(checkpoint: Path) -> TextConfig:
    """The canonical text config of a `checkpoint` result."""
    document = json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))
    return TextConfig.from_json(document["text_config"])


def read_source(checkpoint: Path) -> dict[str, str]:
    """Where a `checkpoint` result comes from: `kind`, and of one from the Hub `repository` and `commit`."""
    return json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))["origin"]


def _check_kind(item: Item) -> None:
    suffix = item.tree.suffix
    if suffix not in _BUNDLE_SUFFIXES and not any(item.published.endswith(s) for s in _BUNDLE_SUFFIXES):
        return
    if not item.published.endswith(suffix) or not any(item.tree.glob("main*.mlirb")):
        raise UserError(
            f"{item.tree} cannot be published as `{item.published}`: a bundle keeps its suffix "
            f"({' or '.join(_BUNDLE_SUFFIXES)}) and holds a main*.mlirb"
        )


def _check_checkpoint(item: Item, manifest: Manifest, expected: str) -> None:
    """Tables of one checkpoint beside bundles of another answer nonsense and nothing else would notice."""
    found = manifest.ingredients.inputs.get("checkpoint", expected)
    if found != expected:
        raise UserError(
            f"{item.tree.name} was made from another checkpoint (digest {found[:12]}, expected {expected[:12]}): "
            f"delete {manifest_path(item.tree)} and run again"
        )
