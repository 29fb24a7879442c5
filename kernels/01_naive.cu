// 01_naive: attention as three kernels, S and P through HBM
//
// idea:      O = softmax(scale Q K^T) V done literally: one kernel per operation, every intermediate written to HBM and read back.
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp32, any D
// outputs:   O (B,H,Nq,D) fp32, LSE (B,H,Nq) fp32
// dtypes:    fp32
// workspace: S (B,H,Nq,Nk) fp32; P (B,H,Nq,Nk) fp32
// tiles:     scores, output: one thread per element, threads=256 (16 x 16)
//            softmax: one warp per row, threads=128
// arch:      sm_75
// paper:     FlashAttention, Algorithm 0 (arXiv 2205.14135)
// speed:     H200, N >= 1024: 1.4 TFLOP/s at every D: 0.05 to 0.09 of SDPA MATH, in fp32 with TF32 off.
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

constexpr int tile = 16; // blocks of 16 x 16 threads: x along a row of the result, y along its rows
constexpr int rows_per_block = 4;

// [region: scores]
// S (B,H,Nq,Nk) = scale Q K^T. Each thread reads a row of Q and a row of K: 2 d floats from memory for d FMAs.
__global__ void scores(const fa_args a) {
  const int tiles = int(fa::ceil_div(a.Nq, tile));
  const int head = blockIdx.x / tiles, b = head / a.H, h = head % a.H;
  const int i = blockIdx.x % tiles * tile + threadIdx.y; // query
  const int j = blockIdx.y * tile + threadIdx.x;         // key
  if (i >= a.Nq || j >= a.Nk) return;

  const float *q = static_cast<const float *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1] + i * a.Q_stride[2]; // (d)
  const float *k = static_cast<const float *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1] + j * a.K_stride[2]; // (d)
  float *S = static_cast<float *>(a.workspace[0]); // (B, H, Nq, Nk)

  float s = 0.f;
  for (int c = 0; c < a.D; ++c) s += q[c] * k[c];
  S[(int64_t(head) * a.Nq + i) * a.Nk + j] = a.scale * s;
}
// [end: scores]

// [region: softmax]
// P (B,H,Nq,Nk) = softmax of each row of S, and LSE (B,H,Nq). One warp per row, three passes over it.
__global__ void softmax(const fa_args a) {
  const int64_t rows = int64_t(a.B) * a.H * a.Nq;
  const int64_t row = int64_t(blockIdx.x) * rows_per_block + threadIdx.y;
  if (row >= rows) return; // the whole warp leaves: no lane waits in the shuffles below

  const float *S = static_cast<const float *>(a.workspace[0]) + row * a.Nk; // (Nk)
  float *P = static_cast<float *>(a.workspace[1]) + row * a.Nk;             // (Nk)

  // m = max S. Without it exp(S) overflows from S = 89 on.
  float m = -FA_INFINITY;
  for (int j = threadIdx.x; j < a.Nk; j += 32) m = fmaxf(m, S[j]);
  for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, mask));
  const float m_finite = m == -FA_INFINITY ? 0.f : m; // a row of -inf: exp(-inf - 0) = 0, not NaN

  // l = sum exp(S - m)
  float l = 0.f;
  for (int j = threadIdx.x; j < a.Nk; j += 32) l += expf(S[j] - m_finite);
  for (int mask = 16; mask > 0; mask /= 2) l += __shfl_xor_sync(0xffffffff, l, mask);
  const float l_inv = l > 0.f ? 1.f / l : 0.f;

  // P = exp(S - m) / l
  for (int j = threadIdx.x; j < a.Nk; j += 32) P[j] = expf(S[j] - m_finite) * l_inv;
  if (threadIdx.x == 0) a.LSE[row] = m + logf(l);
}
// [end: softmax]

// [region: output]
// O (B,H,Nq,d) = P V. Each thread reads a row of P and a column of V.
__global__ void output(const fa_args a) {
  const int tiles = int(fa::ceil_div(a.Nq, tile));
  const int head = blockIdx.x / tiles, b = head / a.H, h = head % a.H;
  const int i = blockIdx.x % tiles * tile + threadIdx.y; // query
  const int c = blockIdx.y * tile + threadIdx.x;         // column of V
  if (i >= a.Nq || c >= a.D) return;

  const float *P = static_cast<const float *>(a.workspace[1]) + (int64_t(head) * a.Nq + i) * a.Nk; // (Nk)
  const float *V = static_cast<const float *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1];        // (Nk, d)
  float *O = static_cast<float *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1];                    // (Nq, d)

  float o = 0.f;
  for (int j = 0; j < a.Nk; ++j) o += P[j] * V[j * a.V_stride[2] + c];
  O[i * a.O_stride[2] + c] = o;
}
// [end: output]

// [region: launcher]
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  if (!fa::is_fp32(a)) return cudaErrorInvalidValue;

  const int64_t heads = int64_t(a.B) * a.H, query_tiles = heads * fa::ceil_div(a.Nq, tile);
  const int64_t key_tiles = fa::ceil_div(a.Nk, tile), column_tiles = fa::ceil_div(a.D, tile);
  const int64_t row_blocks = fa::ceil_div(heads * a.Nq, rows_per_block);
  if (query_tiles > fa::max_grid_x || row_blocks > fa::max_grid_x || key_tiles > fa::max_grid_y)
    return cudaErrorInvalidValue;

  // Kernels on one stream run one after the other: S is complete before softmax reads it, P before output does.
  scores<<<dim3(query_tiles, key_tiles), dim3(tile, tile), 0, stream>>>(a);
  softmax<<<dim3(row_blocks), dim3(32, rows_per_block), 0, stream>>>(a);
  output<<<dim3(query_tiles, column_tiles), dim3(tile, tile), 0, stream>>>(a);
  return cudaGetLastError();
}
// [end: launcher]
