# The plan: what a release of this configuration would take. It builds nothing and writes nothing below results/.


rule plan:
    log:
        ".snakemake/log/plan.txt",
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
    params:
        options=plan_options,
    message:
        f"plan: {RESULTS}/release"
    shell:
        "python -m workflow_scripts plan {params.options} | tee {log:q}"
