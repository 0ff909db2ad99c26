# Shared by all rules: the checked config, names of results, and how a stage is called.
import json
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from snakemake.exceptions import WorkflowError

from workflow_scripts.checkpoint.needed import (
    LOCAL,
    REHEARSAL,
    TOKENIZER,
    local_inputs,
    planned_inputs,
)
from workflow_scripts.checkpoint.rehearsal_files import TOKENIZER_FILES
from workflow_scripts.closure import stage_host, stage_sources, stage_tools
from workflow_scripts.config import (
    DECODE_FORMS,
    GATES,
    KERNEL_BITS,
    STATE_CORES,
    TABLE_FORMS,
    load_config,
)
from workflow_scripts.coreai.aot_host import why_not_built
from workflow_scripts.coreml.installed import why_no_coremltools
from workflow_scripts.coreml.pruned_head import kept_ids
from workflow_scripts.errors import UserError
from workflow_scripts.job_environment import share_with_jobs, store_arguments
from workflow_scripts.manifest import forget_damaged
from workflow_scripts.model.signature import ring_function
from workflow_scripts.release.gate_results import not_run
from workflow_scripts.report.facts import Facts
from workflow_scripts.report.summary import summary

STARTED = time.time()
share_with_jobs(Path(workflow.basedir))

try:
    CONFIG = load_config(config)
    COMPILED = {bundle.folder: bundle for bundle in CONFIG.compiled()}
    NOT_BUILT = why_not_built(CONFIG.aot_mode) if COMPILED else None
except UserError as problem:
    raise WorkflowError(str(problem)) from None

RESULTS = f"results/{CONFIG.model}"
ARTIFACTS = {artifact.published: artifact for artifact in CONFIG.artifacts.values()}
BUNDLES = {name: artifact for name, artifact in ARTIFACTS.items() if artifact.is_bundle}

TABLES = next(
    (name for name, artifact in ARTIFACTS.items() if artifact.form == "raw_tables"),
    "none",  # then there is no front end, which alone is made of them
)
STAGE = (
    "python -m workflow_scripts stage {params.stage} --input {params.inputs:q} --params {params.json:q} "
    "--output {output:q} --log {log:q}"
) + store_arguments(CONFIG.store)


wildcard_constraints:
    bundle="|".join(map(re.escape, BUNDLES)) or "-",
    recipe="|".join(map(re.escape, CONFIG.recipes())) or "-",
    folder="|".join(map(re.escape, CONFIG.folders)),
    compiled="|".join(re.escape(bundle.result) for bundle in COMPILED.values()) or "-",
    compiled_folder="|".join(map(re.escape, COMPILED)) or "-",
    tables="|".join(
        re.escape(name)
        for name, artifact in ARTIFACTS.items()
        if artifact.form in TABLE_FORMS
    )
    or "-",


def result(stage, artifact=None):
    """Manifest of a result."""
    return (
        f"{RESULTS}/{stage}/{artifact}.manifest.json"
        if artifact
        else f"{RESULTS}/{stage}.manifest.json"
    )


def logs(stage, artifact):
    """Log file of a job."""
    return f"{RESULTS}/logs/{stage}/{artifact}.log"


def times(stage, artifact):
    """Benchmark file of a job."""
    return f"{RESULTS}/benchmarks/{stage}/{artifact}.tsv"


def code(stage):
    """Source files of a stage, so that an edit reruns the jobs that can feel it and no other."""
    return [os.path.relpath(path) for path in stage_sources(stage)]


def tools(stage):
    """What a stage's key holds of the installed tools and the host: another version reruns its jobs."""
    return stage_tools(stage) | stage_host(stage)


def named_inputs(wildcards, input):
    """The job's inputs as NAME=PATH, without the source files."""
    return [f"{name}={path}" for name, path in input.items() if name != "code"]


def to_json(**values):
    """Parameters of a stage on its command line."""
    return json.dumps(values, sort_keys=True, ensure_ascii=False)


def of_form(*forms):
    """Wildcard constraint: published names of the bundles of some graph forms."""
    return (
        "|".join(
            re.escape(name)
            for name, artifact in BUNDLES.items()
            if artifact.form in forms
        )
        or "-"
    )


def bundle_json(wildcards):
    """Parameters of the stages that make or judge one bundle."""
    artifact = BUNDLES[wildcards.bundle]
    own = {
        key: value
        for key in ("layers", "cache_minimum", "capacities")
        if (value := getattr(artifact, key))
    }
    return to_json(
        form=artifact.form,
        compute=artifact.compute,
        context=artifact.context,
        **own,
    )


