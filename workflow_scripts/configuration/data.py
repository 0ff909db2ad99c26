"""The checked configuration as plain frozen data, and the tables of what it can name."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from workflow_scripts.coreai.architectures import Target, artifact_name, compiled_name
from workflow_scripts.model.signature import conversation_positions
from workflow_scripts.quantize.recipes import RECIPES, LinearEncoding, PaletteEncoding

HUB_ADDRESS = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)", re.ASCII)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # on the Hub

PLATFORMS = ("macos", "ios")
PRECISION = ("recipe", "compute")


@dataclass(frozen=True)
class Form:
    """What a graph form is: which keys an artifact of it needs or may have beyond form and name, and what it becomes.

    A bundle; one with Metal kernels; one for the Neural Engine; raw tables, which are none of these.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    bundle: bool = True
    kernels: bool = False
    engine: bool = False


_DECODE = Form((*PRECISION, "tables", "cache_minimum"), may=("context", "platforms"))
_BLOCKS = Form((*PRECISION, "cache_minimum"), may=("context", "platforms"))
_TABLES = Form(needs=(), bundle=False)

FORMS = {
    "hostcache_core": Form(PRECISION),
    "hostcache_metal": Form(PRECISION, kernels=True),
    "head": Form(PRECISION),
    "head_argmax": Form(PRECISION),
    "head_argmax_metal": Form(PRECISION, kernels=True),
    "ane_chunk": Form((*PRECISION, "layers"), may=("context",), engine=True),
    "ane_head": Form(PRECISION, engine=True),
    "decode": _DECODE,
    "decode_tbl": _DECODE,
    "decode_ring": Form((*PRECISION, "tables", "capacities"), may=("platforms",)),
    "stateful_core": _BLOCKS,
    "ring_core": _BLOCKS,
    "blend_core": Form(PRECISION, may=("context", "platforms")),
    "frontend": Form(("compute",)),  # its tables are int8 per row in every variant
    "raw_tables": _TABLES,
    "raw_tables_int4": _TABLES,
}
TABLE_FORMS = ("raw_tables", "raw_tables_int4")
DECODE_FORMS = ("decode", "decode_tbl", "decode_ring")
STATE_CORES = ("stateful_core", "ring_core", "blend_core")
"""Graph forms of cores that keep the kv_cache in states."""
BLOCK_FORMS = ("stateful_core", "ring_core")
"""Those that take several positions in one call."""
GROWING_FORMS = ("decode", "decode_tbl", "stateful_core", "ring_core")
"""Graph forms with a kv_cache whose length may change from call to call."""

# recipe -> bits of the palettes in which it stores the matrices that kernels read
KERNEL_BITS = {
    recipe.name: encoding.bits
    for recipe in RECIPES.values()
    if isinstance(encoding := recipe.encodings["mlp"], PaletteEncoding)
}

# Recipes without linear codes, which do not compile for the Neural Engine.
ENGINE_RECIPES = tuple(
    recipe.name
    for recipe in RECIPES.values()
    if not any(isinstance(encoding, LinearEncoding) for encoding in recipe.encodings.values())
)
ENGINE_CONTEXT = 2048  # a chunk compares positions in float16, which is exact up to here

FEEDING = ("tokens", "long_run", "chat")  # gates that feed a folder dialogues

# Recipes whose matrices all are linear codes of 4 bits, which is what the Core ML reference has.
COREML_RECIPES = tuple(
    recipe.name
    for recipe in RECIPES.values()
    if all(isinstance(code, LinearEncoding) and code.bits == 4 for code in recipe.encodings.values())
)

FRONTEND = "frontend"  # the role that another folder's raw tables (`tables_in`) can take over
CHUNK = "chunk"  # stands for the roles chunk1, chunk2, ...: as many as there are
DECODER = "decoder"  # stands for roles of any name: each is a folder of its own, where its role is this
DECODE = "decode"  # the driver of such folders

# driver -> role -> forms that can play it
DRIVERS: dict[str, dict[str, tuple[str, ...]]] = {
    "hostcache": {
        FRONTEND: ("frontend",),
        "core": ("hostcache_core", "hostcache_metal"),
        "head": ("head", "head_argmax", "head_argmax_metal", "ane_head"),
    },
    "chunks": {FRONTEND: ("frontend",), CHUNK: ("ane_chunk",), "head": ("ane_head",)},
    DECODE: {DECODER: DECODE_FORMS},
}

# gate -> what each of its targets is: a bundle; a shipped bundle with kernels, or for the Neural Engine; the weights of
# a recipe; raw tables; a folder that can chat; one of these in chunks, or with kernels; all of them together
GATES = {
    "structure": "bundle",
    "numbers": "bundle",
    "kernels": "kernel bundle",
    "ane": "engine bundle",
    "quantization": "recipe",
    "tables": "tables",
    "chunks": "chunk folder",
    "fp16": "chunk folder",
    "tokens": "folder",
    "long_run": "folder",
    "chat": "folder",
    "agreement": "folders",
    "gpu": "kernel folder",
}
LONG_RUN = 256  # fed positions from which a dialogue belongs to gate long_run, and no longer to gate tokens


