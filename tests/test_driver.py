"""The host loop's own arithmetic: embeddings from raw tables, and the token that each kind of head chooses."""

import shutil

import numpy as np
import pytest

from workflow_scripts.configuration.data import DRIVERS
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.release import driver
from workflow_scripts.release.driver import TablesFrontEnd, chosen_id
from workflow_scripts.release.plan import Plan
from workflow_scripts.tables.raw import RawTables

IDS = (0, 2, 106, 700)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tables_give_a_core_what_it_takes(tiny_tables, dtype):
    """In the core's shapes and type, rounded once: the projection reads the embedding before it is rounded."""
    tables = RawTables.open(tiny_tables)
    front = TablesFrontEnd(tables, dtype)
    embeds = tables.embed(np.array(IDS))
    exact = {"inputs_embeds": embeds, "per_layer_inputs": tables.per_layer_inputs(np.array(IDS), embeds)}
    for row, token in enumerate(IDS):
        given = front.embed(token)
        assert given.keys() == exact.keys()
        for name, value in given.items():
            assert (value.dtype, value.shape) == (dtype, (1, 1, *exact[name].shape[1:]))
            # One token at a time, BLAS may sum in another order than for all.
            near = np.float32(1e-5) if dtype == "float32" else np.finfo(dtype).eps
            np.testing.assert_allclose(value[0, 0], exact[name][row], rtol=near, atol=1e-5)


def tiles(scores):
    """Partial maxima per tile of 8, as a head with a kernel gives them."""
    rows = np.reshape(scores, (-1, 8))
    places = rows.argmax(axis=1)
    return {"partial_values": rows.max(axis=1), "partial_indices": places + 8 * np.arange(len(rows))}


@pytest.mark.parametrize("best", [[0], [31], [7, 8], [9, 17, 30], list(range(32))])
def test_every_kind_of_head_chooses_the_lowest_of_the_best(best):
    scores = np.full(32, -1, np.float32)
    scores[best] = 0.5
    assert chosen_id({"logits": scores[None, None]}) == best[0]
    assert chosen_id(tiles(scores)) == best[0]
    assert chosen_id({"token_id": np.array([[best[0]]], np.int32)}) == best[0]


def test_every_driver_of_the_configuration_has_its_host_loop():
    assert driver._OPENERS.keys() == DRIVERS.keys()


@pytest.mark.parametrize("kind", DRIVERS)
def test_no_driver_runs_a_bundle_with_tables_of_another_checkpoint(kind, tiny_tables, tmp_path):
    """Any bundle of the set; it is told before gigabytes are loaded."""
    shutil.copytree(tiny_tables, tmp_path / "tables")
    checkpoint = RawTables.open(tiny_tables).meta.checkpoint
    for name, made_from in (("core", checkpoint), ("head", "cd" * 32)):
        said = {"creatorDefinedMetadata": {"checkpoint": made_from}}
        write_json(tmp_path / f"{name}.aimodel" / "metadata.json", said)
    bundles = {"core": "core.aimodel", "head": "head.aimodel"}
    Plan(kind, bundles, ["tables"], "tables", 64, [1], {}).write(tmp_path)
    message = f"head.aimodel is of checkpoint cdcdcd.*its tables are of {checkpoint[:12]}"
    with pytest.raises(UserError, match=message), driver.open_set(tmp_path):
        pass