def code_of(stage):
    """Source files of the stage that a function chooses by the wildcards."""
    return lambda wildcards: code(stage(wildcards))


def tools_of(stage):
    """Tools of the stage that a function chooses by the wildcards."""
    return lambda wildcards: tools(stage(wildcards))


def kernel_stage(wildcards):
    """The stage that exports a bundle with Metal kernels: one per kernel, so that an edit of one reruns no other."""
    artifact = BUNDLES[wildcards.bundle]
    part = {"hostcache_metal": "core", "head_argmax_metal": "head"}[artifact.form]
    return f"export_metal_{part}_int{KERNEL_BITS[artifact.recipe]}"


def form_stage(wildcards):
    """The stage that exports a bundle whose form has one to itself."""
    return f"export_{BUNDLES[wildcards.bundle].form}"


def structure_stage(wildcards):
    """The stage of gate `structure`: apart for each kind of authoring, so that an edit of one rejudges no other."""
    artifact = BUNDLES[wildcards.bundle]
    if artifact.form in (*DECODE_FORMS, *STATE_CORES):
        return "gate_structure_state"
    return "gate_structure_ane" if artifact.for_engine else "gate_structure"


def numbers_stage(wildcards):
    """The stage of gate `numbers`, likewise; the engine's head is judged as any that gives a token."""
    form = BUNDLES[wildcards.bundle].form
    if form in DECODE_FORMS:
        return "gate_numbers_decode"
    if form in STATE_CORES:
        return "gate_numbers_state"
    return "gate_numbers_ane" if form == "ane_chunk" else "gate_numbers"


def table_stage(prefix):
    """The stage of one kind over raw tables in their layout."""
    suffix = {"raw_tables": "", "raw_tables_int4": "_int4"}
    return lambda wildcards: prefix + suffix[ARTIFACTS[wildcards.tables].form]


def kernels_json(wildcards):
    """Parameters of the gate over a bundle's kernels."""
    artifact = BUNDLES[wildcards.bundle]
    return to_json(form=artifact.form, compute=artifact.compute)


def bundle_weights(wildcards):
    """The weights a bundle is made of."""
    return result("weights", BUNDLES[wildcards.bundle].recipe)


def bundle_sources(wildcards):
    """The weights a bundle is made of, and the raw tables if it is made of some."""
    artifact = BUNDLES[wildcards.bundle]
    sources = {}
    if artifact.recipe:
        sources["weights"] = result("weights", artifact.recipe)
    if artifact.tables:
        sources["tables"] = result("tables", published(artifact.tables))
    return sources or {"tables": result("tables", TABLES)}


def recipe_json(wildcards):
    """Parameters of the stages that make or judge one weight recipe."""
    return to_json(recipe=wildcards.recipe)


def is_small():
    """Whether the checkpoint is a local one below 1 GB; one that is not there yet counts as of real size."""
    if CONFIG.checkpoint.rehearsal:
        return False
    files = Path(CONFIG.checkpoint.source).glob("*.safetensors")
    return 0 < sum(path.stat().st_size for path in files if path.is_file()) < 1e9


SMALL = is_small()


def by_size(small, full):
    """What a job asks for, over a small checkpoint, or over one of real size (measured with E2B's shapes).

    `mem_mb` holds everywhere. `runtime` (minutes) and `disk_mb` (what it writes) are for schedulers of clusters:
    several times what was measured, since a job beyond its time is killed.
    """
    return small if SMALL else full


def runtime_memory(decoder):
    """Of a gate that runs a bundle in this host's runtime, whose files stay mapped, or a whole decoder.

    That one is given the per-layer table as an array of its own, 2.35 GB, and its 4-bit codes are expanded in 1.8 GB.
    """
    return by_size(1000, 5000 if decoder else 1000)


def numbers_memory(wildcards):
    """Megabytes of gate `numbers`."""
    return runtime_memory(BUNDLES[wildcards.bundle].form in DECODE_FORMS)


def folder_memory(wildcards):
    """Megabytes of a gate over a folder."""
    return runtime_memory(CONFIG.folders[wildcards.folder].decoder)


def quantizer_threads(wildcards):
    """All cores for a checkpoint of real size; a small one takes a second, and runs beside other jobs.

    A cluster's profile says how many (`set-threads`): there this host's cores mean nothing.
    No part of the key: the bytes are the same. Snakemake tells the job in OMP_NUM_THREADS.
    """
    return 1 if SMALL else own_cores()