@dataclass(frozen=True)
class Rehearsal:
    """Random weights: the config.json with their shape, and bytes of tensors in a shard (None: one file)."""

    config: str
    seed: int
    shard_bytes: int | None


@dataclass(frozen=True)
class CheckpointSource:
    """Where the weights come from.

    `repository` and `revision` are None but for the Hub, `rehearsal` is None but for random weights.
    """

    source: str
    repository: str | None
    revision: str | None
    allow_moving_revision: bool
    sha256: dict[str, str]
    rehearsal: Rehearsal | None


@dataclass(frozen=True)
class Dialogue:
    """One dialogue for the oracle, given by exactly one of `turns` and `prompt_ids`."""

    name: str
    turns: tuple[str, ...] | None
    prompt_ids: tuple[int, ...] | None
    new_tokens: int
    expect_text: str | None
    expect_ids: tuple[int, ...] | None
    stops: bool
    numbers: bool
    skip_ties: bool

    @property
    def known_prompt(self) -> int:
        """Length of the prompt in tokens as far as it is known: a text's is known to its tokenizer only, but not 0."""
        return len(self.prompt_ids or (0,))

    @property
    def fed_at_least(self) -> int:
        """Positions that are fed even if the answer is as short as it can be; its last id is not fed."""
        return self.known_prompt + len(self.expect_ids or (0,)) - 1

    @property
    def fed_if_full(self) -> int:
        """Positions that are fed if the answer takes all its tokens and the prompt only those that are known."""
        return self.known_prompt + (len(self.expect_ids) if self.expect_ids else self.new_tokens) - 1

    def params(self) -> dict[str, Any]:
        """The dialogue as JSON for the oracle stage; keys that were not given are left out."""
        given = {key: value for key, value in asdict(self).items() if value not in (None, False)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


@dataclass(frozen=True)
class Oracle:
    """What the original model is asked; `dialogues` by name, in the order of the file."""

    min_margin: float
    dialogues: dict[str, Dialogue]


@dataclass(frozen=True)
class Artifact:
    """One artifact; `published` is its file or folder name, with `.aimodel` if it is a bundle.

    `context` is its own or the config's; `layers` is the range [first, last) of a chunk; `tables` is the key of the raw
    tables that it is made with. `cache_minimum` and `capacities` are columns of the kv_cache: the fewest of one that
    grows, or those of each function. `platforms` are the systems it is meant for,
    none where its form says nothing of them; `aot` is what it is compiled for ahead of time.
    """

    key: str
    form: str
    recipe: str | None
    compute: str | None
    published: str
    context: int
    layers: tuple[int, int] | None
    tables: str | None
    cache_minimum: int | None
    capacities: tuple[int, ...]
    platforms: tuple[str, ...]
    aot: tuple[Target, ...]

    @property
    def positions(self) -> int:
        """How many positions it has room for."""
        return conversation_positions(self.form, self.context) if self.form in DECODE_FORMS else self.context

    @property
    def is_bundle(self) -> bool:
        """Whether it is an `.aimodel`."""
        return FORMS[self.form].bundle

    @property
    def has_kernels(self) -> bool:
        """Whether Metal kernels are embedded in it."""
        return FORMS[self.form].kernels

    @property
    def for_engine(self) -> bool:
        """Whether it is made for the Neural Engine."""
        return FORMS[self.form].engine


@dataclass(frozen=True)
class Folder:
    """One release folder; `bundles` maps a role to an artifact key, `tables` lists artifact keys.

    `tables_in` names the folder whose tables give this one's embeddings, if it has no front end of its own. A folder
    with the driver `decode` is a language bundle: it lies in another one, and its name says so, `outer/inner`.
    """

    name: str
    driver: str | None
    bundles: dict[str, str]
    tables: tuple[str, ...]
    tables_in: str | None
    tokenizer: bool

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Keys of everything that lies in the folder."""
        return (*self.bundles.values(), *self.tables)

    @property
    def chunks(self) -> tuple[str, ...]:
        """Keys of the decoder's chunks in their order; none where it is in one bundle."""
        numbers = range(1, len(self.bundles) + 1)
        return tuple(self.bundles[role] for number in numbers if (role := f"{CHUNK}{number}") in self.bundles)

    @property
    def decoder(self) -> str | None:
        """Key of the bundle that is the whole decoder, of a language bundle."""
        return self.bundles.get(DECODER) if self.driver == DECODE else None

    @property
    def can_chat(self) -> bool:
        """Whether the folder answers a prompt, if need be with `tables_in`; a driver never comes without tokenizer."""
        return self.driver is not None


@dataclass(frozen=True)
class CompiledBundle:
    """A bundle of a folder as it is compiled ahead of time for one target: a folder of its own beside it.

    `home` is the release folder with the bundle; where that is a language bundle, so is what is compiled.
    """

    home: Folder
    artifact: Artifact
    target: Target

    @property
    def result(self) -> str:
        """Name of the compiler's result, `STEM_aotc_ARCHITECTURE`; the same wherever the bundle lies."""
        return artifact_name(self._stem, self.target)

    @property
    def folder(self) -> str:
        """The release folder with what was compiled; of a language bundle beside it, else in its folder."""
        outer = self.home.name.rpartition("/")[0] if self.home.decoder else self.home.name
        return f"{outer}/{self.result}"

    @property
    def published(self) -> str:
        """Name of the compiled bundle, by which apps find it."""
        return compiled_name(self._stem, self.target)

    @property
    def _stem(self) -> str:
        return self.artifact.published.removesuffix(".aimodel")


@dataclass(frozen=True)
class Gates:
    """Gates that a release needs, those it only reports, unshipped artifacts that they judge, dialogues of the chat."""

    required: tuple[str, ...]
    reported: tuple[str, ...]
    evidence: tuple[str, ...]
    chat: tuple[str, ...]


@dataclass(frozen=True)
class StoreConfig:
    """Places of the store's two levels; None where the default, or no shared level, is meant."""

    folder: str | None
    shared: str | None


@dataclass(frozen=True)
class CoreML:
    """The Core ML reference: recipe of its weights, published name of its tables, rows of its head, positions."""

    recipe: str
    tables: str
    head_rows: int
    context: int


@dataclass(frozen=True)
class Config:
    """A whole valid configuration."""

    model: str
    slug: str
    num_hidden_layers: int
    context: int
    checkpoint: CheckpointSource
    oracle: Oracle
    artifacts: dict[str, Artifact]
    folders: dict[str, Folder]
    gates: Gates
    store: StoreConfig
    aot_mode: str
    coreml: CoreML | None
    repository: str | None
    publish: bool

    def bundles(self) -> dict[str, Artifact]:
        """The artifacts that are `.aimodel` bundles, by key."""
        return {key: artifact for key, artifact in self.artifacts.items() if artifact.is_bundle}

    def shipped(self) -> dict[str, Artifact]:
        """The artifacts that lie in some folder, by key."""
        keys = {key for folder in self.folders.values() for key in folder.artifacts}
        return {key: artifact for key, artifact in self.artifacts.items() if key in keys}

    def judged(self) -> dict[str, Artifact]:
        """The artifacts that a release's gates judge, by key: all that are shipped, and the evidence."""
        keys = self.shipped().keys() | {*self.gates.evidence}
        return {key: artifact for key, artifact in self.artifacts.items() if key in keys}

    def compiled(self) -> list[CompiledBundle]:
        """What the release's bundles are compiled for ahead of time, where the host can."""
        return [
            CompiledBundle(folder, self.artifacts[key], target)
            for folder in self.folders.values()
            for key in folder.bundles.values()
            for target in self.artifacts[key].aot
        ]

    def positions(self, folder: Folder) -> int:
        """How many positions a folder's bundles have room for."""
        keys = folder.chunks or (folder.decoder,)
        return min((self.artifacts[key].positions for key in keys if key), default=self.context)

    def tables_of(self, folder: Folder) -> tuple[str, ...]:
        """Keys of the raw tables in another folder that a folder's host reads: a decoder's own, or all there are."""
        if folder.tables_in is None:
            return ()
        if folder.decoder and (own := self.artifacts[folder.decoder].tables):
            return (own,)
        return self.folders[folder.tables_in].tables

    def agreeing(self) -> tuple[str, ...]:
        """The gates whose ids are compared between folders: those of the required ones that feed dialogues."""
        return tuple(gate for gate in FEEDING if gate in self.gates.required)

    def gate_targets(self, gate: str, artifacts: Iterable[Artifact]) -> list[str]:
        """What a gate judges, each target by itself: published names, recipes, or the folders that can chat."""
        chats = [folder for folder in self.folders.values() if folder.can_chat]
        match GATES[gate]:
            case "bundle":
                return [artifact.published for artifact in artifacts if artifact.is_bundle]
            case "kernel bundle":  # evidence shows the graph around the kernels; what ships shows them
                shipped = self.shipped()
                return [a.published for a in artifacts if a.has_kernels and a.key in shipped]
            case "engine bundle":  # evidence in float32 breaks the engine's rules by its very type
                shipped = self.shipped()
                return [a.published for a in artifacts if a.for_engine and a.key in shipped]
            case "recipe":
                return sorted({artifact.recipe for artifact in artifacts if artifact.recipe})
            case "tables":
                return [artifact.published for artifact in artifacts if artifact.form in TABLE_FORMS]
            case "folders":
                return ["folders"] if len(chats) > 1 else []
            case "chunk folder":
                return [folder.name for folder in chats if folder.chunks]
            case "kernel folder":
                return [f.name for f in chats if any(self.artifacts[key].has_kernels for key in f.artifacts)]
            case _:
                return [folder.name for folder in chats]

    def recipes(self) -> tuple[str, ...]:
        """The weight recipes that some artifact or the Core ML reference needs, sorted."""
        recipes = {a.recipe for a in self.artifacts.values() if a.recipe is not None}
        return tuple(sorted(recipes | ({self.coreml.recipe} if self.coreml else set())))
