# Gemma 4 checkpoint -> verified Core AI release folders.
#
# Path grammar:  results/<model>/<stage>/<artifact>                 a result: a folder (a bundle is one, too)
#                results/<model>/<stage>/<artifact>.manifest.json   its manifest: what the rules track
#                results/<model>/gates/<gate>/<target>              the verdict of a gate over a target
#                results/<model>/release                            what people download
#                results/<model>/{logs,benchmarks}/<stage>/...      one file per job; beside a log what the job took
#
# Targets:       release (default), aot, gates, bundles, publish, report, plan, coreml_reference,
#                tiny_checkpoint, rehearsal_checkpoint
from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/checkpoint.smk"
include: "rules/oracle.smk"
include: "rules/tables.smk"
include: "rules/weights.smk"
include: "rules/export.smk"
include: "rules/aot.smk"
include: "rules/gates.smk"
include: "rules/release.smk"
include: "rules/publish.smk"
include: "rules/report.smk"
include: "rules/coreml.smk"
include: "rules/plan.smk"


# On a cluster these stay on the host that submits: targets, what needs the internet and somebody's access token
# (`checkpoint` fetches, `publish` uploads), and what only draws.
localrules:
    checkpoint,
    release,
    aot,
    gates,
    bundles,
    publish,
    report,
    report_pages,
    plan,
    coreml_reference,


rule release:
    default_target: True
    input:
        result("release"),
    message:
        f"release: {RESULTS}/release"


rule aot:
    input:
        wanted_ahead,
    message:
        "aot: compiled"


rule gates:
    input:
        list(all_gates().values()),
    message:
        "gates: none failed"


rule bundles:
    input:
        [result("bundles", name) for name in BUNDLES],
    message:
        f"bundles: {RESULTS}/bundles"


onsuccess:
    say_summary()
    say_not_run()


onerror:
    report_stopped_run()