def own_cores():
    """The cores of this host that the run may use; a cluster's run names none, and `workflow.cores` would refuse."""
    return workflow.resource_settings.cores or 1


def quantization_json(wildcards):
    """Parameters of the gate over one weight recipe."""
    return to_json(recipe=wildcards.recipe, min_margin=CONFIG.oracle.min_margin)


def forget_damaged_results():
    """Called where the results begin that a run needs: while the rules are read, a dry run cannot be told from it.

    Snakemake has looked for some outputs by then, and is made to look again. (`--summary` is no dry run to it.)
    """
    if workflow.is_main_process and not workflow.dryrun:
        for problem in forget_damaged(Path(RESULTS)):
            print(f"{problem}: it will be made again", file=sys.stderr)
            workflow.iocache.clear()


def checkpoint_source(wildcards):
    """The files of a local checkpoint that count, by name, or the folder of a rehearsal.

    A Hugging Face one is fetched by its stage. A plan can be made without the weights, and says so.
    """
    forget_damaged_results()
    if CONFIG.checkpoint.repository:
        return {}
    if CONFIG.checkpoint.rehearsal:
        return {"source": result("rehearsal", "checkpoint")}
    folder, missing = Path(CONFIG.checkpoint.source), None
    try:
        if workflow.dryrun:
            files, missing = planned_inputs(folder)
        else:
            files = local_inputs(folder)
    except UserError as problem:
        raise WorkflowError(str(problem)) from None
    if missing:
        print(missing, file=sys.stderr)
    return {name: str(path) for name, path in files.items()}


def stated_source():
    """Where a checkpoint comes from, without the name that a local folder has on this host."""
    if CONFIG.checkpoint.repository:
        return CONFIG.checkpoint.source
    return REHEARSAL if CONFIG.checkpoint.rehearsal else LOCAL


def rehearsal_sources(wildcards):
    """The shape of a rehearsal's checkpoint, and the small tokenizer that it widens."""
    forget_damaged_results()
    if CONFIG.checkpoint.rehearsal is None:
        raise WorkflowError(
            "rehearsal_checkpoint: the config has no checkpoint.rehearsal, so there is no shape to fill with random "
            "weights; use --configfile config/rehearsal-e2b.yaml"
        )
    small = {name: f"resources/gemma-4-tiny/{name}" for name in TOKENIZER_FILES}
    return {"config.json": CONFIG.checkpoint.rehearsal.config, **small}


def rehearsal_json(wildcards):
    """Parameters of a rehearsal's checkpoint."""
    rehearsal = CONFIG.checkpoint.rehearsal
    return to_json(seed=rehearsal.seed, shard_bytes=rehearsal.shard_bytes)


def structure_evidence(wildcards):
    """A bundle and what it was made of."""
    return {
        "bundle": result("bundles", wildcards.bundle),
        "checkpoint": result("checkpoint", "text"),
        **bundle_sources(wildcards),
    }


def numbers_evidence(wildcards):
    """A bundle and the numbers it is compared with."""
    artifact = BUNDLES[wildcards.bundle]
    evidence = {
        "bundle": result("bundles", wildcards.bundle),
        "oracle": result("oracle", "dialogues"),
        **bundle_sources(wildcards),
    }
    if artifact.tables:
        made_with = f"{artifact.recipe}/{published(artifact.tables)}"
        evidence["reference"] = result("decode_reference", made_with)
    elif artifact.recipe:
        evidence["reference"] = result("reference", artifact.recipe)
    return evidence


def published(key):
    """Published name of an artifact key."""
    return CONFIG.artifacts[key].published


def package_contents(wildcards):
    """Bundles by role, tables by number, the tables of another folder, and the checkpoint with the tokenizer's files.

    What lies beside the folder is in its key: its provenance names the tables that a decoder was made with, and other
    tables can leave the decoder's bytes equal.
    """
    folder = CONFIG.folders[wildcards.folder]
    beside = CONFIG.tables_of(folder) if folder.tables_in else []
    return {
        "checkpoint": result("checkpoint", "text"),
        **{
            f"bundle_{role}": result("bundles", published(key))
            for role, key in folder.bundles.items()
        },
        **{
            f"tables_{index}": result("tables", published(key))
            for index, key in enumerate(folder.tables)
        },
        **{
            f"beside_{index}": result("tables", published(key))
            for index, key in enumerate(beside)
        },
    }


