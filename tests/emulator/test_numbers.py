"""Intrinsics, types and 16-bit arithmetic against values worked out by hand, and against PyTorch's conversions."""

import math

import pytest
import torch
from emulated import build, launch, program, run

EXPRESSIONS = {
    # expression: value
    "__popc(0xf0f0u)": 8,
    "__popcll(0xffffffffffull)": 40,
    "__clz(1)": 31,
    "__clz(0)": 32,
    "__clzll(1ll << 40)": 23,
    "__ffs(8)": 4,
    "__ffs(0)": 0,
    "__brev(1u) == 0x80000000u": 1,
    "__byte_perm(0x33221100u, 0x77665544u, 0x7531u) == 0x77553311u": 1,
    "__byte_perm(0x00000080u, 0u, 0x8888u) == 0x80808080u": 1,  # no sign, unlike prmt
    "__funnelshift_l(0x80000000u, 1u, 1) == 3u": 1,
    "__funnelshift_r(1u, 1u, 1) == 0x80000000u": 1,
    "__mulhi(1 << 30, 8)": 2,
    "__umulhi(1u << 31, 4u)": 2,
    "__mul24(3, -5)": -15,
    "__float2int_rn(2.5f)": 2,
    "__float2int_rn(3.5f)": 4,
    "__float2int_rz(-2.7f)": -2,
    "__float2int_rd(-2.1f)": -3,
    "__float2int_ru(2.1f)": 3,
    "__float2int_rz(3e10f) == 2147483647": 1,
    '__float2int_rz(nanf(""))': 0,
    "__float2uint_rz(-3.0f)": 0,
    "__umul24(0x1000003u, 5u)": 15,
    "__brevll(2ull) == 1ull << 62": 1,
    "float(__mul64hi(-(1ll << 62), 8))": -2,
    "float(__umul64hi(1ull << 63, 6))": 3,
    "__dp4a(0x01ff0203, 0x02030405, 7)": 7 + 2 - 3 + 8 + 15,
    "__dp4a(0x01ff0203u, 0x02030405u, 7u)": 7 + 2 + 765 + 8 + 15,
    "__sad(-5, 7, 1u) + __usad(7u, 5u, 1u)": 16,
    "__sad(-2147483647 - 1, 2147483647, 1u)": 0,  # as unsigned, round the end
    "__hadd(-3, -4)": -4,  # rounded down
    "__rhadd(2147483647, 2147483647) == 2147483647": 1,
    "__uhadd(4294967295u, 4294967295u) == 4294967295u": 1,
    "__urhadd(2u, 3u)": 3,
    "__funnelshift_lc(7u, 1u, 40) == 7u && __funnelshift_rc(7u, 3u, 40) == 3u": 1,
    "__funnelshift_lc(0x80000000u, 1u, 1) == 3u && __funnelshift_rc(1u, 1u, 1) == 0x80000000u": 1,
    "umin(1u, 4294967295u) + umax(2u, 3u) + llmin(-1ll, 4ll) + llmax(5ll, -6ll)": 8,
    "float(ullmin(1ull, ~0ull) + ullmax(2ull, 3ull))": 4,
    "float(__float2ll_rn(2.5f) + __float2ll_ru(2.1f) + __float2ll_rd(-2.1f))": 2,
    "__float2ll_rz(1e30f) == 9223372036854775807ll && __float2ll_rz(-1e30f) == -9223372036854775807ll - 1": 1,
    '__float2ll_rz(nanf("")) == -9223372036854775807ll - 1': 1,  # PTX ISA, "cvt"
    '__float2ull_rz(-3.0f) == 0 && __float2ull_rz(1e30f) == ~0ull && __float2ull_rz(nanf("")) == 1ull << 63': 1,
    "__float2uint_ru(0.5f) + __float2uint_rd(1.9f)": 2,
    "__double2int_rz(-2.7) + __double2int_rn(3.5)": 2,
    "__double2int_rz(1e10) == 2147483647 && __double2int_rz(2147483647.5) == 2147483647": 1,
    '__double2int_rz(nan("")) == -2147483647 - 1': 1,
    "__double2uint_rz(4294967295.9) == 4294967295u && __double2uint_rn(-0.4) == 0": 1,
    "float(__double2ll_rd(-0.5)) + float(__double2ull_ru(0.5))": 0,
    "__ll2float_rn(16777217ll)": 16777216,
    "__ull2float_rn(~0ull)": 2.0**64,
    "__double2float_rn(1 + 0x1p-24)": 1,
    "__int2double_rn(-7) + __uint2double_rn(8u) + __ll2double_rn(-9ll) + __ull2double_rn(10ull)": 2,
    "__fma_rn(1 + 0x1p-30, 1 - 0x1p-30, -1.0) * 0x1p60": -1,
    "__dsqrt_rn(__dadd_rn(8.0, __dmul_rn(2.0, 4.0))) + __ddiv_rn(__dsub_rn(1.0, 2.0), 4.0) + __drcp_rn(4.0)": 4,
    "sizeof(__cvta_generic_to_global(out))": 8,
    "__float_as_int(1.0f) == 0x3f800000": 1,
    "__int_as_float(0x40000000)": 2,
    "__uint_as_float(__float_as_uint(-1.5f))": -1.5,
    "__double2loint(__hiloint2double(3, -4))": -4,
    "__double2hiint(__hiloint2double(3, -4))": 3,
    "__hiloint2double(0x40080000, 0)": 3,
    "__saturatef(1.5f)": 1,
    '__saturatef(nanf(""))': 0,
    "__fmaf_rn(2.0f, 3.0f, 4.0f)": 10,
    "fmaf(1.0f + 0x1p-12f, 1.0f - 0x1p-12f, -1.0f) * 0x1p24f": -1,  # the product is not rounded on the way
    "rsqrtf(16.0f)": 0.25,
    "__frsqrt_rn(4.0f)": 0.5,
    "__frcp_rn(8.0f)": 0.125,
    "__fdividef(1.0f, 4.0f)": 0.25,
    "__fdividef(0x1p120f, 0x1.8p126f)": 0,  # a divisor above 2^126 has no reciprocal
    "isnan(__fdividef(INFINITY, 0x1p127f))": 1,
    "isnan(__powf(-2.0f, 2.0f))": 1,  # exp2(y log2(x))
    "__expf(0.0f)": 1,
    "__logf(1.0f)": 0,
    "__log2f(8.0f)": 3,
    "__exp10f(2.0f)": 100,
    "__powf(2.0f, 5.0f)": 32,
    "exp2f(-INFINITY)": 0,
    "isinf(-INFINITY) + 2 * isnan(INFINITY - INFINITY) + 4 * isfinite(1.0f) + 8 * signbit(-1.0f)": 15,  # without std::
    "max(-1, 2)": 2,
    "max(2.0f, -1.0f)": 2,
    "1 / max(-0.0f, 0.0f)": math.inf,
    "max(__int_as_float(0x7f800001), 1.0f)": 1,  # a signalling NaN
    "min(3u, 2)": 2,
    'max(nanf(""), 1.0f)': 1,  # as CUDA's: the number wins
    "float(min(7LL, 5LL))": 5,
    "sizeof(float3)": 12,
    "alignof(float4)": 16,
    "alignof(float2)": 8,
    "alignof(uchar4)": 4,
    "sizeof(double2)": 16,
    "make_float4(1, 2, 3, 4).w": 4,
    "dim3(5).y": 1,
    "warpSize": 32,
    "float(threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z)": 0,
    "blockDim.x * 100 + gridDim.x": 101,
    "float(__hadd(__float2half(1.0f), __float2half(0x1p-11f)))": 1,  # a tie goes to even
    "float(__hadd(__float2half(1.0f), __float2half(0x1.8p-11f)))": 1 + 2**-10,
    "float(__hmul(__float2half(300.0f), __float2half(300.0f)))": math.inf,
    # the product is not rounded on the way
    "float(__hfma(__float2half(1.0f + 0x1p-9f), __float2half(1.0f + 0x1p-9f), __float2half(-1.0f)))": 2**-8 + 2**-18,
    # 2^-31 below a tie, which a sum in float would fall on
    "float(__hfma(__float2half(0x1.004p0f), __float2half(0x1.ff8p-12f), __float2half(0x1.004p0f)))": 1 + 2**-10,
    "float(__hfma(__float2bfloat16(0x1.02p-4f), __float2bfloat16(0x1p-4f), __float2bfloat16(1.0f)))": 1 + 2**-7,
    # 2^-60 below a tie, which a sum in double would fall on
    "float(__hfma(__float2bfloat16(7.0f), __float2bfloat16(37.0f), __float2bfloat16(-0x1p-60f)))": 258,
    "float(__double2half(1.0 + 0x1p-11 + 0x1p-40))": 1 + 2**-10,  # not rounded twice
    "float(half(3))": 3,
    "float(__half(1.0f) / __half(3.0f))": 0.333251953125,
    "float(__hmax(CUDART_NAN_FP16, half(1.0f)))": 1,
    "__hisnan(__hmax_nan(CUDART_NAN_FP16, half(1.0f)))": 1,
    "1 / float(__hmin(half(0.0f), half(-0.0f)))": -math.inf,
    "float(__hmax(__ushort_as_half(0x7c01), half(1.0f)))": 1,
    "__half2(half(1.0f), half(2.0f)) != __half2(half(1.0f), half(3.0f))": 0,  # both have to differ
    "__half2(half(1.0f), half(2.0f)) != __half2(half(3.0f), half(4.0f))": 1,
    "__bfloat16_as_ushort(__nv_bfloat16(0x4340000000000001ll)) == 0x5e87": 1,  # just above a tie, not rounded twice
    "__hisinf(__hneg(CUDART_INF_FP16))": -1,
    "__low2float(__floats2half2_rn(1.0f, 2.0f))": 1,
    "__high2float(__lowhigh2highlow(__floats2half2_rn(1.0f, 2.0f)))": 1,
    "__half22float2(__hadd2(__float2half2_rn(1.0f), __floats2half2_rn(1.0f, 2.0f))).y": 3,
    "__hbeq2(__float2half2_rn(1.0f), __floats2half2_rn(1.0f, 2.0f))": 0,
    "float(__hlt2(__float2half2_rn(1.0f), __floats2half2_rn(1.0f, 2.0f)).y)": 1,
    "float(hexp2(half(3.0f)))": 8,
    "float(h2sqrt(__float2half2_rn(9.0f)).x)": 3,
    "__half_as_ushort(half(1.0f)) == 0x3c00": 1,
    "float(__ushort_as_half((unsigned short)1)) * 0x1p24f": 1,
    "__bfloat16_as_ushort(__float2bfloat16(1.0f)) == 0x3f80": 1,
    "__bfloat1622float2(__floats2bfloat162_rn(1.0f, 2.0f)).y": 2,
    "float(__float2bfloat16(1.0f) + __float2bfloat16(0x1p-8f))": 1,
    "float(__half2(half(1.0f), half(2.0f)).y)": 2,
    "float(__nv_bfloat162(nv_bfloat16(1.0f), nv_bfloat16(2.0f)).y)": 2,
    "float(__hmax2_nan(__float2half2_rn(1.0f), __floats2half2_rn(0.0f, 2.0f)).y)": 2,
    "float(__hadd_sat(half(0.75f), half(0.75f)))": 1,
    "float(__hfma2_relu(__float2bfloat162_rn(2.0f), __float2bfloat162_rn(-3.0f), __float2bfloat162_rn(1.0f)).x)": 0,
    "__half2float(__float2half_rz(65519.0f))": 65504,
    "__bfloat162float(__float2bfloat16_rz(-1.999f))": -1.9921875,
    "__half2uint_rz(__ushort2half_rn((unsigned short)7))": 7,
    "sizeof(half2)": 4,
    "alignof(__nv_bfloat162)": 4,
    "sizeof(__cvta_generic_to_shared(out))": 8,
}


