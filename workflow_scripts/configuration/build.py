"""From the checked raw configuration to its data."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workflow_scripts.configuration.data import (
    BLOCK_FORMS,
    DECODE,
    DECODER,
    FORMS,
    HUB_ADDRESS,
    PLATFORMS,
    Artifact,
    CheckpointSource,
    Config,
    CoreML,
    Dialogue,
    Folder,
    Gates,
    Oracle,
    Rehearsal,
    StoreConfig,
)
from workflow_scripts.coreai.architectures import OLDEST_DEPLOYMENT, Target


def published_stem(artifact: dict[str, Any], raw: dict[str, Any]) -> str:
    """Published name of a raw artifact without the suffix of bundles."""
    return artifact["name"].format(slug=raw["slug"], layers=int(raw["num_hidden_layers"]))


def published_name(artifact: dict[str, Any], raw: dict[str, Any]) -> str:
    """Published name of a raw artifact."""
    stem = published_stem(artifact, raw)
    return f"{stem}.aimodel" if FORMS[artifact["form"]].bundle else stem


def platforms_of(artifact: dict[str, Any]) -> tuple[str, ...]:
    """The systems that a raw artifact is meant for: all, if it does not say; but no phone takes blocks of positions."""
    return tuple(artifact.get("platforms", PLATFORMS[:1] if artifact["form"] in BLOCK_FORMS else PLATFORMS))


def target_of(entry: dict[str, Any]) -> Target:
    """What a raw entry of an artifact's `aot` is compiled for."""
    optional = {"min_deployment_version": OLDEST_DEPLOYMENT, "expect_frequent_reshapes": False}
    return Target(**{**optional, **entry})


def context_of(artifact: dict[str, Any], raw: dict[str, Any]) -> int:
    """Positions of a raw artifact: its own, its largest capacity's, or the config's."""
    return int(artifact.get("context") or max(artifact.get("capacities", [0])) or raw["context"])


def build(raw: dict[str, Any]) -> Config:
    """The data of a raw configuration in which no problem was found."""
    gates = raw["gates"]
    return Config(
        model=raw["model"],
        slug=raw["slug"],
        num_hidden_layers=int(raw["num_hidden_layers"]),  # 10.0 is a whole number to a JSON Schema
        context=int(raw["context"]),
        checkpoint=_build_checkpoint(raw["checkpoint"]),
        oracle=_build_oracle(raw["oracle"]),
        aot_mode=raw["aot"]["mode"],
        coreml=_build_coreml(raw),
        artifacts={key: _build_artifact(key, entry, raw) for key, entry in raw["artifacts"].items()},
        store=StoreConfig(
            folder=None if raw["store"]["folder"] == "default" else raw["store"]["folder"],
            shared=None if raw["store"]["shared"] == "off" else raw["store"]["shared"],
        ),
        folders={
            folder.name: folder
            for name, entry in raw["folders"].items()
            for folder in _folders(name, entry, raw)
        },
        gates=Gates(
            tuple(gates["required"]),
            tuple(gates["reported"]),
            tuple(gates["evidence"]),
            tuple(gates["chat"]),
        ),
        repository=None if raw["repository"] == "none" else raw["repository"],
        publish=raw["publish"] in (True, "yes"),
    )


def _build_checkpoint(entry: dict[str, Any]) -> CheckpointSource:
    hub = HUB_ADDRESS.fullmatch(entry["source"])
    return CheckpointSource(
        source=entry["source"],
        repository=hub["repository"] if hub else None,
        revision=hub["revision"] if hub else None,
        allow_moving_revision=entry["allow_moving_revision"],
        sha256=dict(entry["sha256"]),
        rehearsal=_build_rehearsal(entry.get("rehearsal")),
    )


def _build_rehearsal(entry: dict[str, Any] | None) -> Rehearsal | None:
    if entry is None:
        return None
    shard_bytes = entry.get("shard_bytes")
    return Rehearsal(entry["config"], int(entry["seed"]), None if shard_bytes is None else int(shard_bytes))


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


def _build_coreml(raw: dict[str, Any]) -> CoreML | None:
    """The Core ML reference; None too where the release has no int8 tables, without which there is none."""
    entry, artifacts = raw.get("coreml"), raw["artifacts"]
    if entry is None:
        return None
    first = next((name for name, artifact in artifacts.items() if artifact["form"] == "raw_tables"), None)
    key = entry.get("tables", first)
    if key is None:
        return None
    return CoreML(
        entry["recipe"], published_name(artifacts[key], raw), int(entry["head_rows"]), int(entry["context"])
    )


def _build_artifact(key: str, entry: dict[str, Any], raw: dict[str, Any]) -> Artifact:
    layers, minimum = entry.get("layers"), entry.get("cache_minimum")
    return Artifact(
        key=key,
        form=entry["form"],
        recipe=entry.get("recipe"),
        compute=entry.get("compute"),
        published=published_name(entry, raw),
        context=context_of(entry, raw),
        layers=(int(layers[0]), int(layers[1])) if layers else None,
        tables=entry.get("tables"),
        cache_minimum=None if minimum is None else int(minimum),
        capacities=tuple(int(capacity) for capacity in entry.get("capacities", ())),
        platforms=platforms_of(entry) if "platforms" in FORMS[entry["form"]].may else (),
        aot=tuple(target_of(target) for target in entry.get("aot", ())),
    )


def _folders(name: str, entry: dict[str, Any], raw: dict[str, Any]) -> Iterator[Folder]:
    """The folder itself; of one with the driver `decode` a language bundle for each artifact."""
    folder = Folder(
        name=name,
        driver=entry.get("driver"),
        bundles=dict(entry.get("bundles", {})),
        tables=tuple(entry.get("tables", ())),
        tables_in=entry.get("tables_in"),
        tokenizer=entry.get("tokenizer", False),
    )
    if folder.driver != DECODE:
        yield folder
        return
    for key in folder.bundles.values():
        inner = published_stem(raw["artifacts"][key], raw)
        yield replace(folder, name=f"{name}/{inner}", bundles={DECODER: key})


def _ids(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(int(value) for value in values)
