"""The jobs of a plan: state, predicted bytes, memory and seconds of each, and the least time of all together."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.needed import CONFIG, TOKENIZER, planned_inputs, read_json_object
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.configuration.data import HUB_ADDRESS
from workflow_scripts.errors import UserError
from workflow_scripts.files import LINKED_FROM
from workflow_scripts.manifest import Manifest, tree_path
from workflow_scripts.plan.seconds import Clock, Dialogues, Seconds
from workflow_scripts.plan.sizes import Model
from workflow_scripts.why import REBUILD, STORED, UP_TO_DATE, Answer, Command

BUILT, LOCAL, SHARED, BUILD = "up to date", "local store", "shared store", "build"
PRESENT, SHAPES, ABOUT, UNKNOWN = "of the result", "from shapes", "about", "unknown"
_VERDICT = 6_000  # bytes of a gate's result: measured 0.5 to 23 kB
_LINKED = ("bundle_", "tables_", "folder_", "compiled", "twin")  # inputs that a result is made of


@dataclass(frozen=True)
class Job:
    """One job. `size` are the bytes of its result, `new` those of them that a run writes or fetches, None if unknown.

    `waits` says that an input must be built first, so that the store may still turn out to have the result; `seconds`
    are None where nobody knows, and 0 for a job that builds nothing.
    """

    name: str
    stage: str
    state: str
    waits: bool
    size: int | None
    size_from: str
    new: int | None
    mem_mb: int | None
    threads: int
    seconds: float | None
    seconds_from: str
    after: tuple[str, ...]

    @property
    def group(self) -> str:
        """What the table counts together: the folder of the result below that of the model."""
        parts = self.name.split("/")
        return "/".join(parts[: 2 if parts[0] == "gates" else 1])


@dataclass(frozen=True)
class Plan:
    """All jobs, inputs before what reads them; `notes` are lines for people."""

    results: Path
    checkpoint: int | None
    jobs: list[Job]
    notes: list[str]

    @classmethod
    def of(cls, commands: list[Command], answers: list[Answer]) -> Self:
        """Raises UserError for a config.json that cannot be read."""
        sizes = _Sizes(commands, answers)
        results = Path(*commands[0].output.parts[:2])
        clock = Clock(results, sizes.checkpoint, sizes.dialogues, sizes.by_output.get)
        jobs = [
            _job(command, answer, sizes, clock) for command, answer in zip(commands, answers, strict=True)
        ]
        return cls(results, sizes.checkpoint, jobs, sizes.notes)


def least_seconds(jobs: Iterable[Job], cores: int, mem_mb: int) -> tuple[float, str]:
    """A lower bound of the time that jobs take together, and what sets it; unknown seconds count as none.

    No order of the jobs is faster than their longest chain, nor than all their work on all cores or in all memory.
    """
    ends: dict[str, float] = {}
    busy = held = 0.0
    for job in jobs:
        seconds = job.seconds or 0.0
        ends[job.name] = seconds + max((ends.get(name, 0.0) for name in job.after), default=0.0)
        busy += seconds * min(job.threads, cores)
        held += seconds * min(job.mem_mb or 0, mem_mb)
    bounds = {
        "the longest chain of jobs": max(ends.values(), default=0.0),
        f"{cores} cores": busy / cores,
        f"{mem_mb:,} MB of memory": held / mem_mb,
    }
    limit = max(bounds, key=lambda name: bounds[name])
    return bounds[limit], limit


class _Sizes:
    """Bytes of results: of the manifest where there is one, else predicted."""

    def __init__(self, commands: list[Command], answers: list[Answer]) -> None:
        self.by_output = {command.output: command for command in commands}
        self.notes: list[str] = []
        self._found = {c.output: answer.found for c, answer in zip(commands, answers, strict=True)}
        stages = {command.stage: command for command in commands}
        oracle, checkpoint = stages.get("oracle"), stages.get("checkpoint")
        asked = oracle.params["dialogues"] if oracle else []
        self.dialogues = Dialogues({dialogue["name"]: dialogue for dialogue in asked})
        self._tokenizer = 0
        config = self._config(checkpoint) if checkpoint else None
        self._model = Model(config) if config else None
        self.checkpoint = self.size(checkpoint)[0] if checkpoint else None

    def size(self, command: Command) -> tuple[int | None, str]:
        """Bytes of a result, and where the number comes from."""
        found = self._found[command.output]
        if found is not None:
            return bytes_of(found), PRESENT
        stage = command.stage
        if stage in ("package", "package_compiled", "release"):
            parts = self.parts(command)
            return (None, UNKNOWN) if None in parts else (sum(parts), SHAPES)
        if stage.startswith("gate_"):
            return _VERDICT, ABOUT
        if stage == "checkpoint" and (local := _local_bytes(command)):
            return local, "of the files"
        return (
            (None, UNKNOWN)
            if self._model is None or stage == "aot"
            else self._predicted(command, self._model)
        )

    def parts(self, command: Command) -> list[int | None]:
        """Bytes of what a folder is linked of, and of its tokenizer."""
        made = [self.by_output.get(p) for name, p in command.inputs.items() if name.startswith(_LINKED)]
        own = [self._tokenizer] if command.params.get("tokenizer") else []
        return [self.size(one)[0] if one else None for one in made] + own

    def _predicted(self, command: Command, model: Model) -> tuple[int | None, str]:
        stage, params = command.stage, command.params
        numbers = self.dialogues.positions(self.dialogues.with_numbers())
        width = model.config.hidden_size
        match stage:
            case "checkpoint" | "rehearsal":
                return model.checkpoint(), SHAPES
            case "weights":
                return model.weights(params["recipe"]), SHAPES
            case "tables" | "tables_int4":
                return model.tables(stage == "tables_int4"), SHAPES
            case "oracle":
                long = self.dialogues.positions(self.dialogues.long(True))
                return model.logits(numbers) + 4 * width * long, ABOUT
            case "decode_reference":
                return model.logits(numbers) + 4 * width * numbers, ABOUT
            case "export_coreml":
                return None, UNKNOWN
            case "reference":  # the hidden state and a branch of every layer
                return model.logits(numbers) + 8 * width * model.config.num_hidden_layers * numbers, ABOUT
        weights, tables = (
            self.by_output.get(command.inputs.get(name, Path())) for name in ("weights", "tables")
        )
        size = model.bundle(
            params["form"],
            params["compute"],
            weights.params["recipe"] if weights else None,
            tuple(params["layers"]) if "layers" in params else None,
            functions=len(params.get("capacities", ())) or 1,
            int4=tables is not None and tables.stage == "tables_int4",
        )
        return size, SHAPES

    def _config(self, checkpoint: Command) -> TextConfig | None:
        """The shapes, wherever a config.json is at hand; nothing is fetched for it."""
        built = tree_path(checkpoint.output) / "source" / CONFIG
        rehearsal = self.by_output.get(checkpoint.inputs.get("source", Path()))
        path = checkpoint.inputs.get(f"source/{CONFIG}")
        if rehearsal is not None:
            path = rehearsal.inputs[CONFIG]
        elif path is not None:
            _, missing = planned_inputs(path.parent)
            self.notes += [f"a run would stop: {missing}"] if missing else []
            tokenizer = path.with_name(TOKENIZER)
            self._tokenizer = tokenizer.stat().st_size if tokenizer.is_file() else 0
        elif self._found[checkpoint.output] is not None and built.is_file():
            path = built
        else:
            path = self._cached(checkpoint.params["source"])
        return parse_text_config(read_json_object(path), str(path)) if path else None

    def _cached(self, source: str) -> Path | None:
        """The config.json of a Hugging Face checkpoint in the local cache."""
        match = HUB_ADDRESS.fullmatch(source)
        if match is None:
            return None
        from huggingface_hub import try_to_load_from_cache  # half a second, and only here

        found = try_to_load_from_cache(match["repository"], CONFIG, revision=match["revision"])
        if isinstance(found, str):
            return Path(found)
        self.notes.append(
            f"sizes are unknown, and times those of E2B: {CONFIG} of {source} is not here. It is enough: "
            f"hf download {match['repository']} {CONFIG} --revision {match['revision']}"
        )
        return None


def bytes_of(manifest: Manifest) -> int:
    """Bytes of a result's files."""
    return sum(entry.size for entry in manifest.files)


