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
        runtime=by_size(10, 240),
        disk_mb=by_size(500, 20000),
    params:
        stage="checkpoint",
        tools=tools("checkpoint"),
        inputs=named_inputs,
        json=to_json(
            source=stated_source(),
            allow_moving_revision=CONFIG.checkpoint.allow_moving_revision,
            sha256=CONFIG.checkpoint.sha256,
            num_hidden_layers=CONFIG.num_hidden_layers,
        ),
    message:
        f"checkpoint: {CONFIG.checkpoint.source}"
    shell:
        STAGE


rule tiny_checkpoint:
    input:
        code=[
            "workflow_scripts/checkpoint/tiny.py",
            "workflow_scripts/checkpoint/tiny_grid.py",
            "workflow_scripts/checkpoint/tiny_shapes.py",
            "workflow_scripts/checkpoint/tiny_dialogues.yaml",
        ],
    log:
        logs("checkpoint", "tiny"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=60,
        disk_mb=500,
    message:
        "tiny checkpoint: train it anew into resources/gemma-4-tiny"
    shell:
        "python -m workflow_scripts.checkpoint.tiny resources/gemma-4-tiny 2>&1 | tee {log:q}"


# Random weights at a real model's size, as a published folder; only for a config with checkpoint.rehearsal.
rule rehearsal_checkpoint:
    input:
        unpack(rehearsal_sources),
        code=code("rehearsal"),
    output:
        result("rehearsal", "checkpoint"),
    log:
        logs("rehearsal", "checkpoint"),
    benchmark:
        times("rehearsal", "checkpoint")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
        runtime=30,
        disk_mb=12000,
    params:
        stage="rehearsal",
        tools=tools("rehearsal"),
        inputs=named_inputs,
        json=rehearsal_json,
    message:
        "rehearsal: random weights at full size"
    shell:
        STAGE