def package_json(wildcards):
    """Parameters of a release folder."""
    folder = CONFIG.folders[wildcards.folder]
    return to_json(
        folder=folder.name,
        driver=folder.driver,
        bundles={role: published(key) for role, key in folder.bundles.items()},
        tables=[published(key) for key in folder.tables],
        tables_in=tables_in(folder),
        tokenizer=folder.tokenizer,
        context=CONFIG.positions(folder),
        chunks=chunks_of(folder),
        language=language_of(folder),
    )


def language_of(folder):
    """What a language bundle says of its decoder; None for other folders."""
    if folder.decoder is None:
        return None
    decoder = CONFIG.artifacts[folder.decoder]
    functions = [ring_function(capacity) for capacity in decoder.capacities]
    return {
        "compression": {"scheme": decoder.recipe},
        "functions": functions or ["main"],
        "cache_minimum": decoder.cache_minimum,
        "max_context_length": CONFIG.positions(folder),
    }


def chunks_of(folder):
    """The chunks of a decoder in their order; None where it is in one bundle."""
    chunks = [CONFIG.artifacts[key] for key in folder.chunks]
    if not chunks:
        return None
    return {
        "bundles": [chunk.published for chunk in chunks],
        "layers": [chunk.layers for chunk in chunks],
        "compute": chunks[0].compute,  # the same in all of a folder
    }


def compiled_bundle(wildcards):
    """One of the places of what the compiler makes; its bundle and target are the same in all."""
    return next(
        bundle for bundle in COMPILED.values() if bundle.result == wildcards.compiled
    )


def compiled_from(wildcards):
    """The bundle that is compiled ahead of time."""
    return result("bundles", compiled_bundle(wildcards).artifact.published)


def target_json(wildcards):
    """Parameters of the compiler."""
    return to_json(**asdict(compiled_bundle(wildcards).target))


def compiled_contents(wildcards):
    """A compiled bundle, and the language bundle whose like it becomes."""
    bundle = COMPILED[wildcards.compiled_folder]
    contents = {"compiled": result("aot", bundle.result)}
    if bundle.home.decoder:
        contents["twin"] = result("package", bundle.home.name)
    return contents


def built_ahead():
    """The compiled folders that this host builds: all or none."""
    return {} if NOT_BUILT else COMPILED


def wanted_ahead(wildcards):
    """What target `aot` builds; whoever asks for it by name is not to get nothing."""
    if not COMPILED:
        raise WorkflowError(
            "no artifact of a folder has targets, see artifacts.<name>.aot"
        )
    if NOT_BUILT:
        raise WorkflowError(f"nothing is compiled ahead of time: {NOT_BUILT}")
    return sorted({result("aot", bundle.result) for bundle in COMPILED.values()})


def chunks_json(wildcards):
    """Parameters of the gate over a decoder in chunks."""
    folder = CONFIG.folders[wildcards.folder]
    return to_json(context=CONFIG.positions(folder), **chunks_of(folder))


def chunks_evidence(wildcards):
    """A packaged decoder in chunks and the numbers it is compared with."""
    recipe = CONFIG.artifacts[CONFIG.folders[wildcards.folder].chunks[0]].recipe
    return {
        "folder": result("package", wildcards.folder),
        "oracle": result("oracle", "dialogues"),
        "weights": result("weights", recipe),
        "reference": result("reference", recipe),
    }


def tables_in(folder):
    """The other folder that a folder takes its tables from, with their names; None where it needs none."""
    if folder.tables_in is None:
        return None
    names = [published(key) for key in CONFIG.tables_of(folder)]
    return {"folder": folder.tables_in, "tables": names}


def folder_evidence(wildcards):
    """A packaged folder, and beside it the one that it takes its tables from."""
    other = CONFIG.folders[wildcards.folder].tables_in
    tables_folder = {"tables_folder": result("package", other)} if other else {}
    return {"folder": result("package", wildcards.folder), **tables_folder}


def long_evidence(wildcards):
    """A packaged folder, and the head's weights where its logits are made of them."""
    folder = CONFIG.folders[wildcards.folder]
    weights = {}
    if folder.decoder is None:
        recipe = CONFIG.artifacts[folder.bundles["head"]].recipe
        weights = {"weights": result("weights", recipe)}
    return folder_evidence(wildcards) | weights