def _job(command: Command, answer: Answer, sizes: _Sizes, clock: Clock) -> Job:
    stored = SHARED if answer.shared else LOCAL
    state = {UP_TO_DATE: BUILT, STORED: stored}.get(answer.state, BUILD)
    size, size_from = sizes.size(command)
    took = clock.seconds(command) if state == BUILD else Seconds(0.0, "nothing is built")
    return Job(
        name=command.name,
        stage=command.stage,
        state=state,
        waits=state == BUILD and answer.state != REBUILD,
        size=size,
        size_from=size_from,
        new=_new(command, state, size, sizes),
        mem_mb=command.mem_mb,
        threads=command.threads,
        seconds=took.value,
        seconds_from=took.origin,
        after=tuple(sizes.by_output[p].name for p in command.inputs.values() if p in sizes.by_output),
    )


def _new(command: Command, state: str, size: int | None, sizes: _Sizes) -> int | None:
    """Bytes that a run writes or fetches for a result: large files are linked from other results and the store."""
    if state in (BUILT, LOCAL):
        return 0
    if state == SHARED or command.stage not in ("checkpoint", "package", "package_compiled", "release"):
        return size
    if command.stage == "checkpoint":
        return 0 if command.inputs and (size or 0) >= LINKED_FROM else size
    parts = sizes.parts(command)
    return None if None in parts else sum(part for part in parts if part < LINKED_FROM)


def _local_bytes(command: Command) -> int:
    """Bytes of a local checkpoint's files; 0 where its weights are not there."""
    if not any(path.suffix == ".safetensors" for path in command.inputs.values()):
        return 0
    try:
        return sum(path.stat().st_size for path in command.inputs.values())
    except OSError as problem:
        raise UserError(f"{problem.filename}: {problem.strerror}") from None
