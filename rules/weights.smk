rule weights:
    input:
        checkpoint=result("checkpoint", "text"),
        code=code("weights"),
    output:
        result("weights", "{recipe}"),
    log:
        logs("weights", "{recipe}"),
    benchmark:
        times("weights", "{recipe}")
    # Before the oracle, which is one thread for long, and would keep all cores from ever being free.
    priority: 1
    conda:
        "../envs/pipeline.yaml"
    threads: quantizer_threads
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 12000),
    params:
        stage="weights",
        tools=tools("weights"),
        inputs=named_inputs,
        json=recipe_json,
    message:
        "weights: {wildcards.recipe}"
    shell:
        STAGE
