"""The plan of a decoder in chunks: which layers each has, and where its host takes and puts every tensor.

Pure data, derived from the configuration. As JSON (`plan_json`) it is all that a host needs to drive a set of chunks,
one position after the other; `coreai/chunk_host.py` is that host in Python:

- `caches`: the arrays that the host keeps, zero at first: [slots, 1, kv_heads, context, head_dim].
- An input's `source` is one of
  `inputs_embeds` (of the token);
  `per_layer_inputs` (rows [first, last) of the token's);
  `hidden` (the output of another `chunk`);
  `position` (0 for the first token);
  `mask` (additive: 0 for the columns that are seen, `masked` for others. Column `context` is the current position,
  those before it are the past ones; with a `window` of W only the last W - 1 past ones are seen);
  `cache` (some `slots` of it);
  `producer` (the one `slot` of a cache, and behind its columns the current one: number `index` of another `chunk`'s
  `output` in this same position).
- An output's `target` is `hidden`, or `cache`: number i belongs into the column of the position in slot `slots[i]`. It
  is written when all chunks have run, since a `producer` input has the current column last and not at its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from workflow_scripts.checkpoint.text_config import FULL, TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import (
    CACHE_NAMES,
    FunctionSpec,
    TensorSpec,
    ane_chunk,
    borrows,
    hostcache_core,
    owned_slots,
)

FORMAT = 1
MASKED = -1e4
"""Additive mask of a hidden column: far below any score, and finite in float16."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    """Layers [first, last); per layer type the cache slots they fill, and the types whose producer is further up."""

    layers: Range
    slots: dict[str, list[int]]
    borrowed: list[str]
    inputs: list[str]
    outputs: list[str]


@dataclass(frozen=True)
class Producer:
    """The layer whose K/V all shared layers of its type read: its cache slot, chunk, place in its output."""

    layer: int
    slot: int
    chunk: int
    index: int


@dataclass(frozen=True)
class ChunkPlan:
    """A whole decoder in chunks with caches of `context` columns. `producers` is by layer type."""

    config: TextConfig
    context: int
    chunks: list[Chunk]
    producers: dict[str, Producer]


def chunk_plan(config: TextConfig, ranges: Sequence[Sequence[int]], context: int) -> ChunkPlan:
    """The plan for layer ranges [first, last).

    Raises UserError where the ranges are not all layers in order, and where a chunk would run before the one that makes
    the K/V it reads.
    """
    pairs = [_pair(entry) for entry in ranges]
    _check_producers(config, pairs)
    _check_cover(config, pairs)
    chunks = [_chunk(config, layers, context) for layers in pairs]
    kinds = {config.layer_types[i] for i in range(config.first_shared_layer, config.num_hidden_layers)}
    producers = {kind: _producer(config, kind, pairs) for kind in CACHE_NAMES if kind in kinds}
    return ChunkPlan(config, context, chunks, producers)


def plan_json(plan: ChunkPlan, compute: str, bundles: Sequence[str]) -> dict[str, Any]:
    """The plan as a host reads it, see the module; `bundles` names the folder of each chunk, relative to the plan."""
    core = hostcache_core(plan.config, plan.context, compute)["main"].inputs
    caches = [f"{name}_{part}" for name in CACHE_NAMES.values() for part in "kv"]
    return {
        "format": FORMAT,
        "context": plan.context,
        "masked": MASKED,
        "caches": {name: _tensor(core[name]) for name in caches},
        "chunks": [
            _chunk_json(plan, number, compute) | {"bundle": bundle}
            for number, bundle in zip(range(len(plan.chunks)), bundles, strict=True)
        ],
    }


def _chunk(config: TextConfig, layers: Range, context: int) -> Chunk:
    spec = ane_chunk(config, context, "fp16", layers=layers)["main"]
    slots = {kind: owned_slots(config, kind, layers) for kind in CACHE_NAMES}
    borrowed = [kind for kind in CACHE_NAMES if borrows(config, kind, layers)]
    return Chunk(layers, slots, borrowed, list(spec.inputs), list(spec.outputs))


def _producer(config: TextConfig, kind: str, ranges: list[Range]) -> Producer:
    slot, layer = len(config.slots(kind)) - 1, config.slots(kind)[-1]
    chunk = next(number for number, (first, last) in enumerate(ranges) if first <= layer < last)
    return Producer(layer, slot, chunk, owned_slots(config, kind, ranges[chunk]).index(slot))


def _chunk_json(plan: ChunkPlan, number: int, compute: str) -> dict[str, Any]:
    chunk = plan.chunks[number]
    spec: FunctionSpec = ane_chunk(plan.config, plan.context, compute, layers=chunk.layers)["main"]
    return {
        "function": "main",
        "layers": list(chunk.layers),
        "inputs": {
            name: _tensor(tensor) | {"source": _source(plan, number, name)}
            for name, tensor in spec.inputs.items()
        },
        "outputs": {
            name: _tensor(tensor) | {"target": _target(chunk, name)} for name, tensor in spec.outputs.items()
        },
    }


def _source(plan: ChunkPlan, number: int, name: str) -> dict[str, Any]:
    chunk = plan.chunks[number]
    if name == "hidden_in":
        return {"kind": "hidden", "chunk": number - 1} if number else {"kind": "inputs_embeds"}
    if name == "per_layer_inputs":
        return {"kind": name, "layers": list(chunk.layers)}
    if name == "position_ids":
        return {"kind": "position"}
    if name.startswith("causal_mask_"):
        whole = name == f"causal_mask_{CACHE_NAMES[FULL]}"
        return {"kind": "mask", "window": None if whole else plan.config.sliding_window}
    kind = next(kind for kind, prefix in CACHE_NAMES.items() if f"{prefix}_" in name)
    cache = f"{CACHE_NAMES[kind]}_{name[-1]}"
    if name == cache:
        return {"kind": "cache", "cache": cache, "slots": chunk.slots[kind]}
    producer = plan.producers[kind]
    return {
        "kind": "producer",
        "cache": cache,
        "slot": producer.slot,
        "chunk": producer.chunk,
        "output": f"{cache}_cur",
        "index": producer.index,
    }


def _target(chunk: Chunk, name: str) -> dict[str, Any]:
    if name == "hidden":
        return {"kind": "hidden"}
    cache = name.removesuffix("_cur")
    kind = next(kind for kind, prefix in CACHE_NAMES.items() if cache.startswith(f"{prefix}_"))
    return {"kind": "cache", "cache": cache, "slots": chunk.slots[kind]}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def _pair(entry: Sequence[int]) -> Range:
    if len(entry) != 2 or not all(isinstance(end, int) for end in entry) or not 0 <= entry[0] < entry[1]:
        raise UserError(f"{list(entry)} is no range [first, last) of layers: first is included, last is not")
    return entry[0], entry[1]


def _check_producers(config: TextConfig, ranges: list[Range]) -> None:
    """Whoever reads the K/V of another layer runs in its chunk or after it."""
    made: set[int] = set()
    for number, (first, last) in enumerate(ranges, 1):
        layers = range(first, min(last, config.num_hidden_layers))
        made |= {*layers}
        if missing := sorted({config.producer(layer) for layer in layers} - made):
            raise UserError(
                f"chunk {number} (layers [{first}, {last})) reads the K/V that layer {missing[0]} makes, but neither "
                "it nor a chunk before it has that layer"
            )


def _check_cover(config: TextConfig, ranges: list[Range]) -> None:
    """The ranges are 0 to the last layer, in order, each layer once."""
    ends = [(0, 0), *ranges, (config.num_hidden_layers,) * 2]
    for (_, end), (start, _) in pairwise(ends):
        if start > end:
            raise UserError(
                f"layers [{end}, {start}) are in no chunk: the chunks must be all layers in order"
            )
        if start < end:
            raise UserError(
                f"a chunk starts at layer {start} though the one before it ends with {end - 1}"
                if (start, start) != ends[-1]
                else f"a chunk ends with layer {end - 1}, but the model's last layer is {start - 1}"
            )