def rooms():
    """Positions of every folder that chats."""
    folders = [folder for folder in CONFIG.folders.values() if folder.can_chat]
    return {folder.name: CONFIG.positions(folder) for folder in folders}


def agreeing_gates():
    """`GATE:FOLDER` -> verdict, for the gates whose ids are compared between folders."""
    return {
        f"{gate}:{folder}": result(f"gates/{gate}", folder)
        for gate in CONFIG.agreeing()
        for folder in rooms()
    }


def gates_over(artifacts, kinds):
    """`<gate>_<target>` -> manifest of its verdict, for some artifacts, their recipes, and every folder that chats."""
    return {
        f"{kind}_{target}": result(f"gates/{kind}", target)
        for kind in kinds
        for target in CONFIG.gate_targets(kind, artifacts)
    }


def all_gates():
    """Every gate over everything that the config declares."""
    return gates_over(CONFIG.artifacts.values(), GATES)


def required_gates():
    """The gates of the release."""
    return gates_over(CONFIG.judged().values(), CONFIG.gates.required)


def reported_gates():
    """The gates that the release lists, whether the host can run them or not."""
    return gates_over(CONFIG.judged().values(), CONFIG.gates.reported)


def report_config():
    """This run's configuration on the command line of another one."""
    settings = workflow.config_settings
    files = (
        ["--configfile", *map(str, settings.configfiles)]
        if settings.configfiles
        else []
    )
    own = [f"{key}={json.dumps(value)}" for key, value in settings.config.items()]
    return shlex.join([*files, *(["--config", *own] if own else [])])


def plan_options(wildcards):
    """This run's configuration, cores and memory on the command line of the plan."""
    given = workflow.global_resources
    memory = f" --mem-mb {given['mem_mb'].value}" if "mem_mb" in given else ""
    return f"{report_config()} --cores {own_cores()}{memory}"


def outputs_of_run():
    """Every output that this run builds or relies on."""
    return {str(output) for job in workflow.dag.jobs for output in job.output}


def say_summary():
    """At the end of a run that built or asked for the release: its folders, gates, times, as a table."""
    if result("release") in outputs_of_run():
        print(summary(Facts.read(Path(RESULTS))), file=sys.stderr)


def say_not_run():
    """At the end of a run: which of its gates this host could not run, what it could not build, and why."""
    outputs = outputs_of_run()
    known = [*all_gates().values(), *coreml_gates()]
    gates = [Path(path) for path in known if path in outputs]
    for line in not_run(path for path in gates if path.is_file()):  # not with --until
        print(line, file=sys.stderr)
    if NOT_BUILT and result("release") in outputs:
        print(
            f"not built: {len(COMPILED)} bundles ahead of time: {NOT_BUILT}",
            file=sys.stderr,
        )


def report_stopped_run():
    """After a run for the report in which a gate stopped the release: the report of what there is, that gate first."""
    unfinished = workflow.dag.needrun_jobs()
    pending = {str(output) for job in unfinished for output in job.output}
    if not {f"{RESULTS}/report.html", result("release")} <= pending:
        return
    gates = required_gates() | reported_gates()
    facts = Facts.of_stopped_run(
        Path(RESULTS),
        {"model": CONFIG.model, "slug": CONFIG.slug, "recipes": shipped_recipes()},
        {name: Path(path) for name, path in gates.items()},
        required_gates(),
        pending,
        STARTED,
    )
    if facts.stopping():
        make_report_of(facts)


def make_report_of(facts):
    """The report of a run that no job makes. Its parts go again, so that the next run for the report makes its own."""
    from workflow_scripts.report.pages import (
        write,
    )  # takes a second, and only this needs it

    page, log, config = (
        f"{RESULTS}/report.html",
        logs("report", "report"),
        report_config(),
    )
    Path(page).unlink(missing_ok=True)  # that of an earlier run
    files = write(facts, Path(RESULTS, "report"))
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    try:
        shell(
            "python -m snakemake {config} --nolock "
            "--report {page:q} --report-stylesheet {REPORT_STYLE:q} -- {files:q} > {log:q} 2>&1"
        )
    finally:
        for file in files:
            file.unlink()
    print(f"what stopped the release: {page}", file=sys.stderr)


def shipped_recipes():
    """Recipes of the bundles that lie in a folder."""
    return sorted({artifact.recipe for artifact in CONFIG.shipped().values()} - {None})


