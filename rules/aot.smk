# Ahead-of-time compilation, on a host that has Apple's compiler. What is compiled gets folders of its own, so that no
# gate over a folder is repeated.


rule compile_ahead:
    input:
        bundle=compiled_from,
        code=code("aot"),
    output:
        result("aot", "{compiled}"),
    log:
        logs("aot", "{compiled}"),
    benchmark:
        times("aot", "{compiled}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=5000,  # 4.0 GB were published for a whole decoder on the Neural Engine
        runtime=by_size(30, 120),
        disk_mb=by_size(500, 20000),
        macos=1,
    params:
        stage="aot",
        tools=tools("aot"),
        inputs=named_inputs,
        json=target_json,
    message:
        "aot: {wildcards.compiled}"
    shell:
        STAGE


rule package_compiled:
    input:
        unpack(compiled_contents),
        code=code("package_compiled"),
    output:
        result("compiled", "{compiled_folder}"),
    log:
        logs("compiled", "{compiled_folder}"),
    benchmark:
        times("compiled", "{compiled_folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
        runtime=by_size(10, 30),
        disk_mb=by_size(500, 10000),
    params:
        stage="package_compiled",
        tools=tools("package_compiled"),
        inputs=named_inputs,
        json=to_json(),
    message:
        "package: {wildcards.compiled_folder}"
    shell:
        STAGE
