rule checkpoint:
    input:
        unpack(checkpoint_source),
        code=code("checkpoint"),
    output:
        result("checkpoint", "text"),
    log:
        logs("checkpoint", "text"),
    benchmark:
        times("checkpoint", "text")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
    params:
        stage="checkpoint",
        inputs=local_source,
        json=to_json(
            source=CONFIG.checkpoint.source,
            allow_moving_revision=config["checkpoint"]["allow_moving_revision"],
            sha256=CONFIG.checkpoint.sha256,
            num_hidden_layers=CONFIG.num_hidden_layers,
        ),
    message:
        f"checkpoint: {CONFIG.checkpoint.source}"
    shell:
        STAGE
