"""Stage `package`: one release folder from its bundles, tables and the checkpoint's tokenizer files."""

from typing import Any

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.model.chunks import chunk_plan, plan_json
from workflow_scripts.release import language, package
from workflow_scripts.release.names import CHUNKS_PLAN
from workflow_scripts.release.plan import Plan, beside, host_text
from workflow_scripts.release.tokenizer import check_vocabulary
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill the folder.

    Inputs `bundle_<role>`, `tables_<n>` (n counts from 0), `beside_<n>` (the tables of `tables_in`, which are not
    placed) and `checkpoint`. Parameters `bundles` (role ->
    published name), `tables` (published names), `tables_in` (null, or another folder of the release as `folder` and
    the `tables` in it that the host is to read), `tokenizer`, `driver` (null: no plan is written), `context`,
    `chunks` (null, or of a decoder in chunks their published names as `bundles`, their `layers` and `compute`), and
    `language` (null, or of a whole decoder, whose role is `decoder`, what a language bundle says of it: `functions`,
    `max_context_length`, `compression`; and where its kv_cache grows, the `cache_minimum` of the plan).
    """
    driver, with_tokenizer = job.params["driver"], job.params["tokenizer"]
    if driver and not with_tokenizer:
        raise UserError(f"folder {job.params['folder']}: a folder with a driver needs `tokenizer: true`")
    if (driver == "decode") != bool(job.params["language"]):
        raise UserError(
            f"folder {job.params['folder']}: `language` goes with the driver decode, and only with it"
        )
    origin = package.Origin.of(job.inputs["checkpoint"], job.digests["checkpoint"])
    package.place_items(_items(job), origin, job.out)
    if not with_tokenizer:
        return
    config = package.read_text_config(job.inputs["checkpoint"])
    tokenizer = package.place_tokenizer(job.inputs["checkpoint"] / "source", job.out)
    check_vocabulary(tokenizer, config)
    stops = list(tokenizer.stop_token_ids)
    if driver:
        _plan(job, config, stops).write(job.out)
    if job.params["chunks"]:
        write_json(job.out / CHUNKS_PLAN, _chunks(job, config))
    if job.params["language"]:
        language.write(job.out, _description(job, config, stops))


def _plan(job: Job, config: TextConfig, stops: list[int]) -> Plan:
    """What a host needs to know."""
    return Plan(
        driver=job.params["driver"],
        bundles=job.params["bundles"],
        tables=job.params["tables"] + _tables_elsewhere(job),
        tokenizer=package.TOKENIZER,
        context=job.params["context"],
        stop_token_ids=stops,
        text=host_text(config),
        cache_minimum=(job.params["language"] or {}).get("cache_minimum"),
    )


def _description(job: Job, config: TextConfig, stops: list[int]) -> dict[str, Any]:
    """What a language bundle says of itself."""
    decoder, source = job.params["bundles"]["decoder"], package.read_source(job.inputs["checkpoint"])
    return language.describe(decoder, config, source, job.params["language"], stops)


def _chunks(job: Job, config: TextConfig) -> dict[str, Any]:
    """The plan of a decoder in chunks."""
    chunks = job.params["chunks"]
    plan = chunk_plan(config, chunks["layers"], job.params["context"])
    return plan_json(plan, chunks["compute"], chunks["bundles"])


def _tables_elsewhere(job: Job) -> list[str]:
    """The tables of another folder as the plan names them."""
    other = job.params["tables_in"]
    return [beside(job.params["folder"], other["folder"], name) for name in other["tables"]] if other else []


def _items(job: Job) -> list[package.Item]:
    """The results to place; inputs and published names must answer each other."""
    names = {f"bundle_{role}": name for role, name in job.params["bundles"].items()}
    names |= {f"tables_{index}": name for index, name in enumerate(job.params["tables"])}
    beside = (job.params["tables_in"] or {}).get("tables", [])
    read = {"checkpoint", *(f"beside_{index}" for index in range(len(beside)))}
    unequal = sorted((names.keys() | read) ^ job.inputs.keys())
    if unequal:
        raise UserError(
            f"folder {job.params['folder']}: {', '.join(unequal)} must be both an input and a name in the parameters"
        )
    return [package.Item(name, job.inputs[source]) for source, name in sorted(names.items())]
