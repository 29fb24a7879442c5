"""A small kernel for the tests: attention on fp16 and bf16 inputs, a thread per query row, every sum in float32.

It needs no tensor cores and no inline PTX, so it runs wherever a plain kernel does, and it is right by the error rule.
"""

from pathlib import Path

SOURCE = r"""// sixteen: attention on 16-bit inputs, one thread per query row
//
// idea:   products of 16-bit numbers, summed in float32
// op:     attention
// dtypes: fp16, bf16
// D:      32, 64, 128
// arch:   sm_80
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(__half &to, float x) { to = __float2half(x); }
__device__ __forceinline__ void narrow(__nv_bfloat16 &to, float x) { to = __float2bfloat16(x); }

template <typename T> __global__ void row_per_thread(const fa_args a) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= int64_t(a.B) * a.H * a.Nq) return;
  const int i = row % a.Nq, h = row / a.Nq % a.H, b = row / a.Nq / a.H;
  const T *q = static_cast<const T *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1] + i * a.Q_stride[2]; // (d)
  const T *K = static_cast<const T *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1];                     // (Nk, d)
  const T *V = static_cast<const T *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1];                     // (Nk, d)
  T *o = static_cast<T *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2];             // (d)

  float O[128] = {}, m = -FA_INFINITY, l = 0.f;
  for (int j = 0; j < a.Nk; ++j) {
    float s = 0.f;
    for (int c = 0; c < a.D; ++c) s += widen(q[c]) * widen(K[j * a.K_stride[2] + c]);
    s *= a.scale;
    const float m_new = fmaxf(m, s), finite = m_new == -FA_INFINITY ? 0.f : m_new;
    const float alpha = expf(m - finite), p = expf(s - finite);
    l = alpha * l + p;
    for (int c = 0; c < a.D; ++c) O[c] = alpha * O[c] + p * widen(V[j * a.V_stride[2] + c]);
    m = m_new;
  }
  for (int c = 0; c < a.D; ++c) narrow(o[c], l > 0.f ? O[c] / l : 0.f);
  a.LSE[row] = m + logf(l);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args a = *args;
  if (a.D > 128 || a.dtype == FA_FP32) return cudaErrorInvalidValue;
  const int blocks = fa::ceil_div(int64_t(a.B) * a.H * a.Nq, 32);
  if (a.dtype == FA_FP16) row_per_thread<__half><<<blocks, 32, 0, stream>>>(a);
  else row_per_thread<__nv_bfloat16><<<blocks, 32, 0, stream>>>(a);
  return cudaGetLastError();
}
"""


def make_rung(folder: Path, stem: str) -> str:
    """Writes the kernel as a rung of this stem into `folder`; gives the stem back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.cu").write_text(SOURCE.replace("// sixteen:", f"// {stem}:", 1))
    return stem
