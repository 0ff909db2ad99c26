"""Gate `numbers` over token decoders: logits of every position against the recipe's model fed by the same raw tables.

In float32 they are equal but for the order of sums; in float16 within what its roundings cost, see `bounds`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from workflow_scripts.coreai.isolated import Arrays, isolated
from workflow_scripts.coreai.pairing import refuse_other_tables
from workflow_scripts.gates import bounds, state_runs
from workflow_scripts.gates.numbers import Evidence, check_evidence, compare, compare_choice
from workflow_scripts.gates.state_numbers import check_beyond_the_window
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import conversation_positions
from workflow_scripts.quantize.weights import Weights, expanded_blocks
from workflow_scripts.tables.open import open_tables


@dataclass(frozen=True)
class DecodeEvidence:
    """What a token decoder is compared with: oracle, weights and result of stage `decode_reference`; and its tables."""

    recipe: Evidence
    tables: Path

    @classmethod
    def open(cls, inputs: Mapping[str, Path]) -> Self:
        """Inputs `oracle`, `weights`, `reference` and `tables` of a stage; raises what `Evidence.open` does."""
        return cls(Evidence.open(inputs), inputs["tables"])


def check_decode_evidence(verdict: Verdict, evidence: DecodeEvidence) -> bool:
    """As `check_evidence`, and are the tables those of the reference, and of the same checkpoint?"""
    tables = open_tables(evidence.tables)
    record = json.loads((evidence.recipe.reference / "reference.json").read_text(encoding="utf-8"))
    pairs = {
        "checkpoint of the tables": (evidence.recipe.weights.checkpoint_digest, tables.meta.checkpoint),
        "tables of the reference": (tables.FORMAT, record.get("tables", "none")),
    }
    for name, (expected, found) in pairs.items():
        verdict.check(name, expected == found, expected[:16], found[:16])
    agree = all(expected == found for expected, found in pairs.values())
    return check_evidence(verdict, evidence.recipe) and agree


def gate_decoder(verdict: Verdict, bundle: Path, evidence: DecodeEvidence, params: dict[str, Any]) -> None:
    """Every dialogue with numbers, as far as the caches go, token by token.

    `params` are form, compute, context, and cache_minimum, or capacities of `decode_ring`, each of which must have run.
    """
    recipe, form, compute, context = evidence.recipe, params["form"], params["compute"], params["context"]
    config, exact = recipe.weights.config, recipe.hidden()
    refuse_other_tables(bundle, open_tables(evidence.tables))
    ids = {
        name: recipe.oracle.dialogues[name].fed_ids[: conversation_positions(form, context)] for name in exact
    }
    for name, tokens in ids.items():
        text = f"{len(tokens)} of {len(exact[name])}"
        verdict.check(f"{name}: positions compared", bool(tokens), "at least 1", text)
    found = _run(bundle, evidence.tables, ids, form, params)
    if form == "decode_ring":
        check_beyond_the_window(verdict, config, map(len, ids.values()))
        for name in ids:
            ran = sorted({*found[f"{name}.capacities"].tolist()})
            wanted = list(params["capacities"])
            verdict.check(f"{name}: capacities that ran", ran == wanted, str(wanted), str(ran))
    norm = largest_head_norm(recipe.weights) if compute == "fp16" else 0.0
    with np.load(recipe.arrays) as arrays:
        for name, tokens in ids.items():
            expected, bound = arrays[f"{name}.logits"][: len(tokens)], bounds.FP32_LOGITS
            if compute == "fp16":
                error = bounds.decode_error(config, len(tokens))
                bound = bounds.logit_bound(error, exact[name][: len(tokens)], norm)
                bound += bounds.FP16_ROUNDOFF * config.final_logit_softcapping
            compare(verdict, f"{name}: logits against the decode reference", found[name], expected, bound)
            compare_choice(
                verdict, recipe.oracle.dialogues[name], found[name].argmax(axis=1), expected, bound
            )


def _run(bundle: Path, tables: Path, ids: dict[str, list[int]], form: str, params: dict[str, Any]) -> Arrays:
    if form == "decode_ring":
        return isolated(state_runs.run_ring_decoder, bundle=str(bundle), tables=str(tables), ids=ids)
    return isolated(
        state_runs.run_decoder,
        bundle=str(bundle),
        tables=str(tables),
        ids=ids,
        form=form,
        context=params["context"],
        columns=params["cache_minimum"],
    )


def largest_head_norm(weights: Weights) -> float:
    """The largest norm of a row of the head, block by block."""
    return max(map(bounds.largest_norm, expanded_blocks(weights.linear(HEAD_WEIGHT))))