def release_contents():
    """Folders, verdicts, weights and checkpoint of the release."""
    return {
        "checkpoint": result("checkpoint", "text"),
        **{f"folder_{name}": result("package", name) for name in CONFIG.folders},
        **{f"folder_{name}": result("compiled", name) for name in built_ahead()},
        **{
            f"weights_{recipe}": result("weights", recipe)
            for recipe in shipped_recipes()
        },
        **{
            f"gate_{name}": path
            for name, path in (required_gates() | reported_gates()).items()
        },
    }


def publishable(wildcards):
    """The release, for somebody who has said where it goes; before hours of work go into it."""
    if CONFIG.repository is None:
        raise WorkflowError(
            "name the repository: --config repository=OWNER/NAME, and publish=yes to really upload"
        )
    return result("release")


def release_json():
    """Parameters of the release."""
    return to_json(
        model=CONFIG.model,
        slug=CONFIG.slug,
        folders=[*CONFIG.folders, *built_ahead()],
        required_gates=list(required_gates()),
        artifacts={
            **{
                a.published: declared(a)
                | ({"platforms": a.platforms} if a.platforms else {})
                for a in CONFIG.shipped().values()
            },
            **{b.published: declared(b.artifact) for b in built_ahead().values()},
        },
        compiled={
            folder: {
                "bundle": f"{bundle.home.name}/{bundle.artifact.published}",
                "target": asdict(bundle.target),
            }
            for folder, bundle in COMPILED.items()
        },
        not_built=NOT_BUILT,
    )


def declared(artifact):
    """What the release says of an artifact from the config."""
    return {
        "form": artifact.form,
        "recipe": artifact.recipe,
        "compute": artifact.compute,
    }


COREML = f"{CONFIG.slug}_coreml"


def coreml_gates():
    """The gates over the Core ML reference, which no release lists."""
    return [
        result(f"gates/coreml_{gate}", COREML)
        for gate in ("structure", "numbers", "prediction")
    ]


def coreml_wanted(wildcards):
    """What target `coreml_reference` builds, where the config has it and the environment the extra.

    Of a local checkpoint the size of the head is judged here, before any work; the stages would refuse it later.
    """
    coreml_sources(wildcards)
    tokenizer = Path(CONFIG.checkpoint.source, TOKENIZER)
    if tokenizer.is_file():
        try:
            kept_ids(tokenizer, CONFIG.coreml.head_rows)
        except UserError as problem:
            raise WorkflowError(str(problem)) from None
    return [result("coreml", COREML), *coreml_gates()]


def coreml_sources(wildcards):
    """What the Core ML reference is made of; before any work the refusal of a host that cannot make it."""
    if CONFIG.coreml is None:
        raise WorkflowError(
            "coreml_reference: the config has no section coreml, which names recipe, head_rows and context, or no "
            "artifact of form raw_tables; see config/README.md"
        )
    if missing := why_no_coremltools():
        raise WorkflowError(missing)
    return {
        "weights": result("weights", CONFIG.coreml.recipe),
        "tables": result("tables", CONFIG.coreml.tables),
        "checkpoint": result("checkpoint", "text"),
    }


def coreml_claim(wildcards):
    """The Core ML reference and what it is made of."""
    return {"package": result("coreml", COREML), **coreml_sources(wildcards)}


def coreml_evidence(wildcards):
    """The Core ML reference and the numbers it is compared with."""
    sources = coreml_claim(wildcards)
    del sources["checkpoint"]
    made_with = f"{CONFIG.coreml.recipe}/{CONFIG.coreml.tables}"
    return {
        "oracle": result("oracle", "dialogues"),
        "reference": result("decode_reference", made_with),
        **sources,
    }


def coreml_json(wildcards):
    """Parameters of the stages that make the Core ML reference or judge its structure."""
    return to_json(head_rows=CONFIG.coreml.head_rows, context=CONFIG.coreml.context)


def coreml_numbers_json(wildcards):
    """Parameters of the gate over the numbers of the Core ML reference."""
    return to_json(context=CONFIG.coreml.context)


def coreml_prediction_json(wildcards):
    """Those of the gate that runs it; a Mac makes another key, and so what Linux could not run."""
    macos = platform.mac_ver()[0] or "none"
    return to_json(context=CONFIG.coreml.context, macos=macos)


def tools_when_planned(stage):
    """`tools` of a stage of the extra: asked for when a job is planned, since its packages may be missing."""
    return lambda wildcards: tools(stage)
