# The Core ML reference: an extra that the release is measured against, and no part of it. What its jobs ask for at full
# size was not measured.


rule coreml_reference:
    input:
        coreml_wanted,
    message:
        f"coreml_reference: {RESULTS}/coreml/{COREML}"


rule export_coreml:
    input:
        unpack(coreml_sources),
        code=code("export_coreml"),
    output:
        result("coreml", COREML),
    log:
        logs("coreml", COREML),
    benchmark:
        times("coreml", COREML)
    conda:
        "../envs/coreml.yaml"
    resources:
        mem_mb=by_size(2000, 24000),
        runtime=by_size(10, 240),
        disk_mb=by_size(500, 10000),
    params:
        stage="export_coreml",
        tools=tools_when_planned("export_coreml"),
        inputs=named_inputs,
        json=coreml_json,
    message:
        "export: the Core ML reference"
    shell:
        STAGE


rule gate_coreml_structure:
    input:
        unpack(coreml_claim),
        code=code("gate_coreml_structure"),
    output:
        result("gates/coreml_structure", COREML),
    log:
        logs("gates/coreml_structure", COREML),
    benchmark:
        times("gates/coreml_structure", COREML)
    conda:
        "../envs/coreml.yaml"
    resources:
        mem_mb=by_size(2000, 12000),
        runtime=by_size(10, 240),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_coreml_structure",
        tools=tools_when_planned("gate_coreml_structure"),
        inputs=named_inputs,
        json=coreml_json,
    message:
        "gate coreml_structure: the Core ML reference"
    shell:
        STAGE


rule gate_coreml_numbers:
    input:
        unpack(coreml_evidence),
        code=code("gate_coreml_numbers"),
    output:
        result("gates/coreml_numbers", COREML),
    log:
        logs("gates/coreml_numbers", COREML),
    benchmark:
        times("gates/coreml_numbers", COREML)
    conda:
        "../envs/coreml.yaml"
    resources:
        mem_mb=by_size(2000, 12000),
        runtime=by_size(10, 240),
        disk_mb=by_size(500, 1000),
    params:
        stage="gate_coreml_numbers",
        tools=tools_when_planned("gate_coreml_numbers"),
        inputs=named_inputs,
        json=coreml_numbers_json,
    message:
        "gate coreml_numbers: the Core ML reference"
    shell:
        STAGE


rule gate_coreml_prediction:
    input:
        unpack(coreml_evidence),
        code=code("gate_coreml_prediction"),
    output:
        result("gates/coreml_prediction", COREML),
    log:
        logs("gates/coreml_prediction", COREML),
    benchmark:
        times("gates/coreml_prediction", COREML)
    conda:
        "../envs/coreml.yaml"
    resources:
        mem_mb=by_size(2000, 12000),
        runtime=by_size(10, 240),
        disk_mb=by_size(500, 1000),
        macos=1,
    params:
        stage="gate_coreml_prediction",
        tools=tools_when_planned("gate_coreml_prediction"),
        inputs=named_inputs,
        json=coreml_prediction_json,
    message:
        "gate coreml_prediction: the Core ML reference"
    shell:
        STAGE
