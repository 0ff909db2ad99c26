"""Gate over a decoder in chunks: every chunk by itself against the decoder in one graph, and the chain by its plan.

A chunk is fed what the reference's layers before it give, so that its figures are its own and a fault is named with
its chunk. The chain is fed only what a host has; it finds what is wrong between the chunks: plan, masks, caches.
Both run the real bundles through the host of `coreai/chunk_host.py`.

A row's error is its largest difference in units of the row's root mean square. Its bound is six standard deviations of
a random error: every operator rounds what it gives (`_ROUNDINGS` in a layer, relative error u with variance u^2/3),
every branch is normed before it is added, so that it passes on its relative error and the residual collects them in
quadrature. A sum of K products in an accumulator of the compute type adds u * sqrt(K/6) (see `bounds`): in float32 of
every product, in float16 of attention's two alone, since the Linux runtime sums convolutions wide (measured). An
error of a score is a relative error of its softmax weight; a score of normed rows with the weights w and v of their
norms has errors of the size rms(w) * rms(v) * sqrt(head_dim), times those of its products and of its sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.checkpoint.text_config import SLIDING, TextConfig
from workflow_scripts.coreai.chunk_bundles import open_chunks
from workflow_scripts.coreai.chunk_host import Arrays, ChunkHost
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.coreai.runtime import Bundle, open_bundle
from workflow_scripts.gates.numbers import Evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.chunks import ChunkPlan, chunk_plan, plan_json
from workflow_scripts.model.signature import CACHE_NAMES
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights

_SIGMAS = 6.0
_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11}
# Norms: division, norm, weight, seven of them; q, k, v, o, gate, up, down and two of the per-layer embedding; rotations
# of q and k: two products and a sum; exponential, division; two activations and two products with them; three sums with
# the residual, and the scalar.
_ROUNDINGS = 7 * 3 + 9 + 2 * 3 + 2 + 4 + 4
# Of q and of k: projection, norm and rotation; and of the score itself.
_SCORE_ROUNDINGS = 2 * (1 + 3 + 3) + 1


@dataclass(frozen=True)
class ChunkEvidence:
    """What chunks are compared with: their plan, and the evidence of their recipe."""

    plan: ChunkPlan
    recipe: Evidence

    @property
    def weights(self) -> Weights:
        """The recipe's weights."""
        return self.recipe.weights

    @property
    def arrays(self) -> Path:
        """The reference's arrays (.npz)."""
        return self.recipe.arrays

    @property
    def dialogues(self) -> list[str]:
        """Names of the dialogues that the reference has."""
        return [dialogue.name for dialogue in self.recipe.oracle.with_numbers()]

    @property
    def owners(self) -> dict[str, list[str]]:
        """Cache -> for each of its slots the reference's array."""
        config = self.plan.config
        return {
            f"{name}_{part[0]}": [f"{part}.{layer}" for layer in config.slots(kind)]
            for kind, name in CACHE_NAMES.items()
            for part in ("key", "value")
        }


def plan_around(config: TextConfig, layers: Sequence[int], context: int) -> tuple[ChunkPlan, int]:
    """A plan in which layers [first, last) are one chunk, and the chunk's number in it.

    What is before and behind them is one chunk each: a chunk is judged by itself, whatever the others of its set are.
    """
    first, last = layers
    ranges = [(0, first), (first, last), (last, config.num_hidden_layers)]
    plan = chunk_plan(config, [entry for entry in ranges if entry[0] < entry[1]], context)
    return plan, int(first > 0)


