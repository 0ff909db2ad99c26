"""The host's side of a core: masks, columns and the end of the context, against the definition of attention."""

import numpy as np
import pytest

from workflow_scripts.coreai.host_cache import MASKED, HostCache
from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec, TensorSpec

CONTEXT, WINDOW = 6, 3


def core():
    mask = TensorSpec("float16", (1, 1, 1, CONTEXT + 1))
    cache = {
        name: TensorSpec("float16", (2, 1, 1, CONTEXT, 4))
        for name in ("sliding_k", "sliding_v", "full_k", "full_v")
    }
    return FunctionSpec({"causal_mask_full": mask, "causal_mask_sliding": mask, **cache}, {})


def outputs(value):
    return {
        f"{n}_cur": np.full((2, 1, 1, 1, 4), value, np.float16)
        for n in ("sliding_k", "sliding_v", "full_k", "full_v")
    }


@pytest.mark.parametrize("position", range(CONTEXT))
def test_masks_show_exactly_the_columns_of_the_definition(position):
    cache = HostCache(core(), WINDOW)
    for past in range(position):
        cache.store(outputs(past + 1))
    inputs = cache.inputs()
    for name, reach in (("causal_mask_full", CONTEXT + 1), ("causal_mask_sliding", WINDOW)):
        visible = [past for past in range(CONTEXT) if past < position and position - past < reach] + [CONTEXT]
        expected = np.full(CONTEXT + 1, MASKED, np.float16)
        expected[visible] = 0
        np.testing.assert_array_equal(inputs[name][0, 0, 0], expected)
    assert inputs["position_ids"].tolist() == [[position]] and inputs["position_ids"].dtype == np.int32


def test_the_current_column_is_written_at_its_position():
    cache = HostCache(core(), WINDOW)
    cache.store(outputs(5))
    cache.store(outputs(7))
    keys = cache.inputs()["sliding_k"]
    assert (keys[:, :, :, 0] == 5).all() and (keys[:, :, :, 1] == 7).all() and (keys[:, :, :, 2:] == 0).all()


def test_past_the_last_column_is_a_clear_error():
    cache = HostCache(core(), WINDOW)
    for _ in range(CONTEXT):
        cache.inputs()
        cache.store(outputs(1))
    with pytest.raises(UserError, match="longer than the 6 positions"):
        cache.inputs()
