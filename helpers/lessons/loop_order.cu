// loop_order: a naive FlashAttention whose two loops can be swapped by exchanging two lines
//
// One thread per query row, one warp and one CTA per head; O, m and l stay in HBM in either order.
// D:         64
// workspace: m (B,H,Nq) fp32; l (B,H,Nq) fp32
#include <fa/args.cuh>
#include <fa/math.cuh>
constexpr int d = 64, Br = 32, Bc = 32;

__device__ const float *head(const void *X, const int64_t (&stride)[3], int H) { // this CTA's head of X, (N, d)
  return (const float *)X + blockIdx.x / H * stride[0] + blockIdx.x % H * stride[1];
}
__device__ void load_tile(float *X_smem, const float *X, int64_t stride, int r0, int N) { // rows r0 .. r0 + 32
  const int r = r0 + threadIdx.x;
  for (int x = 0; x < d; ++x) X_smem[threadIdx.x * d + x] = r < N ? X[r * stride + x] : 0.f;
}

// p (Bc) = scale q K_j^T for one row; returns the maximum of m and p
__device__ float scores(float *p, const float *q, const float *K_smem, int keys, float scale, float m) {
  for (int c = 0; c < keys; ++c) {
    float s = 0.f;
    for (int x = 0; x < d; ++x) s += q[x] * K_smem[c * d + x]; // two values from shared memory, one multiply-add
    p[c] = scale * s;
    m = fmaxf(m, p[c]);
  }
  return m;
}

// p (Bc) becomes P~, and the row's o (d), m and l in HBM take the tile in; returns the new l
__device__ float merge(float *o, float *m, float *l, float *p, float m_new, const float *V_smem, int keys, bool first) {
  const float m_finite = m_new == -FA_INFINITY ? 0.f : m_new; // where all scores so far are -inf, each exp is 0
  const float kept = first ? 0.f : expf(*m - m_finite) * *l;
  float l_new = kept;
  for (int c = 0; c < keys; ++c) p[c] = expf(p[c] - m_finite), l_new += p[c];
  for (int x = 0; x < d; ++x) {
    float pv = 0.f;
    for (int c = 0; c < keys; ++c) pv += p[c] * V_smem[c * d + x];
    o[x] = l_new > 0.f ? ((first ? 0.f : kept * o[x]) + pv) / l_new : 0.f;
  }
  *m = m_new, *l = l_new;
  return l_new;
}

// Row i meets the tile of keys that starts at j0
__device__ void step(const fa_args &a, int i, int j0, const float *Q_smem, const float *K_smem, const float *V_smem,
                     float *P_smem) {
  const int64_t row = int64_t(blockIdx.x) * a.Nq + i;
  float *m = (float *)a.workspace[0] + row, *l = (float *)a.workspace[1] + row;
  float *o = (float *)head(a.O, a.O_stride, a.H) + i * a.O_stride[2], *p = P_smem + threadIdx.x * Bc;
  const int keys = min(Bc, a.Nk - j0);
  const float m_old = j0 == 0 ? -FA_INFINITY : *m;
  const float m_new = scores(p, Q_smem + threadIdx.x * d, K_smem, keys, a.scale, m_old);
  a.LSE[row] = m_new + logf(merge(o, m, l, p, m_new, V_smem, keys, j0 == 0));
}

__global__ void naive(const fa_args a) {
  __shared__ float Q_smem[Br * d], K_smem[Bc * d], V_smem[Bc * d], P_smem[Br * Bc];
  const float *Q = head(a.Q, a.Q_stride, a.H), *K = head(a.K, a.K_stride, a.H), *V = head(a.V, a.V_stride, a.H);
  int i_was = -1, j_was = -1;
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) {
    for (int i0 = 0; i0 < a.Nq; i0 += Br) {
      __syncthreads(); // the tiles have been read before they are overwritten
      if (j0 != j_was) load_tile(K_smem, K, a.K_stride[2], j0, a.Nk), load_tile(V_smem, V, a.V_stride[2], j0, a.Nk);
      if (i0 != i_was) load_tile(Q_smem, Q, a.Q_stride[2], i0, a.Nq);
      __syncthreads(); // and are written before they are read
      if (i0 + threadIdx.x < a.Nq) step(a, i0 + threadIdx.x, j0, Q_smem, K_smem, V_smem, P_smem);
      i_was = i0, j_was = j0;
    }
  }
}

extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
  naive<<<a->B * a->H, Br, 0, stream>>>(*a);
  return cudaGetLastError();
}
