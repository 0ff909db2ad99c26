"""The generated C++ file that includes a kernel's unchanged source and calls the kernel with typed parameters."""

from workflow_scripts.msl.signature import BUFFER, parse_signature, storage_declarations

SOURCE_FILE = "kernel.metal"

_TEMPLATE = """\
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include "msl_call.h"
{storage}
static_assert(__COUNTER__ == 0, "threadgroup occurrences are numbered by __COUNTER__ from 1 on");
#include "msl_keywords.h"
#include "{file}"
#undef device
#undef thread
#undef constant
#undef kernel
#undef threadgroup

void msl::run_thread(const msl::Buffer* buffers) {{
    msl::call(&::{kernel}{sources});
}}
"""


def launcher(source: str, kernel: str) -> str:
    """C++ text; `source` must lie beside it as `SOURCE_FILE`."""
    storage = [
        f"#define MSL_TG_{number} {'MSL_STORAGE' if declares else ''}"
        for number, declares in enumerate(storage_declarations(source), 1)
    ]
    sources, buffers = [], 0
    for parameter in parse_signature(source, kernel):
        if parameter.kind == BUFFER:
            sources.append(f"buffers[{buffers}]")
            buffers += 1
        else:
            sources.append(f"msl::self->{parameter.kind}")
    return _TEMPLATE.format(
        storage="\n".join(storage),
        file=SOURCE_FILE,
        kernel=kernel,
        sources="".join(f",\n              {text}" for text in sources),
    )