def gate_plan(verdict: Verdict, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The packaged plan is the one that the configuration and the checkpoint give; names the first difference."""
    place = _difference(found, expected)
    verdict.check(
        "plan of the chunks", place is None, "as derived", f"another at {place}" if place else "as derived"
    )


def _difference(found: Any, expected: Any, path: str = "its top") -> str | None:
    """Where two JSON values differ first."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(found[key], expected[key], key) for key in expected]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(*pair, str(index)) for index, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return None if found == expected else path
    top = path == "its top"
    places = (_difference(a, b, key if top else f"{path}.{key}") for a, b, key in pairs)
    return next(filter(None, places), None)


def gate_chunk(verdict: Verdict, bundle: Path, evidence: ChunkEvidence, number: int, compute: str) -> None:
    """Everything that chunk `number` gives, at every position of every dialogue that fits into its context."""
    plan = plan_json(evidence.plan, compute, [""] * len(evidence.plan.chunks))
    found = isolated(
        run_chunk,
        bundle=str(bundle),
        arrays=str(evidence.arrays),
        dialogues=evidence.dialogues,
        plan=plan,
        owners=evidence.owners,
        number=number,
    )
    bound = row_bound(evidence, evidence.plan.chunks[number].layers, compute)
    with np.load(evidence.arrays) as reference:
        given = dict(reference)
    for dialogue in evidence.dialogues:
        count = len(found[f"{dialogue}.hidden"])
        expected = [
            _reference_outputs(given, dialogue, plan, evidence.owners, number, position)
            for position in range(count)
        ]
        for output in plan["chunks"][number]["outputs"]:
            rows = np.stack([outputs[output] for outputs in expected])
            compare_rows(verdict, f"{dialogue}: {output}", found[f"{dialogue}.{output}"], rows, bound)


def gate_chain(verdict: Verdict, plan_path: Path, evidence: ChunkEvidence, compute: str) -> None:
    """The hidden state that the chunks beside a plan give, driven by that plan alone."""
    found = isolated(
        run_chain, plan_path=str(plan_path), arrays=str(evidence.arrays), dialogues=evidence.dialogues
    )
    bound = row_bound(evidence, (0, evidence.plan.config.num_hidden_layers), compute)
    with np.load(evidence.arrays) as arrays:
        for dialogue in evidence.dialogues:
            rows = found[dialogue]
            expected = arrays[f"{dialogue}.hidden"][: len(rows)]
            compare_rows(verdict, f"{dialogue}: hidden state of the chain", rows, expected, bound)


def compare_rows(verdict: Verdict, name: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Check the largest error of any row [n, ..., size], see the module; NaN fails, and so does no row at all."""
    if found.shape != expected.shape or not len(found):
        verdict.check(name, False, f"shape {expected.shape}", f"shape {found.shape}")
        return
    difference = np.abs(found.astype(np.float64) - expected).max(-1)
    error = difference / np.sqrt((expected.astype(np.float64) ** 2).mean(-1))
    verdict.by_position(name, error.reshape(len(error), -1).max(axis=1))
    worst = np.unravel_index(np.argmax(error), error.shape)  # argmax finds NaN too
    verdict.at_most(name, float(error[worst]), bound, f"position {worst[0]}")


def row_bound(evidence: ChunkEvidence, layers: tuple[int, int], compute: str) -> float:
    """Bound of a row's error after layers [first, last), see the module."""
    total = sum(_layer_variance(evidence, layer, compute) for layer in range(*layers))
    # Two significant digits: the bound is part of the release and must not carry a host's last bits.
    return float(f"{_SIGMAS * _ROUNDOFF[compute] * total**0.5:.2g}")


def _layer_variance(evidence: ChunkEvidence, layer: int, compute: str) -> float:
    """The variance of a layer's relative error in units of u^2."""
    config, vector = evidence.plan.config, evidence.weights.vector
    head_dim = config.layer_head_dim(layer)
    norms = (f"layers.{layer}.self_attn.q_norm", f"layers.{config.producer(layer)}.self_attn.k_norm")
    score = head_dim * np.prod([(vector(f"{name}.weight").astype(np.float64) ** 2).mean() for name in norms])
    columns = evidence.plan.context
    if config.layer_types[layer] == SLIDING:
        columns = min(columns, config.sliding_window)
    products = [
        *[config.hidden_size] * 6,
        config.num_attention_heads * head_dim,
        config.layer_intermediate_size(layer),
        config.hidden_size_per_layer_input,
    ]
    sums = sum(products) / 6 if compute == "fp32" else 0.0
    attention = score * (_SCORE_ROUNDINGS / 3 + head_dim / 6) + columns / 6
    return float(_ROUNDINGS / 3 + sums + attention)


def run_chunk(
    bundle: str,
    arrays: str,
    dialogues: list[str],
    plan: dict[str, Any],
    owners: dict[str, list[str]],
    number: int,
) -> Arrays:
    """A real chunk in a host whose other chunks are the reference (for `isolated`): `dialogue.output` -> rows."""
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as loaded:
        given = dict(reference)
        return {
            f"{dialogue}.{name}": values
            for dialogue in dialogues
            for name, values in _watch(loaded, given, dialogue, plan, owners, number).items()
        }


def _watch(
    loaded: Bundle,
    given: Arrays,
    dialogue: str,
    plan: dict[str, Any],
    owners: dict[str, list[str]],
    number: int,
) -> Arrays:
    """What chunk `number` gives at each position: output -> rows [n, ...] float32."""
    seen: list[Arrays] = []

    def call(chunk: int, inputs: Arrays) -> Arrays:
        if chunk == number:
            seen.append(loaded.call("main", inputs))
        return _reference_outputs(given, dialogue, plan, owners, chunk, host.position)

    host = ChunkHost(plan, call)
    for front in _fronts(given, dialogue, plan["context"]):
        host.step(*front)
    return {name: np.stack([outputs[name] for outputs in seen]).astype(np.float32) for name in seen[0]}


def run_chain(plan_path: str, arrays: str, dialogues: list[str]) -> Arrays:
    """The real chunks beside a plan, driven by it (for `isolated`): dialogue -> hidden rows [n, hidden] float32."""
    with np.load(arrays) as reference, open_chunks(Path(plan_path)) as (plan, call):
        rows = {}
        for dialogue in dialogues:
            host = ChunkHost(plan, call)
            rows[dialogue] = np.stack(
                [host.step(*front)[0, 0] for front in _fronts(reference, dialogue, plan["context"])]
            ).astype(np.float32)
    return rows


def _fronts(
    arrays: Mapping[str, np.ndarray], dialogue: str, context: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Embedding and per-layer inputs of each position, as far as the context goes."""
    embeds, per_layer = arrays[f"{dialogue}.embeds"], arrays[f"{dialogue}.ple"]
    count = min(context, len(embeds))
    for position in track(range(count), dialogue, count):
        here = slice(position, position + 1)
        yield embeds[None, here], per_layer[None, here]


def _reference_outputs(
    arrays: Mapping[str, np.ndarray],
    dialogue: str,
    plan: Mapping[str, Any],
    owners: Mapping[str, list[str]],
    number: int,
    position: int,
) -> Arrays:
    """What the reference says that a chunk gives at a position, shaped as the chunk gives it."""
    chunk = plan["chunks"][number]
    ends = number == len(plan["chunks"]) - 1
    outputs = {}
    for name, tensor in chunk["outputs"].items():
        target = tensor["target"]
        if target["kind"] == "hidden":
            row = arrays[f"{dialogue}.{'hidden' if ends else 'residual.' + str(chunk['layers'][1])}"][
                position
            ]
        else:
            slots = [owners[target["cache"]][slot] for slot in target["slots"]]
            row = np.stack([arrays[f"{dialogue}.{slot}"][position] for slot in slots])
        outputs[name] = row.reshape(tensor["shape"])
    return outputs
