"""Metal source executed on the CPU: the language that kernels use, a bundle's kernel, faults that must be found."""

import numpy as np
import pytest

from workflow_scripts.errors import UserError
from workflow_scripts.msl.calls import Result, distinct
from workflow_scripts.msl.compiler import MODES, compile_kernel
from workflow_scripts.msl.extract import extract
from workflow_scripts.msl.faults import KernelFault
from workflow_scripts.msl.run import run_call, run_kernel, run_orders
from workflow_scripts.msl.signature import storage_declarations

PROLOGUE = """
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
FLOATS = "tensor<device float, metal::dextents<int, 1>, tensor_handle>"

# Templates, macros, structs, helpers with threadgroup pointers, constant tables, half vectors, swizzles, raw device
# pointers, SIMD functions; dispatched with a partial last threadgroup.
KIT = (
    PROLOGUE
    + """
constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};  // "threadgroup float" in a comment
#define TWICE(x) ((x) + (x))
struct Pair { float value; uint index; };
template <typename T> inline T clipped(T x, T low, T high) { return clamp(x, low, high); }
static float total(threadgroup const float* part, uint n) {
    float sum = 0;
    #pragma unroll
    for (uint i = 0; i < n; i++) sum += part[i];
    return sum;
}
[[kernel]] void kit(tensor<device half, metal::dextents<int, 2>, tensor_handle> X [[buffer(0)]],
                    constant float& scale [[buffer(1)]], constant int& shift [[buffer(2)]],
                    """
    + FLOATS
    + """ Y [[buffer(3)]], tensor<device int, metal::dextents<int, 2>, tensor_handle> I [[buffer(4)]],
                    uint gid [[thread_position_in_grid]], uint3 group [[threadgroup_position_in_grid]],
                    ushort lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                    uint2 size [[threads_per_threadgroup]]) {
    threadgroup float sums[2], tops[2];
    device const half* row = &X[0, int(gid)];
    half4 h = half4(row[0], row[1], row[2], row[3]);
    h.xy = h.yx;
    float4 f = float4(h) * scale;
    f.w += 1.0;
    const float2 pair = f.zw * 2.0f + float2(0.5f);
    Pair best = {metal::min(f.x, 1.0f), gid};
    best.value = fma(f.y, 2.0f, table[gid % 4]) + precise::sqrt(as_type<float>(0x40800000u)) + best.value;
    const float sum = simd_sum(pair.x), top = simd_max(best.value);
    if (lane == 0) { sums[simd] = sum; tops[simd] = top; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint groups = (size.x + 31) / 32;
    Y[gid] = TWICE(best.value) + total(sums, groups) + tops[groups - 1] + dot(f.xyz, float3(1, 2, 3)) + 1.5h
        + simd_shuffle_xor(pair, ushort(1)).y + clipped(f.x, -1.0f, 1.0f);
    I[0, gid] = int(best.index) + shift + int(group.x) * 1000;
    I[1, gid] = simd_broadcast(int(lane), 3) + simd_prefix_exclusive_sum(1) + (any(f > 1.0f) ? 100 : 0);
}
"""
)
ROWS, LANES = 100, 32
KIT_RESULTS = [Result("Y", np.dtype("f4"), (ROWS,)), Result("I", np.dtype("i4"), (ROWS, 2))]

# One kernel with every fault, chosen by `which`, so that each mode compiles once. 0 is sound.
FAULTY = (
    PROLOGUE
    + f"""
__attribute__((noinline)) static float at(threadgroup const float* values, uint i) {{ return values[i]; }}
[[kernel]] void faulty({FLOATS} X [[buffer(0)]], constant int& which [[buffer(1)]], {FLOATS} Y [[buffer(2)]],
                       uint gid [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {{
"""
    + """
    threadgroup float part[64];
    float sum = 0;
    for (uint tile = 0; tile < 3; ++tile) {
        part[t] = X[gid] * float(tile + 1);
        if (which != 1) threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += part[63 - t];
        if (which != 2) threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (which == 3 && simd == 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (which == 4 && lane < 16) sum += simd_sum(sum);
    if (which == 5) sum += X[gid + 1];
    if (which == 6) sum += part[t + 1];
    if (which == 7) { device const float* x = &X[0]; sum += x[gid + 1]; }
    if (which == 8 && gid == 127) return;
    if (which == 9) sum += at(part, t + 1);
    if (which == 10 && gid == 70) while (simd_is_first() || X[0] == X[0]) sum += 1.0f;
    if (which == 11) Y[0] = float(gid);
    if (which == 12) sum += float(1 << (which + int(t)));
    if (which == 13) X[gid] = 0.0f;
    if (which == 14) threadgroup_barrier(mem_flags::mem_none), part[t] = sum, simdgroup_barrier(mem_flags::mem_none),
        sum += part[t ^ 1];
    if (which != 11) Y[gid] = sum;
}
"""
)
X = np.arange(128, dtype=np.float32)
SOUND = 6 * X.reshape(2, 64)[:, ::-1].reshape(-1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(source, kernel, mode) -> program; each is compiled once."""
    folder = tmp_path_factory.mktemp("programs")
    return lambda source, kernel, mode: compile_kernel(source, kernel, mode, folder)


@pytest.fixture(scope="module")
def faulty(build):
    """(mode, which) -> the result of the kernel with that fault."""

    def run(mode, which, order=0, timeout=60):
        program = build(FAULTY, "faulty", mode)
        result = [Result("Y", np.dtype("f4"), (128,))]
        arguments = {"X": X, "which": np.int32(which)}
        return run_kernel(program, arguments, (128, 1, 1), (64, 1, 1), result, order, timeout)[0]

    return run


def kit_reference(x, scale, shift):
    """What the kit computes, in numpy, one SIMD-group after the other."""
    f = x.astype(np.float32)[:, [1, 0, 2, 3]] * scale
    f[:, 3] += 1
    pair = f[:, 2:] * 2 + 0.5
    gid = np.arange(ROWS)
    best = np.minimum(f[:, 0], 1) + f[:, 1] * 2 + (gid % 4 + 1) + 2
    simd_sums = np.array([pair[start : start + LANES, 0].sum() for start in range(0, ROWS, LANES)])
    simd_tops = np.array([best[start : start + LANES].max() for start in range(0, ROWS, LANES)])
    total = np.where(gid < 64, simd_sums[:2].sum(), simd_sums[2:].sum())
    top = np.where(gid < 64, simd_tops[1], simd_tops[3])
    y = 2 * best + total + top + f[:, :3] @ [1, 2, 3] + 1.5 + pair[gid ^ 1, 1] + np.clip(f[:, 0], -1, 1)
    indices = np.stack([gid + shift + gid // 64 * 1000, 3 + gid % 32 + 100 * (f > 1).any(1)], 1)
    return y, indices


@pytest.mark.parametrize("mode", MODES)
def test_language_kit(build, mode):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float16)
    program = build(KIT, "kit", mode)
    arguments = {"X": x, "scale": np.float32(2), "shift": np.int32(7)}
    y, indices = run_orders(program, arguments, (ROWS, 1, 1), (64, 1, 1), KIT_RESULTS, orders=(0, 1, 2, 3))
    expected_y, expected_indices = kit_reference(x, 2, 7)
    np.testing.assert_allclose(y, expected_y, rtol=1e-5)
    np.testing.assert_array_equal(indices, expected_indices)


def test_threadgroups_in_several_processes_give_the_same(build):
    x = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float16)
    arguments = [x, np.float32(0.5), np.int32(0)]
    for mode in MODES:
        program = build(KIT, "kit", mode)
        one, two = (
            run_kernel(program, arguments, (ROWS, 1, 1), (64, 1, 1), KIT_RESULTS, processes=count)
            for count in (1, 2)
        )
        for left, right in zip(one, two, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("mode", MODES)
def test_sound_kernel_gives_no_report(faulty, mode):
    for order in (0, 1, 2, 3):
        np.testing.assert_array_equal(faulty(mode, 0, order), SOUND)


@pytest.mark.parametrize(
    ("mode", "which", "kind", "words"),
    [
        ("thread", 1, "data race", "of the Metal source"),
        ("thread", 2, "data race", "of the Metal source"),
        ("thread", 14, "data race", "of the Metal source"),
        *((mode, 3, "divergent barrier", "threadgroup_barrier at line") for mode in MODES),
        *(
            (mode, 4, "divergent barrier", "lane 0 of SIMD-group 0 waits in simd_sum at line")
            for mode in MODES
        ),
        (
            "fast",
            5,
            "out of bounds",
            "X[128] at line 22: axis 0 (of the kernel's order) has 128 elements (lane 31 of",
        ),
        ("address", 6, "out of bounds", "index 64 out of bounds for type 'float [64]', line 23"),
        ("address", 7, "address", "thread 63, 0, 0 of threadgroup 1, 0, 0"),
        *(
            (mode, 8, "uninitialised", "1 of 128 elements of Y are never written, first [127]")
            for mode in MODES
        ),
        ("address", 9, "address", "thread 63, 0, 0 of threadgroup 0, 0, 0"),
        ("fast", 10, "timeout", "thread 6, 0, 0 of threadgroup 1, 0, 0"),
        ("address", 12, "undefined behaviour", "shift"),
        ("fast", 13, "address", "the kernel writes to its argument X"),
    ],
)
def test_fault_is_found(faulty, mode, which, kind, words):
    with pytest.raises(KernelFault) as found:
        faulty(mode, which, timeout=1 if kind == "timeout" else 60)
    assert found.value.kind == kind
    assert words in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("which", [1, 2])
def test_missing_barrier_gives_wrong_numbers_in_every_order(faulty, which):
    for order in (0, 1, 2):
        assert (faulty("fast", which, order) != SOUND).any()


def test_result_that_depends_on_the_order_is_found(build):
    source = f"""{PROLOGUE}
[[kernel]] void last({FLOATS} Y [[buffer(0)]], uint gid [[thread_position_in_grid]]) {{ Y[0] = float(gid); }}"""
    program = build(source, "last", "fast")
    with pytest.raises(KernelFault, match="1 of 1 elements of Y are others in schedule 1") as found:
        run_orders(program, [], (128, 1, 1), (64, 1, 1), [Result("Y", np.dtype("f4"), (1,))])
    assert found.value.kind == "wrong-order"


def test_value_that_looks_like_the_fill_is_no_fault(build):
    source = f"""{PROLOGUE}
[[kernel]] void minus(tensor<device int, dextents<int, 1>, tensor_handle> Y [[buffer(0)]],
                      uint gid [[thread_position_in_grid]]) {{ Y[gid] = -1; }}"""
    program = build(source, "minus", "fast")
    (found,) = run_kernel(program, [], (40, 1, 1), (32, 1, 1), [Result("Y", np.dtype("i4"), (40,))])
    assert (found == -1).all()


def test_too_many_private_variables_are_reported(build):
    source = f"""{PROLOGUE}
[[kernel]] void large({FLOATS} Y [[buffer(0)]], uint gid [[thread_position_in_grid]]) {{
    float values[40000];
    for (uint i = 0; i < 40000; i++) values[i] = Y[gid] + float(i);
    threadgroup_barrier(mem_flags::mem_none);
    Y[gid] = values[gid];
}}"""
    program = build(source, "large", "fast")
    with pytest.raises(
        KernelFault, match="private variables of one thread need more than 65536 bytes"
    ) as found:
        run_kernel(program, [], (40, 1, 1), (32, 1, 1), [Result("Y", np.dtype("f4"), (40,))])
    assert found.value.kind == "address"


def test_wrong_argument_is_named(build):
    program = build(FAULTY, "faulty", "fast")
    result = [Result("Y", np.dtype("f4"), (128,))]
    with pytest.raises(UserError, match="X is given as f8 with 1 axes, the kernel takes f4 with 1"):
        run_kernel(program, [X.astype("f8"), np.int32(0)], (128, 1, 1), (64, 1, 1), result)
    with pytest.raises(UserError, match=r"takes \['X', 'which'\], not \['X'\]"):
        run_kernel(program, {"X": X}, (128, 1, 1), (64, 1, 1), result)
    with pytest.raises(UserError, match="at most 1024 threads"):
        run_kernel(program, [X, np.int32(0)], (128, 1, 1), (2048, 1, 1), result)


def test_source_that_does_not_compile_shows_the_line(build):
    with pytest.raises(UserError, match=r"kernel\.metal:7:.*error: .*nothing"):
        build(
            KIT.replace("constant float table", "int unknown = nothing;\nconstant float table"), "kit", "fast"
        )


def test_missing_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler, which is not found.*install g\+\+ 12 or newer"):
        compile_kernel(KIT, "kit", "fast", tmp_path)


def test_threadgroup_is_storage_or_a_qualifier():
    text = """void f(threadgroup float* p) { threadgroup half4 a[3], b; threadgroup const float* q = p;
    /* threadgroup */     threadgroup_barrier(x); g((threadgroup uint*)p); } threadgroup float& h(); "threadgroup" """
    assert storage_declarations(text) == [False, True, False, False, False]
    with pytest.raises(UserError, match="line 1 of the Metal source uses `threadgroup` in a macro"):
        storage_declarations("#define SHARED threadgroup float")
    with pytest.raises(UserError, match="neither at the begin"):
        storage_declarations("void f() { const threadgroup float a[3]; }")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle with two calls of one kernel: large, small and uniform constants, and a scalar."""
    import torch
    from coreai_torch import MetalParameter, TorchMetalKernel

    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.model.signature import FunctionSpec, TensorSpec

    def reference(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, ones: torch.Tensor, s: float
    ) -> torch.Tensor:
        return x.float() @ w.float().T * s + b.float() + ones.float()

    kernel = TorchMetalKernel(
        "affine",
        ["x", "w", "b", "ones", "s"],
        ["y"],
        "float sum = 0;  // of a row\n"
        "for (uint k = lane; k < uint(x.get_extent(0)); k += 32) sum += float(x[k, 0]) * float(w[k, row]);\n"
        "sum = simd_sum(sum);\n"
        "if (lane == 0) y[row, 0] = sum * s + float(b[row]) + float(ones[row]);  // one lane writes\n",
        reference,
        [
            MetalParameter("row", "uint", "threadgroup_position_in_grid"),
            MetalParameter("lane", "ushort", "thread_index_in_simdgroup"),
        ],
    )

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            numbers = torch.Generator().manual_seed(0)
            for name in ("w0", "w1"):
                self.register_buffer(name, torch.randn(48, 96, generator=numbers).half())
            self.register_buffer("b", torch.randn(48, generator=numbers).half())
            self.register_buffer("ones", torch.ones(48, dtype=torch.uint8))

        def forward(self, x):
            sizes = {"threads_per_grid": (48 * 32, 1, 1), "threads_per_thread_group": (32, 1, 1)}
            return tuple(
                kernel(x, w, self.b, self.ones, 0.5, **sizes, result_shapes=[[1, 48]])
                for w in (self.w0, self.w1)
            )

    spec = FunctionSpec(
        {"x": TensorSpec("float16", (1, 96))}, {name: TensorSpec("float32", (1, 48)) for name in ("y0", "y1")}
    )
    out = tmp_path_factory.mktemp("bundle") / "affine.aimodel"
    out.mkdir()
    save_bundle([Function("main", Model(), spec)], out, {}, [kernel])
    return out, Model()


def test_kernels_of_a_bundle_run_as_shipped(bundle, build):
    import torch

    path, model = bundle
    calls = extract(path)
    assert [(call.function, call.name) for call in calls] == [("main", "affine_aaaaaaaa")] * 2
    assert [len(group) for group in distinct(calls)] == [2]
    x = np.random.default_rng(0).normal(size=(1, 96)).astype(np.float16)
    program = build(calls[0].source, calls[0].name, "fast")
    expected = [value.numpy() for value in model(torch.from_numpy(x))]
    for call, wanted, weights in zip(calls, expected, (model.w0, model.w1), strict=True):
        assert (call.grid, call.threadgroup) == ((48 * 32, 1, 1), (32, 1, 1))
        by_name = {argument.name: argument for argument in call.arguments}
        assert list(by_name) == ["x", "w", "b", "ones", "s"]
        assert by_name["x"].constant is None and by_name["x"].shape == (1, 96)
        assert isinstance(by_name["w"].constant, np.memmap)
        np.testing.assert_array_equal(by_name["w"].constant, weights.numpy())
        (found,) = run_call(program, call, {"x": x})
        assert (found.dtype, found.shape) == (np.float32, (1, 48))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"takes the values \['x'\], not \[\]"):
        run_call(program, calls[0], {})
