// A program around one kernel: calls its fa_launch as often as the command line
// says and waits for each to end. What compute-sanitizer starts in place of
// Python: nothing here but the kernel and its tensors, each an allocation of
// its own.
//
//   program <15 integers> ...   op (0 attention, 1 softmax, 2 the backward pass),
//   dtype, B, H, Hkv, Nq, Nk, D, bytes of an
//                               element, causal, splits, and the bytes of four
//                               workspace tensors
// Inputs are random, LSE of the backward pass too; outputs and workspace are left as
// cudaMalloc gives them. Exit code: CUDA's first error, 0 if none.
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fa/model.cuh>
#include <vector>

namespace {

constexpr size_t gap = 1 << 16; // unallocated bytes between tensors: beyond the
                                // end of one is not inside the next

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorName(error));
  std::exit(int(error) & 0xff);
}

struct Memory {
  std::vector<void *> tensors, gaps;

  void *allocate(size_t bytes) {
    void *p = nullptr;
    if (bytes == 0) return p;
    gaps.emplace_back(), require(cudaMalloc(&gaps.back(), gap));
    require(cudaMalloc(&p, bytes));
    return tensors.emplace_back(p);
  }

  void free_gaps() {
    for (void *p : gaps) require(cudaFree(p));
  }

  ~Memory() {
    for (void *p : tensors) cudaFree(p);
  }
};

// n elements between -1 and 1
void *random(Memory &memory, size_t n, int dtype) {
  static uint32_t state = 1;
  const size_t bytes = n * (dtype == FA_FP32 ? 4 : 2);
  std::vector<char> host(bytes);
  for (size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u; // Numerical Recipes' generator
    const float x = float(int32_t(state)) / 2147483648.f;
    if (dtype == FA_FP32) reinterpret_cast<float *>(host.data())[i] = x;
    if (dtype == FA_FP16) reinterpret_cast<__half *>(host.data())[i] = __float2half(x);
    if (dtype == FA_BF16) reinterpret_cast<__nv_bfloat16 *>(host.data())[i] = __float2bfloat16(x);
  }
  void *p = memory.allocate(bytes);
  if (p) require(cudaMemcpy(p, host.data(), bytes, cudaMemcpyHostToDevice));
  return p;
}

constexpr int numbers = 15;

void call(const long (&n)[numbers]) {
  const bool softmax = n[0] == 1, back = n[0] == 2;
  fa_backward_args a = {};
  a.dtype = int(n[1]), a.B = int(n[2]), a.H = int(n[3]), a.Hkv = int(n[4]);
  a.Nq = int(n[5]), a.Nk = int(n[6]), a.D = int(n[7]);
  a.causal = int(n[9]), a.splits = int(n[10]), a.sequences = a.B;
  a.scale = 1.f / 8;
  const size_t row = softmax ? a.Nk : a.D, item = size_t(n[8]);
  const size_t queries = size_t(a.B) * a.H * a.Nq, keys = size_t(a.B) * a.Hkv * a.Nk;

  Memory memory;
  a.Q = random(memory, queries * row, a.dtype);
  a.K = softmax ? nullptr : random(memory, keys * row, a.dtype);
  a.V = softmax ? nullptr : random(memory, keys * row, a.dtype);
  a.O = back ? random(memory, queries * row, a.dtype) : memory.allocate(queries * row * item);
  a.LSE = static_cast<float *>(back ? random(memory, queries, FA_FP32) : memory.allocate(queries * sizeof(float)));
  a.dO = back ? random(memory, queries * row, a.dtype) : nullptr;
  a.dQ = back ? memory.allocate(queries * row * item) : nullptr;
  a.dK = back ? memory.allocate(keys * row * item) : nullptr;
  a.dV = back ? memory.allocate(keys * row * item) : nullptr;
  for (int i = 0; i < 4; ++i) a.workspace[i] = memory.allocate(size_t(n[11 + i]));
  memory.free_gaps();

  // Those of a contiguous tensor; 0 along a dimension of 1
  const auto strides = [&](int64_t (&stride)[3], int heads, int64_t rows) {
    stride[0] = a.B > 1 ? heads * rows * int64_t(row) : 0;
    stride[1] = heads > 1 ? rows * int64_t(row) : 0;
    stride[2] = rows > 1 ? int64_t(row) : 0;
  };
  for (auto *stride : {&a.Q_stride, &a.O_stride, &a.dO_stride, &a.dQ_stride}) strides(*stride, a.H, a.Nq);
  if (!softmax) {
    for (auto *stride : {&a.K_stride, &a.V_stride, &a.dK_stride, &a.dV_stride}) strides(*stride, a.Hkv, a.Nk);
  }

  require(fa_launch(&a, nullptr));
  require(cudaDeviceSynchronize());
}

} // namespace

int main(int count, char **words) {
  for (int i = 1; i + numbers <= count; i += numbers) {
    long n[numbers];
    for (int k = 0; k < numbers; ++k) n[k] = std::atol(words[i + k]);
    call(n);
  }
}
