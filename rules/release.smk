rule package:
    input:
        unpack(package_contents),
        code=code("package"),
    output:
        result("package", "{folder}"),
    log:
        logs("package", "{folder}"),
    benchmark:
        times("package", "{folder}")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
        runtime=by_size(10, 30),
        disk_mb=by_size(500, 10000),
    params:
        stage="package",
        tools=tools("package"),
        inputs=named_inputs,
        json=package_json,
    message:
        "package: {wildcards.folder}"
    shell:
        STAGE


rule assemble_release:
    input:
        **release_contents(),
        code=code("release"),
    output:
        result("release"),
    log:
        logs("release", "release"),
    benchmark:
        times("release", "release")
    conda:
        "../envs/pipeline.yaml"
    resources:
        mem_mb=500,
        runtime=by_size(10, 60),
        disk_mb=by_size(500, 20000),
    params:
        stage="release",
        tools=tools("release"),
        inputs=named_inputs,
        json=release_json(),
    message:
        f"release: {RESULTS}/release"
    shell:
        STAGE
