# Every gate is a node over a finished result. It always writes its verdict; a failed one leaves no manifest, so
# the release cannot go on.


rule gate_structure:
    input:
        unpack(structure_evidence),
        code=code_of(structure_stage),
    output:
        result("gates/structure", "{bundle}"),
    log:
        logs("gates/structure", "{bundle}"),
    benchmark:
        times("gates/structure", "{bundle}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 1000),
    params:
        stage=structure_stage,
        tools=tools_of(structure_stage),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "gate structure: {wildcards.bundle}"
    shell:
        STAGE


rule gate_numbers:
    input:
        unpack(numbers_evidence),
        code=code_of(numbers_stage),
    output:
        result("gates/numbers", "{bundle}"),
    log:
        logs("gates/numbers", "{bundle}"),
    benchmark:
        times("gates/numbers", "{bundle}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=numbers_memory,
        runtime=by_size(10, 1440),
        disk_mb=by_size(500, 20000),
    params:
        stage=numbers_stage,
        tools=tools_of(numbers_stage),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "gate numbers: {wildcards.bundle}"
    shell:
        STAGE


rule gate_kernels:
    input:
        bundle=result("bundles", "{bundle}"),
        weights=bundle_weights,
        code=code("gate_kernels"),
    output:
        result("gates/kernels", "{bundle}"),
    log:
        logs("gates/kernels", "{bundle}"),
    benchmark:
        times("gates/kernels", "{bundle}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_kernels",
        tools=tools("gate_kernels"),
        inputs=named_inputs,
        json=kernels_json,
    message:
        "gate kernels: {wildcards.bundle}"
    shell:
        STAGE


rule gate_ane:
    input:
        bundle=result("bundles", "{bundle}"),
        code=code("gate_ane"),
    output:
        result("gates/ane", "{bundle}"),
    log:
        logs("gates/ane", "{bundle}"),
    benchmark:
        times("gates/ane", "{bundle}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_ane",
        tools=tools("gate_ane"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate ane: {wildcards.bundle}"
    shell:
        STAGE


rule gate_quantization:
    input:
        checkpoint=result("checkpoint", "text"),
        oracle=result("oracle", "dialogues"),
        weights=result("weights", "{recipe}"),
        reference=result("reference", "{recipe}"),
        code=code("gate_quantization"),
    output:
        result("gates/quantization", "{recipe}"),
    log:
        logs("gates/quantization", "{recipe}"),
    benchmark:
        times("gates/quantization", "{recipe}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_quantization",
        tools=tools("gate_quantization"),
        inputs=named_inputs,
        json=quantization_json,
    message:
        "gate quantization: {wildcards.recipe}"
    shell:
        STAGE


rule gate_tables:
    input:
        tables=result("tables", "{tables}"),
        checkpoint=result("checkpoint", "text"),
        code=code_of(table_stage("gate_tables")),
    output:
        result("gates/tables", "{tables}"),
    log:
        logs("gates/tables", "{tables}"),
    benchmark:
        times("gates/tables", "{tables}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 1000),
    params:
        stage=table_stage("gate_tables"),
        tools=tools_of(table_stage("gate_tables")),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate tables: {wildcards.tables}"
    shell:
        STAGE


rule gate_chunks:
    input:
        unpack(chunks_evidence),
        code=code("gate_chunks"),
    output:
        result("gates/chunks", "{folder}"),
    log:
        logs("gates/chunks", "{folder}"),
    benchmark:
        times("gates/chunks", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=1000,
        runtime=by_size(10, 1440),
        disk_mb=by_size(500, 4000),
    params:
        stage="gate_chunks",
        tools=tools("gate_chunks"),
        inputs=named_inputs,
        json=chunks_json,
    message:
        "gate chunks: {wildcards.folder}"
    shell:
        STAGE


rule gate_fp16:
    input:
        unpack(chunks_evidence),
        code=code("gate_fp16"),
    output:
        result("gates/fp16", "{folder}"),
    log:
        logs("gates/fp16", "{folder}"),
    benchmark:
        times("gates/fp16", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 120),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_fp16",
        tools=tools("gate_fp16"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate fp16: {wildcards.folder}"
    shell:
        STAGE


rule gate_tokens:
    input:
        unpack(folder_evidence),
        oracle=result("oracle", "dialogues"),
        checkpoint=result("checkpoint", "text"),
        code=code("gate_tokens"),
    output:
        result("gates/tokens", "{folder}"),
    log:
        logs("gates/tokens", "{folder}"),
    benchmark:
        times("gates/tokens", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=folder_memory,
        runtime=by_size(20, 5760),
        disk_mb=by_size(500, 20000),
    params:
        stage="gate_tokens",
        tools=tools("gate_tokens"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate tokens: {wildcards.folder}"
    shell:
        STAGE


rule gate_long_run:
    input:
        unpack(long_evidence),
        oracle=result("oracle", "dialogues"),
        checkpoint=result("checkpoint", "text"),
        code=code("gate_long_run"),
    output:
        result("gates/long_run", "{folder}"),
    log:
        logs("gates/long_run", "{folder}"),
    benchmark:
        times("gates/long_run", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=folder_memory,
        runtime=by_size(30, 5760),
        disk_mb=by_size(500, 20000),
    params:
        stage="gate_long_run",
        tools=tools("gate_long_run"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate long_run: {wildcards.folder}"
    shell:
        STAGE


rule gate_chat:
    input:
        unpack(folder_evidence),
        oracle=result("oracle", "dialogues"),
        code=code("gate_chat"),
    output:
        result("gates/chat", "{folder}"),
    log:
        logs("gates/chat", "{folder}"),
    benchmark:
        times("gates/chat", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=folder_memory,
        runtime=by_size(20, 5760),
        disk_mb=by_size(500, 20000),
    params:
        stage="gate_chat",
        tools=tools("gate_chat"),
        inputs=named_inputs,
        json=to_json(dialogues=CONFIG.gates.chat),
    message:
        "gate chat: {wildcards.folder}"
    shell:
        STAGE


rule gate_agreement:
    input:
        **agreeing_gates(),
        code=code("gate_agreement"),
    output:
        result("gates/agreement", "folders"),
    log:
        logs("gates/agreement", "folders"),
    benchmark:
        times("gates/agreement", "folders")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
        runtime=10,
        disk_mb=500,
    params:
        stage="gate_agreement",
        tools=tools("gate_agreement"),
        inputs=named_inputs,
        json=to_json(positions=rooms()),
    message:
        "gate agreement: all folders that chat"
    shell:
        STAGE


rule gate_gpu:
    input:
        unpack(folder_evidence),
        oracle=result("oracle", "dialogues"),
        code=code("gate_gpu"),
    output:
        result("gates/gpu", "{folder}"),
    log:
        logs("gates/gpu", "{folder}"),
    benchmark:
        times("gates/gpu", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 120),
        disk_mb=by_size(500, 4000),
        macos=1,
        metal_gpu=1,  # two at once can hang a Mac; the profile has one. `gpu` would be a card that a cluster counts
    params:
        stage="gate_gpu",
        tools=tools("gate_gpu"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "gate gpu: {wildcards.folder}"
    shell:
        STAGE
