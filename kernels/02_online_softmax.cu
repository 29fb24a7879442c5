// 02_online_softmax: softmax in one pass over memory
//
// idea:      A running (m, l) summarises any part of a row, and two of them merge: so a row needs to be read only once.
// changed:   01's three passes over S become one: each thread summarises the elements it holds in registers,
//            then threads, warps and (for long rows) blocks merge their summaries
// op:        softmax
// inputs:    S (rows,N) fp32, contiguous; any N
// outputs:   P (rows,N) fp32, LSE (rows) fp32
// dtypes:    fp32
// tiles:     N <= 1024:  one warp per row, four to a block, threads=128, up to 32 elements each (bounds: 3 less if N % 4)
//            N <= 32768: one block per row, threads=64 to threads=1024, 32 elements each
//            longer:     a row is cut into slices of up to 16384, threads=512 each; S is then read twice
// arch:      sm_75
// paper:     Online normalizer calculation for softmax, Algorithm 3 and section 3.1 (arXiv 1805.02867)
// speed:     H200, N = 512 to 16384 by powers of two: 96 % of a device copy's speed (1023 and 4097: 83 %), 1.0 to 2.1 x
//            torch.softmax. Slower at N = 256 (0.97 x) and 1023 (0.91 x: a multiple of 4 would fit the size before); rows
//            past 32768 are read twice (60 %).
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

// [region: merge]
// The state of any part x of a row: m = max x, l = sum exp(x - m). No elements: (-inf, 0).
struct State {
  float m, l;
};

// The state of two parts together. Associative and commutative, (-inf, 0) is its neutral element: any order, any tree.
__device__ State merge(State a, State b) {
  const float m = fmaxf(a.m, b.m);
  const float m_finite = m == -FA_INFINITY ? 0.f : m; // both parts empty: exp(-inf - 0) = 0, while -inf - -inf = NaN
  return {m, a.l * expf(a.m - m_finite) + b.l * expf(b.m - m_finite)};
}
// [end: merge]

// [region: merge_threads]
// One state per thread -> the merged state, in every thread of the row.
// A butterfly inside each warp; then the warps' states go through shared memory, and a butterfly over those.
template <int lanes> __device__ State merge_lanes(State s) {
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    s = merge(s, {__shfl_xor_sync(0xffffffff, s.m, mask), __shfl_xor_sync(0xffffffff, s.l, mask)});
  return s;
}

template <int threads> __device__ State merge_threads(State s) {
  s = merge_lanes<32>(s);
  if constexpr (threads > 32) {
    constexpr int warps = threads / 32;
    __shared__ State warp_state_smem[warps];
    if (threadIdx.x % 32 == 0) warp_state_smem[threadIdx.x / 32] = s;
    __syncthreads(); // every warp's state is written before any thread reads it
    s = merge_lanes<warps>(warp_state_smem[threadIdx.x % warps]);
  }
  return s;
}
// [end: merge_threads]

// A block's part of a row. Rows need not start at a multiple of 16 bytes, so vectors of four are counted from the start
// of S: the part's first vector may hold up to three elements of somebody else, and so may its last.
struct Slice {
  int64_t vector0; // index of the first vector, in units of 4 floats from the start of S
  int first, last; // the slice's own elements, counted from there: first <= e < last
};

// Where slice s of a row of N elements begins; the last one ends at N. Equal lengths, up to the remainder of N / 4.
__device__ int64_t slice_begin(int64_t N, int slices, int s) { return N / 4 * s / slices * 4; }

__device__ Slice slice_of(int64_t row, int64_t N, int slices, int s) {
  const int64_t begin = row * N + slice_begin(N, slices, s);
  const int64_t end = row * N + (s + 1 == slices ? N : slice_begin(N, slices, s + 1));
  const int64_t vector0 = begin / 4;
  return {vector0, int(begin - 4 * vector0), int(end - 4 * vector0)};
}

// [region: load]
// A float4 access needs an address that is a multiple of 16 bytes; a view of a larger tensor may start anywhere.
__device__ bool aligned16(const float *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// x (4 V) = this thread's elements of the slice, -inf where there are none: exp(-inf) = 0 leaves sums alone.
template <int threads, int V> __device__ void load(float (&x)[4 * V], const float *S, const Slice &slice) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int e = 4 * (threadIdx.x + v * threads); // neighbouring threads load neighbouring 16 bytes
    const float *p = S + 4 * slice.vector0 + e;
    if (e >= slice.first && e + 4 <= slice.last && aligned16(S)) {
      fa::load4(x + 4 * v, p);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) x[4 * v + n] = e + n >= slice.first && e + n < slice.last ? p[n] : -FA_INFINITY;
    }
  }
}

template <int threads, int V> __device__ void store(float *P, const float (&x)[4 * V], const Slice &slice) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int e = 4 * (threadIdx.x + v * threads);
    float *p = P + 4 * slice.vector0 + e;
    if (e >= slice.first && e + 4 <= slice.last && aligned16(P)) {
      fa::store4(p, x + 4 * v);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (e + n >= slice.first && e + n < slice.last) p[n] = x[4 * v + n];
    }
  }
}
// [end: load]

