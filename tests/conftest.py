"""Shared fixtures: the embedded checkpoint as a result of stage `checkpoint`, and its weights per recipe."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# Child processes of the package (stages, isolated runs) find it from any working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# The same examples in every run; no deadline, since a busy machine takes its time.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

TINY = ROOT / "resources" / "gemma-4-tiny"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with whole runs first: begun last, they would keep one worker busy while the others wait."""
    files = {item.path for item in items if item.get_closest_marker("end_to_end")}
    items.sort(key=lambda item: item.path not in files)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may read everything: become somebody else for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture(scope="session", autouse=True)
def no_store():
    """No test reads or fills the user's own store; the tests of the store name folders of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMA4_STORE", "off")
        patch.delenv("GEMMA4_STORE_SHARED", raising=False)
        yield


@pytest.fixture(scope="session")
def run_stage(tmp_path_factory):
    """Run a stage in this process; returns the result folder. What another worker has made comes from their store.

    A stage that a test has changed in memory needs an artifact name of its own: the key knows of files only.
    """
    from workflow_scripts import manifest
    from workflow_scripts.stages import runner
    from workflow_scripts.store.levels import Store
    from workflow_scripts.store.local import LocalStore

    home = tmp_path_factory.mktemp("results")
    workers_home = home.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else home.parent
    store = Store(LocalStore(workers_home / "store"), None)

    def run(stage, artifact, inputs, **params):
        output = home / stage / f"{artifact}{manifest.SUFFIX}"
        runner.execute(stage, inputs, params, output, store)
        return manifest.tree_path(output)

    return run


@pytest.fixture(scope="session")
def tiny_checkpoint(run_stage):
    """The checked embedded checkpoint (a result folder)."""
    return run_stage(
        "checkpoint",
        "text",
        {"source": TINY},
        source=str(TINY),
        allow_moving_revision=False,
        sha256={},
        num_hidden_layers=10,
    )


@pytest.fixture(scope="session")
def tiny_weights(run_stage, tiny_checkpoint):
    """Recipe -> weights of the embedded checkpoint (result folders)."""
    from workflow_scripts.manifest import manifest_path

    inputs = {"checkpoint": manifest_path(tiny_checkpoint)}
    return {
        recipe: run_stage("weights", recipe, inputs, recipe=recipe)
        for recipe in ("fp32", "fp16", "int8-kmeans-g32")
    }


@pytest.fixture(scope="session")
def tiny_tables(run_stage, tiny_checkpoint):
    """Raw tables of the embedded checkpoint (a result folder)."""
    from workflow_scripts.manifest import manifest_path

    return run_stage("tables", "gemma4_gather_raw", {"checkpoint": manifest_path(tiny_checkpoint)})
