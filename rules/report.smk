# The report: pages and figures over a finished release, and Snakemake's own report around them.
#
# Times are of this host, so these files are no results of a stage, and the store does not keep them.

REPORT_PAGES = {  # file: category
    "built.html": "Release",
    "gates.html": "Gates",
    "margins.svg": "Gates",
    "errors.svg": "Numbers",
    "divergences.svg": "Numbers",
    "signal.svg": "Quantization",
    "sizes.svg": "Sizes",
    "jobs.svg": "Time and memory",
}
REPORT_SOURCES = sorted(
    str(path.relative_to(workflow.basedir))
    for path in Path(workflow.basedir, "workflow_scripts/report").glob("*.py")
)
REPORT_STYLE = "workflow_scripts/report/report.css"


# Its text holds the verdict, which `snakemake --report` by hand may be called without.
if Path(f"{RESULTS}/report/verdict.html").is_file():

    report: "../workflow_scripts/report/captions/release.rst"


rule report_pages:
    input:
        release=result("release"),
        code=REPORT_SOURCES,
    output:
        [
            report(
                f"{RESULTS}/report/{name}",
                caption=f"../workflow_scripts/report/captions/{Path(name).stem}.rst",
                category=category,
                labels={"figure": Path(name).stem},
            )
            for name, category in REPORT_PAGES.items()
        ],
        verdict=f"{RESULTS}/report/verdict.html",  # on the first page, see captions/release.rst
    log:
        logs("report", "pages"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
    params:
        results=lambda wildcards, input: Path(input.release).parent,
    message:
        f"report: pages and figures in {RESULTS}/report"
    shell:
        "python -m workflow_scripts pages {params.results:q} {params.results:q}/report > {log:q} 2>&1"


# Snakemake makes its report only when it is called for that, so this job calls it, for the same configuration.
rule report:
    input:
        pages=rules.report_pages.output,
        captions=[
            str(path.relative_to(workflow.basedir))
            for path in sorted(
                Path(workflow.basedir, "workflow_scripts/report/captions").iterdir()
            )
        ],
        style=REPORT_STYLE,
    output:
        f"{RESULTS}/report.html",
    log:
        logs("report", "report"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
    params:
        config=report_config(),
    message:
        f"report: {RESULTS}/report.html"
    shell:
        "python -m snakemake {params.config} --nolock --report {output:q} "
        "--report-stylesheet {input.style:q} -- {input.pages:q} > {log:q} 2>&1"