// [region: softmax]
// grid (rows / blockDim.y * slices), block (threads, rows of the block).
// One slice per row: P and LSE are finished here. More: only the slice's state is written, into the first two elements
// of its own part of P, where merge_slices and normalise find it.
template <int threads, int V>
__global__ __launch_bounds__(threads == 32 ? 128 : threads) void softmax(const fa_args a, int slices) {
  const int64_t row = int64_t(blockIdx.x / slices) * blockDim.y + threadIdx.y;
  if (row >= a.Nq) return; // only blocks of several rows get here, and each of their rows is one warp: no barrier
  const Slice slice = slice_of(row, a.Nk, slices, blockIdx.x % slices);
  float *P = static_cast<float *>(a.O); // (rows, N)

  float x[4 * V];
  load<threads, V>(x, static_cast<const float *>(a.Q), slice);

  // This thread's state. x keeps exp(x - m): each element needs one exp, whatever the row's maximum will be.
  State s = {-FA_INFINITY, 0.f};
#pragma unroll
  for (int e = 0; e < 4 * V; ++e) s.m = fmaxf(s.m, x[e]);
  const float m_finite = s.m == -FA_INFINITY ? 0.f : s.m;
#pragma unroll
  for (int e = 0; e < 4 * V; ++e) {
    x[e] = expf(x[e] - m_finite);
    s.l += x[e];
  }

  const State all = merge_threads<threads>(s);
  if (slices > 1) {
    if (threadIdx.x == 0) {
      float *p = P + 4 * slice.vector0 + slice.first;
      p[0] = all.m, p[1] = all.l;
    }
    return;
  }

  // P = exp(x - m) / l, from exp(x - m_thread). A row that is -inf throughout has l = 0 and P = 0, one with a NaN is all NaN.
  const float weight = all.l != 0.f ? expf(s.m - all.m) / all.l : 0.f;
#pragma unroll
  for (int e = 0; e < 4 * V; ++e) x[e] *= weight;
  store<threads, V>(P, x, slice);
  if (threadIdx.x == 0) a.LSE[row] = all.m + logf(all.l);
}
// [end: softmax]

// [region: long_rows]
// One warp per row: merges the slices' states and leaves the result where each slice left its own.
__global__ void merge_slices(const fa_args a, int slices) {
  const int64_t row = blockIdx.x;
  float *P = static_cast<float *>(a.O) + row * a.Nk; // (N)
  State state = {-FA_INFINITY, 0.f};
  for (int s = threadIdx.x; s < slices; s += 32) {
    const float *p = P + slice_begin(a.Nk, slices, s);
    state = merge(state, {p[0], p[1]});
  }
  state = merge_lanes<32>(state);
  for (int s = threadIdx.x; s < slices; s += 32) {
    float *p = P + slice_begin(a.Nk, slices, s);
    p[0] = state.m, p[1] = state.l;
  }
  if (threadIdx.x == 0) a.LSE[row] = state.m + logf(state.l);
}

// P = exp(S - m) / l, with S read a second time
template <int threads, int V> __global__ __launch_bounds__(threads) void normalise(const fa_args a, int slices) {
  const Slice slice = slice_of(blockIdx.x / slices, a.Nk, slices, blockIdx.x % slices);
  float *P = static_cast<float *>(a.O); // (rows, N)
  const State s = {P[4 * slice.vector0 + slice.first], P[4 * slice.vector0 + slice.first + 1]};
  const float m_finite = s.l != 0.f ? s.m : 0.f, l_inv = s.l != 0.f ? 1.f / s.l : 0.f;

  float x[4 * V];
  load<threads, V>(x, static_cast<const float *>(a.Q), slice);
#pragma unroll
  for (int e = 0; e < 4 * V; ++e) x[e] = expf(x[e] - m_finite) * l_inv;
  __syncthreads(); // every thread has read the state before P overwrites it
  store<threads, V>(P, x, slice);
}
// [end: long_rows]

// [region: launcher]
template <int threads, int V> cudaError_t launch(const fa_args &a, int slices, cudaStream_t stream) {
  const int rows_per_block = threads == 32 ? 4 : 1;
  const int64_t blocks = fa::ceil_div(a.Nq, rows_per_block) * slices;
  if (blocks > fa::max_grid_x) return cudaErrorInvalidValue;
  softmax<threads, V><<<dim3(blocks), dim3(threads, rows_per_block), 0, stream>>>(a, slices);
  return cudaGetLastError();
}

// Q holds the scores S, O receives P: rows = Nq, N = Nk, B = H = D = 1.
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  if (!fa::is_fp32(a)) return cudaErrorInvalidValue;

  // A block has room for 4 V elements per thread. Slices of rows whose N is no multiple of 4 start up to 3 elements into
  // their first vector and may take up to 3 elements more than their share.
  const int64_t N = a.Nk, odd = N % 4 ? 1 : 0;
  if (N + 3 * odd <= 128) return launch<32, 1>(a, 1, stream);
  if (N + 3 * odd <= 256) return launch<32, 2>(a, 1, stream);
  if (N + 3 * odd <= 512) return launch<32, 4>(a, 1, stream);
  if (N + 3 * odd <= 1024) return launch<32, 8>(a, 1, stream);
  if (N + 3 * odd <= 2048) return launch<64, 8>(a, 1, stream);
  if (N + 3 * odd <= 4096) return launch<128, 8>(a, 1, stream);
  if (N + 3 * odd <= 8192) return launch<256, 8>(a, 1, stream);
  if (N + 3 * odd <= 16384) return launch<512, 8>(a, 1, stream);
  if (N + 3 * odd <= 32768) return launch<1024, 8>(a, 1, stream);

  const int64_t slices = fa::ceil_div(N, 16384 - 8 * odd);
  if (cudaError_t error = launch<512, 8>(a, int(slices), stream)) return error;
  merge_slices<<<dim3(a.Nq), 32, 0, stream>>>(a, int(slices)); // after softmax, before normalise: one stream, in order
  normalise<512, 8><<<dim3(a.Nq * slices), 512, 0, stream>>>(a, int(slices));
  return cudaGetLastError();
}
// [end: launcher]
