"""Runs of bundles whose kv_cache is a state, one function each; they are called through `isolated`, as `runs` are."""

from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.coreai.decode_host import (
    BlendHost,
    CoreHost,
    DecodeHost,
    RingHost,
    token_rows,
    whole_table,
)
from workflow_scripts.coreai.isolated import Arrays
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.progress import track
from workflow_scripts.tables.open import open_tables


def run_state_core(bundle: str, arrays: str, ways: dict[str, dict[str, dict[str, Any]]]) -> Arrays:
    """Feed each dialogue's exact embeddings in several ways: `DIALOGUE, WAY` -> hidden [n, H] float32.

    A way has the number of `columns` of the caches, and the `calls`: a function and a number of positions each.
    """
    found = {}
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as core:
        for dialogue, of_dialogue in ways.items():
            embeds, per_layer = reference[f"{dialogue}.embeds"], reference[f"{dialogue}.ple"]
            for way, plan in of_dialogue.items():
                host = CoreHost(core, plan["columns"])
                feed = {"main": host.run, "step": host.step}
                rows, start = [], 0
                for function, length in track(plan["calls"], f"{dialogue}, {way}", len(plan["calls"])):
                    here = slice(start, start + length)
                    rows.append(feed[function](embeds[here], per_layer[here]))
                    start += length
                found[f"{dialogue}, {way}"] = np.concatenate(rows)
    return found


def run_blend_core(bundle: str, arrays: str, counts: dict[str, int], sliding_window: int, way: str) -> Arrays:
    """Feed the first positions of each dialogue one by one: `DIALOGUE, WAY` -> hidden [n, H] float32."""
    found = {}
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as core:
        for dialogue, count in counts.items():
            embeds, per_layer = reference[f"{dialogue}.embeds"], reference[f"{dialogue}.ple"]
            host = BlendHost(core, sliding_window)
            rows = [
                host.run(embeds[position : position + 1], per_layer[position : position + 1])
                for position in track(range(count), dialogue, count)
            ]
            found[f"{dialogue}, {way}"] = np.concatenate(rows)
    return found


def run_decoder(
    bundle: str, tables: str, ids: dict[str, list[int]], form: str, context: int, columns: int
) -> Arrays:
    """Feed token ids one by one to `decode` or `decode_tbl`, whose caches have `columns` at first.

    Returns dialogue -> logits [n, V] float32.
    """
    with open_bundle(Path(bundle)) as decoder:
        inputs = {"decode": token_rows, "decode_tbl": whole_table}[form](decoder, open_tables(Path(tables)))
        found = {}
        for dialogue, tokens in ids.items():
            host = DecodeHost(decoder, inputs, context, columns)
            found[dialogue] = np.stack([host.step(token) for token in track(tokens, dialogue, len(tokens))])
    return found


def run_ring_decoder(bundle: str, tables: str, ids: dict[str, list[int]]) -> Arrays:
    """Feed token ids one by one to `decode_ring`: dialogue -> logits [n, V] float32.

    Each conversation starts in the smallest capacity, and changes over early enough to see all of them, each for about
    as many positions. `DIALOGUE.capacities` has the capacity that each position ran in.
    """
    found = {}
    with open_bundle(Path(bundle)) as decoder:
        inputs = whole_table(decoder, open_tables(Path(tables)))
        for dialogue, tokens in ids.items():
            host, logits, ran = RingHost(decoder, inputs), [], []
            for position, token in enumerate(track(tokens, dialogue, len(tokens))):
                turn = position * len(host.capacities) // len(tokens)
                while host.states.columns < host.capacities[turn]:
                    host.change_over()
                logits.append(host.step(token))
                ran.append(host.states.columns)
            found |= {dialogue: np.stack(logits), f"{dialogue}.capacities": np.array(ran)}
    return found
