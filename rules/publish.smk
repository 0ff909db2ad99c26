# Publishing. It makes no file: what it does is elsewhere, and done again only as far as it is not done yet.


rule publish:
    input:
        publishable,
    log:
        logs("publish", "release"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
    params:
        release=f"{RESULTS}/release",
        repository=CONFIG.repository,
        yes="--yes" if CONFIG.publish else "",
    message:
        f"publish: {RESULTS}/release"
    shell:
        "python -u -m workflow_scripts publish {params.release:q} --repo {params.repository:q} {params.yes} 2>&1 "
        "| tee {log:q}"
