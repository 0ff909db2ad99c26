# One rule per authoring, so that an edit of one reruns no other.


rule export_hostcache:
    input:
        weights=bundle_weights,
        code=code("export_hostcache"),
    output:
        result("bundles", "{bundle}"),
    log:
        logs("bundles", "{bundle}"),
    benchmark:
        times("bundles", "{bundle}")
    wildcard_constraints:
        bundle=of_form("hostcache_core"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 20000),
    params:
        stage="export_hostcache",
        tools=tools("export_hostcache"),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "export: {wildcards.bundle}"
    shell:
        STAGE


rule export_kernels:
    input:
        weights=bundle_weights,
        code=code_of(kernel_stage),
    output:
        result("bundles", "{bundle}"),
    log:
        logs("bundles", "{bundle}"),
    benchmark:
        times("bundles", "{bundle}")
    wildcard_constraints:
        bundle=of_form("hostcache_metal", "head_argmax_metal"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 10000),
    params:
        stage=kernel_stage,
        tools=tools_of(kernel_stage),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "export: {wildcards.bundle}"
    shell:
        STAGE


rule export_head:
    input:
        weights=bundle_weights,
        code=code("export_head"),
    output:
        result("bundles", "{bundle}"),
    log:
        logs("bundles", "{bundle}"),
    benchmark:
        times("bundles", "{bundle}")
    wildcard_constraints:
        bundle=of_form("head", "head_argmax"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 10000),
    params:
        stage="export_head",
        tools=tools("export_head"),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "export: {wildcards.bundle}"
    shell:
        STAGE


rule export_frontend:
    input:
        tables=result("tables", TABLES),
        checkpoint=result("checkpoint", "text"),
        code=code("export_frontend"),
    output:
        result("bundles", "{bundle}"),
    log:
        logs("bundles", "{bundle}"),
    benchmark:
        times("bundles", "{bundle}")
    wildcard_constraints:
        bundle=of_form("frontend"),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 6000),
    params:
        stage="export_frontend",
        tools=tools("export_frontend"),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "export: {wildcards.bundle}"
    shell:
        STAGE


rule export_form:
    input:
        unpack(bundle_sources),
        code=code_of(form_stage),
    output:
        result("bundles", "{bundle}"),
    log:
        logs("bundles", "{bundle}"),
    benchmark:
        times("bundles", "{bundle}")
    wildcard_constraints:
        bundle=of_form("ane_chunk", "ane_head", *DECODE_FORMS, *STATE_CORES),
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=2000,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 10000),
    params:
        stage=form_stage,
        tools=tools_of(form_stage),
        inputs=named_inputs,
        json=bundle_json,
    message:
        "export: {wildcards.bundle}"
    shell:
        STAGE