def test_expressions():
    body = "\n".join(f"out[{i}] = static_cast<float>({e});" for i, e in enumerate(EXPRESSIONS))
    out = run(body, len(EXPRESSIONS), shape="1, 1")
    wrong = {e: (got, want) for (e, want), got in zip(EXPRESSIONS.items(), out.tolist(), strict=True) if got != want}
    assert not wrong, f"(got, wanted): {wrong}"


@pytest.mark.parametrize(("cuda", "dtype"), [("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)])
def test_every_16_bit_pattern_widens_as_in_pytorch(cuda, dtype):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    body = f"const int i = blockIdx.x * 256 + threadIdx.x; out[i] = static_cast<float>(reinterpret_cast<const {cuda}*>(a.Q)[i]);"
    out = run(body, 65536, shape="256, 256", Q=patterns)
    assert torch.equal(out.nan_to_num(nan=12345.0), patterns.float().nan_to_num(nan=12345.0))


@pytest.mark.parametrize(("cuda", "dtype"), [("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)])
def test_narrowing_rounds_to_nearest_even_as_in_pytorch(cuda, dtype):
    patterns = torch.arange(65535, dtype=torch.int32)
    value, following = (p.to(torch.int16).view(dtype).double() for p in (patterns, patterns + 1))
    value, following = (v[value.isfinite() & following.isfinite()] for v in (value, following))
    tie = ((value + following) / 2).float()  # exact
    up, down = (torch.nextafter(tie, torch.tensor(side)) for side in (math.inf, -math.inf))
    specials = torch.tensor([math.inf, -math.inf, 65519.99, 65520.0, -65520.0, 1e38, 3.3961775e38, 3.4e38, -0.0, 1e-45])
    x = torch.cat([value.float(), tie, up, down, specials])
    x = torch.cat([x, torch.zeros(-len(x) % 256)])
    out = torch.zeros(len(x), dtype=dtype)
    body = f"const int i = blockIdx.x * 256 + threadIdx.x; reinterpret_cast<{cuda}*>(a.O)[i] = {cuda}(in[i]);"
    run(body, out, shape=f"{len(x) // 256}, 256", Q=x)
    assert torch.equal(out.view(torch.int16), x.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_arithmetic_rounds_once(dtype):
    torch.manual_seed(0)
    cuda = "__half" if dtype == torch.float16 else "__nv_bfloat16"
    x, y = (torch.randint(-32768, 32767, (1 << 14,), dtype=torch.int16).view(dtype) for _ in range(2))
    out = torch.zeros(4, len(x), dtype=dtype)
    body = f"""const int i = blockIdx.x * 256 + threadIdx.x, count = gridDim.x * 256;
        const {cuda} x = static_cast<const {cuda}*>(a.Q)[i], y = static_cast<const {cuda}*>(a.K)[i];
        {cuda}* o = static_cast<{cuda}*>(a.O) + i;
        o[0] = x + y; o[count] = x - y; o[2 * count] = x * y; o[3 * count] = x / y;"""
    run(body, out, shape=f"{len(x) // 256}, 256", Q=x, K=y)
    # In float64 sums, products and quotients of 16-bit floats are exact or have digits to spare for one rounding.
    X, Y = x.double(), y.double()
    exact = torch.stack([X + Y, X - Y, X * Y, X / Y]).to(dtype)
    assert torch.equal(out.float().nan_to_num(nan=0.125), exact.float().nan_to_num(nan=0.125))


def test_vector_loads_and_stores():
    body = "reinterpret_cast<float4*>(out)[threadIdx.x] = __ldg(reinterpret_cast<const float4*>(in) + 7 - threadIdx.x);"
    x = torch.randn(32)
    assert torch.equal(run(body, shape="1, 8", Q=x), x.view(8, 4).flip(0).flatten())


def test_constants_device_variables_templates_and_lambdas():
    before = """
    __constant__ float weights[3] = {1, 10, 100};
    __device__ float scale = 2;
    template <int n, class F> __device__ float sum(F f) { float s = 0; for (int i = 0; i < n; ++i) s += f(i); return s; }
    """
    assert (
        run("out[threadIdx.x] = sum<3>([&](int i) { return scale * weights[i]; });", 1, shape="1, 1", before=before)
        == 222
    )


def test_the_host_reads_variables_back_and_a_kernel_waits_for_the_one_before():
    before = "__constant__ float weights[2]; __device__ float seen[2];"
    launches = """
    const float w[2] = {3, 4};
    cudaMemcpyToSymbolAsync(weights, w, 8, 0, cudaMemcpyHostToDevice, stream);
    kernel<<<1, 1>>>(a);
    float back = 0;
    if (cudaMemcpyFromSymbol(&back, seen, 4, 4) != cudaSuccess) return cudaErrorUnknown;
    back += 1;
    cudaMemcpy(a.O, &back, 4, cudaMemcpyHostToDevice);
    if (cudaMemcpyFromSymbol(&back, seen, 8, 4) != cudaErrorInvalidValue) return cudaErrorUnknown;
    cudaGetLastError();"""
    body = (
        "cudaGridDependencySynchronize(); out[0] = seen[1] = 2 * weights[1]; cudaTriggerProgrammaticLaunchCompletion();"
    )
    assert launch(build(program(body, before=before, launch=launches)), torch.zeros(1)) == 9


def test_indices_of_threads_and_blocks_in_three_dimensions():
    body = """const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const dim3 size = blockDim; const uint3 me = threadIdx;
    out[t + size.x * size.y * size.z * b] += 1 + (me.x == threadIdx.x && me.z == threadIdx.z);"""
    out = run(body, torch.zeros(2 * 3 * 4 * 5 * 2 * 3), shape="dim3(5, 2, 3), dim3(2, 3, 4)")
    assert torch.equal(out, torch.full_like(out, 2))
