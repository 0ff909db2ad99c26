rule tables:
    input:
        checkpoint=result("checkpoint", "text"),
        code=code_of(table_stage("tables")),
    output:
        result("tables", "{tables}"),
    log:
        logs("tables", "{tables}"),
    benchmark:
        times("tables", "{tables}")
    # Before the oracle, as the weights.
    priority: 1
    conda:
        "../envs/pipeline.yaml"
    threads: quantizer_threads
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 6000),
    params:
        stage=table_stage("tables"),
        tools=tools_of(table_stage("tables")),
        inputs=named_inputs,
        json=to_json(),
    message:
        "tables: {wildcards.tables}"
    shell:
        STAGE
