rule oracle:
    input:
        checkpoint=result("checkpoint", "text"),
        code=code("oracle"),
    output:
        result("oracle", "dialogues"),
    log:
        logs("oracle", "dialogues"),
    benchmark:
        times("oracle", "dialogues")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=by_size(2000, 9500),  # the decoder and its embedding in float32
        runtime=by_size(10, 120),
        disk_mb=by_size(500, 1000),
    params:
        stage="oracle",
        tools=tools("oracle"),
        inputs=named_inputs,
        json=to_json(
            min_margin=CONFIG.oracle.min_margin,
            context=CONFIG.context,
            dialogues=[
                dialogue.params() for dialogue in CONFIG.oracle.dialogues.values()
            ],
        ),
    message:
        "oracle: transformers answers the config's dialogues"
    shell:
        STAGE


rule reference:
    input:
        checkpoint=result("checkpoint", "text"),
        weights=result("weights", "{recipe}"),
        oracle=result("oracle", "dialogues"),
        code=code("reference"),
    output:
        result("reference", "{recipe}"),
    log:
        logs("reference", "{recipe}"),
    benchmark:
        times("reference", "{recipe}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 120),
        disk_mb=by_size(500, 2000),
    params:
        stage="reference",
        tools=tools("reference"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "reference: the decoder in float32 with the weights of {wildcards.recipe}"
    shell:
        STAGE


rule decode_reference:
    input:
        weights=result("weights", "{recipe}"),
        tables=result("tables", "{tables}"),
        oracle=result("oracle", "dialogues"),
        code=code("decode_reference"),
    output:
        result("decode_reference", "{recipe}/{tables}"),
    log:
        logs("decode_reference", "{recipe}/{tables}"),
    benchmark:
        times("decode_reference", "{recipe}/{tables}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 120),
        disk_mb=by_size(500, 2000),
    params:
        stage="decode_reference",
        tools=tools("decode_reference"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "reference: the decoder in float32 with the weights of {wildcards.recipe} and {wildcards.tables}"
    shell:
        STAGE
