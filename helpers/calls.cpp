// A program around one kernel: calls its fa_launch as often as the command line says and waits for each to end. What
// compute-sanitizer starts in place of Python: nothing here but the kernel and its tensors, each an allocation of its own.
//
//   program <12 integers> ...   op (0 attention, 1 softmax), dtype, B, H, Nq, Nk, D, bytes of an element, and the bytes of
//                               four workspace tensors
// Inputs are random; outputs and workspace are left as cudaMalloc gives them. Exit code: CUDA's first error, 0 if none.
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fa/args.cuh>
#include <vector>

namespace {

constexpr size_t gap = 1 << 16; // unallocated bytes between tensors: beyond the end of one is not inside the next

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

void call(const long (&n)[12]) {
  const bool softmax = n[0] == 1;
  fa_args a = {};
  a.dtype = int(n[1]), a.B = int(n[2]), a.H = int(n[3]), a.Nq = int(n[4]), a.Nk = int(n[5]), a.D = int(n[6]);
  a.scale = 1.f / 8;
  const size_t heads = size_t(a.B) * a.H, row = softmax ? a.Nk : a.D, queries = heads * a.Nq, keys = heads * a.Nk;

  Memory memory;
  a.Q = random(memory, queries * row, a.dtype);
  a.K = softmax ? nullptr : random(memory, keys * row, a.dtype);
  a.V = softmax ? nullptr : random(memory, keys * row, a.dtype);
  a.O = memory.allocate(queries * row * size_t(n[7]));
  a.LSE = static_cast<float *>(memory.allocate(queries * sizeof(float)));
  for (int i = 0; i < 4; ++i) a.workspace[i] = memory.allocate(size_t(n[8 + i]));
  memory.free_gaps();

  const auto strides = [&](int64_t (&stride)[3],
                           int64_t rows) { // those of a contiguous tensor; 0
                                           // along a dimension of 1
    stride[0] = a.B > 1 ? a.H * rows * int64_t(row) : 0;
    stride[1] = a.H > 1 ? rows * int64_t(row) : 0;
    stride[2] = rows > 1 ? int64_t(row) : 0;
  };
  strides(a.Q_stride, a.Nq), strides(a.O_stride, a.Nq);
  if (!softmax) strides(a.K_stride, a.Nk), strides(a.V_stride, a.Nk);

  require(fa_launch(&a, nullptr));
  require(cudaDeviceSynchronize());
}

} // namespace

int main(int count, char **words) {
  for (int i = 1; i + 12 <= count; i += 12) {
    long n[12];
    for (int k = 0; k < 12; ++k) n[k] = std::atol(words[i + k]);
    call(n);
  }
}
