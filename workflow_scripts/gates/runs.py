"""Runs of finished bundles, one function each; they are called through `isolated`, in a child process.

Arguments are JSON values; arrays come from an .npz file by key and go back as a dict of arrays.
"""

from pathlib import Path

import numpy as np

from workflow_scripts.coreai.host_cache import HostCache
from workflow_scripts.coreai.runtime import Bundle, open_bundle
from workflow_scripts.progress import track


def describe(bundle: str) -> dict[str, np.ndarray]:
    """Every tensor of the functions: `function/input|output|state/index/name/dtype` -> shape, -1 being any length."""
    found = {}
    with open_bundle(Path(bundle)) as loaded:
        for function in loaded.functions:
            spec = loaded.spec(function)
            sides = (("input", spec.inputs), ("output", spec.outputs), ("state", spec.states))
            for side, tensors in sides:
                for index, (name, tensor) in enumerate(tensors.items()):
                    found[f"{function}/{side}/{index}/{name}/{tensor.dtype}"] = np.array(tensor.shape)
    return found


def run_core(bundle: str, arrays: str, dialogues: list[str], sliding_window: int) -> dict[str, np.ndarray]:
    """Feed each dialogue's exact embeddings one position at a time; returns hidden [n, H] float32 per dialogue."""
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as core:
        return {
            name: _hidden_rows(
                core, reference[f"{name}.embeds"], reference[f"{name}.ple"], name, sliding_window
            )
            for name in dialogues
        }


def _hidden_rows(
    core: Bundle, embeds: np.ndarray, per_layer: np.ndarray, name: str, sliding_window: int
) -> np.ndarray:
    spec = core.spec("main")
    dtype = spec.inputs["inputs_embeds"].dtype
    cache, rows = HostCache(spec, sliding_window), []
    for position in track(range(len(embeds)), name, len(embeds)):
        here = slice(position, position + 1)
        front = {
            "inputs_embeds": embeds[None, here].astype(dtype),
            "per_layer_inputs": per_layer[None, here].astype(dtype),
        }
        outputs = core.call("main", front | cache.inputs())
        cache.store(outputs)
        rows.append(outputs["hidden"][0, 0].astype(np.float32))
    return np.stack(rows)


def run_head(bundle: str, arrays: str, dialogues: list[str]) -> dict[str, np.ndarray]:
    """Feed each dialogue's reference hidden rows to a head; returns its output's rows per dialogue."""
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as head:
        (output,) = head.spec("main").outputs
        return {
            name: np.stack(
                [
                    head.call("main", {"hidden": row[None, None]})[output][0, 0]
                    for row in reference[f"{name}.hidden"]
                ]
            )
            for name in dialogues
        }


def run_partial_head(bundle: str, arrays: str, dialogues: list[str]) -> dict[str, np.ndarray]:
    """As `run_head` for a head of partial maxima, hidden rows rounded to its input's type.

    Per dialogue: `NAME.values` float32 and `NAME.indices` int32, both [n, tiles].
    """
    found = {}
    with np.load(arrays) as reference, open_bundle(Path(bundle)) as head:
        dtype = head.spec("main").inputs["hidden"].dtype
        for name in dialogues:
            rows = reference[f"{name}.hidden"].astype(dtype)
            outputs = [head.call("main", {"hidden": row[None, None]}) for row in track(rows, name, len(rows))]
            for kind in ("values", "indices"):
                found[f"{name}.{kind}"] = np.stack([output[f"partial_{kind}"] for output in outputs])
    return found


def run_frontend(bundle: str, ids: list[int]) -> dict[str, np.ndarray]:
    """Feed token ids to a front end; returns inputs_embeds [n, H] and per_layer_inputs [n, L, P] float32."""
    embeds, per_layer = [], []
    with open_bundle(Path(bundle)) as frontend:
        for token in ids:
            token_id = np.array([[token]], np.int32)
            embed = frontend.call("gather_embeds", {"input_ids": token_id})["inputs_embeds"]
            inputs = {"input_ids": token_id, "inputs_embeds": embed}
            embeds.append(embed[0, 0].astype(np.float32))
            per_layer.append(
                frontend.call("gather_per_layer", inputs)["per_layer_inputs"][0, 0].astype(np.float32)
            )
    return {"inputs_embeds": np.stack(embeds), "per_layer_inputs": np.stack(per_layer)}
