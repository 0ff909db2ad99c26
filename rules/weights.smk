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
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
    params:
        stage="weights",
        tools=tools("weights"),
        inputs=named_inputs,
        json=recipe_json,
    message:
        "weights: {wildcards.recipe}"
    shell:
        STAGE
