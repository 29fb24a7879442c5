// PTX instructions of Hopper (sm_90a), one function each, named after the instruction, and the two descriptions that they
// read: the tensor map of a tile's copy and the descriptor of a tile in shared memory. The sections named here are those
// of NVIDIA's "PTX ISA"; wgmma.mma_async itself, with its long lists of operands, is generated: wgmma.cuh. TMA and mbarrier's
// try_wait and expect_tx are there from sm_90 on; setmaxnreg needs the `a`, and wgmma is on no other architecture than sm_90a.
//
// Addresses of shared memory are those of PTX, 32-bit offsets in the CTA's window: smem_address of a pointer.
#pragma once
#include <cuda.h>
#include <fa/args.cuh>
#include <fa/sm80.cuh>

namespace fa {

// --- what an SM has: "CUDA C++ Programming Guide", "Compute Capabilities", 9.0. CUDA takes 1 KB of shared memory per CTA.
constexpr int smem_of_sm = 228 * 1024, smem_of_cta = smem_of_sm - 1024; // bytes
constexpr int registers_of_sm = 65536;

// --- mbarrier: "Parallel Synchronization and Communication Instructions", "mbarrier"
// A counter of 8 bytes in shared memory. Its phase completes when `count` threads have arrived and as many bytes as
// expected have been copied; the next phase begins at once with the same count. A waiting thread names the phase by its
// parity: the first phase is 0, and of a fresh barrier the phase before it, parity 1, counts as complete.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and the phase has to wait for `bytes` more: those of the copies that name this barrier.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for a while; true if the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n"
               "}"
               : "=r"(complete)
               : "r"(barrier), "r"(parity)
               : "memory");
  return complete;
}

// Waits until it is. What threads wrote before they arrived, and what the phase's copies wrote, is then visible to this one.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// --- fences: "Parallel Synchronization and Communication Instructions", "membar / fence"

// After mbarrier_init, before a barrier that lets anyone use what was initialised: TMA has to see it too.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Between ordinary accesses to shared memory and those of TMA and wgmma, which go another way (the async proxy).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- bar: "Parallel Synchronization and Communication Instructions", "bar". Barriers 1 to 15 of the CTA: a phase is over when
// `threads` threads, a multiple of 32, have come to it. 0 is __syncthreads'.

__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes to the barrier and doesn't wait.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- setmaxnreg: "Miscellaneous Instructions", "setmaxnreg". All warps of a warpgroup give registers back or take some, up
// to `n` per thread; taking waits until they are free. The kernel needs __launch_bounds__: else ptxas
// doesn't know the registers at entry and ignores both (C7508).

// Registers that each thread of such a CTA begins with: an equal share of the SM's, a multiple of 8. The CTA never gets
// more: who takes what nobody has given back waits for ever.
constexpr int registers_at_launch(int threads) { return registers_of_sm / threads / 8 * 8; }

template <int n> __device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(n % 8 == 0 && n >= 24 && n <= 256, "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

template <int n> __device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(n % 8 == 0 && n >= 24 && n <= 256, "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// --- TMA: "Data Movement and Conversion Instructions", "cp.async.bulk.tensor". One thread moves a box of a tensor of up to
// five dimensions. The map describes the tensor, the box and its place in shared memory; c0 to c4 are the coordinates
// of the box's first element, innermost first. What lies outside of the tensor is read as 0 and not written.
//
// A kernel takes its maps as a parameter, `const __grid_constant__ Maps maps`. A launch copies the parameters: the launcher's
// own maps may go when it returns, the copy lasts as long as the grid. TMA is given the address of a map in parameter,
// constant or global memory. Without __grid_constant__, a kernel that takes the address of a parameter has a copy of it in
// each thread's local memory, which TMA can't read. A map holds its tensor's address, sizes and strides, so every launch
// makes its own.

// To shared memory; `barrier` hears of the bytes, those outside of the tensor included.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0,
                                                        int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// To global memory, as part of this thread's next group of copies.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(const CUtensorMap *map, uint32_t from, int c0, int c1, int c2,
                                                        int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most the n youngest groups of this thread still read shared memory.
template <int n> __device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  static_assert(n >= 0, "a number of groups");
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}

// A tile of `rows` rows of a tensor (B, H, N, d) of 16-bit elements, d a multiple of 64, as one box:
// panels of 64 columns, (d / 64, rows, 64), one behind the other, 128 bytes to a row. Within eight rows the 16-byte chunks
// trade places, chunk ^ row % 8 (CU_TENSOR_MAP_SWIZZLE_128B), which wgmma undoes as it reads: 1024-byte aligned.
// Coordinates are (0, row, 0, h, b). cudaErrorInvalidValue for strides that TMA can't walk.
//
// The strides {row, 128, head, batch} don't increase: panels are 128 bytes apart, rows more, and heads may be closer together
// than rows. cuda.h describes each stride as a multiple of the one before it, as in a dense tensor, but the conditions that
// it names are multiples of 16 below 2^40. An address is the sum of coordinate times stride, and whether an element is
// outside is decided by each coordinate and its own size: neither depends on the order of the strides.
//
// "Tensor Map Object Management" of the CUDA Driver API, cuTensorMapEncodeTiled; found at run time, without -lcuda.
inline cudaError_t encode_tile(CUtensorMap *map, int32_t dtype, const void *base, const int64_t (&stride)[3], int B,
                               int H, int N, int d, int rows) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<decltype(encode)>(found);
  }
  // In bytes, of all dimensions but the innermost. That of a dimension with one element is never used, but looked at.
  const auto bytes = [d](int64_t elements, int n) { return cuuint64_t(n == 1 ? 2 * d : 2 * elements); };
  const cuuint64_t sizes[] = {64, cuuint64_t(N), cuuint64_t(d / 64), cuuint64_t(H), cuuint64_t(B)};
  const cuuint64_t strides[] = {bytes(stride[2], N), 128, bytes(stride[1], H), bytes(stride[0], B)};
  const cuuint32_t box[] = {64, cuuint32_t(rows), cuuint32_t(d / 64), 1, 1}, steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, dtype == FA_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
             const_cast<void *>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// --- wgmma: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". Four warps, a warpgroup,
// multiply (64, 16) by (16, N); warp w of the CTA holds rows 16 (w % 4) to 16 (w % 4) + 15, laid out as mma_m16n8k16's. The
// instruction only starts the product: registers that it reads or writes belong to it until a wait.

// Before the first product, and before one that uses registers written since the last fence: what was written is in them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products since the last commit become a group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the n youngest groups of this warpgroup are under way. PTX leaves undefined what a thread reads that
// looks at a product's sums earlier. The statement names no sums, and "memory" orders accesses to memory, not arithmetic on
// registers. It is ptxas that keeps the order: it knows the registers of each product under way, and where one is read
// early, it moves the wait up without a message, adds a wait (C7517), or runs the products one after the other (C7514).
// So too early a read costs the overlap, not the result. (pin() after the wait would tie the sums to it. It changes no
// instruction of 30 and 31, and doesn't keep the wait from moving up.)
template <int n> __device__ __forceinline__ void wgmma_wait_group() {
  static_assert(n >= 0 && n < 8, "a number of groups");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Sums that the program sets while another product is under way are in their registers from here on. Without it ptxas may
// put that off until it finds the next product waiting for them, and then serialises products (C7515).
template <int n> __device__ __forceinline__ void pin(float (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3]));
}

// --- "Matrix Descriptor Format": how wgmma finds an operand in shared memory. Of the panels that encode_tile
// describes, eight rows of 128 bytes are what the swizzle permutes; they lie `stride` = 1024 bytes apart, and the operand's
// next 64 columns `leading` bytes further on. Addresses count 16 bytes: adding n >> 4 to a descriptor moves it by n bytes.

// Are these, bytes of tiles or places where they begin, whole numbers of what the swizzle permutes?
template <typename... Bytes> constexpr bool whole_swizzles(Bytes... bytes) { return ((bytes % 1024 == 0) && ...); }

__device__ constexpr uint64_t matrix_descriptor(uint32_t smem, uint32_t leading, uint32_t stride) {
  constexpr uint64_t swizzle_128B = 1;
  return uint64_t(smem >> 4 & 0x3fff) | uint64_t(leading >> 4 & 0x3fff) << 16 | uint64_t(stride >> 4 & 0x3fff) << 32 |
         swizzle_128B << 62;
}

// The columns of the tile are what is summed over (K-major, no transposition): Q and K of Q K^T. 16 columns, a step, are
// 32 bytes of a row, and `leading` is not used; the step after the fourth lies in the next panel.
__device__ constexpr uint64_t k_major(uint32_t smem) { return matrix_descriptor(smem, 16, 1024); }

// From the descriptor of a K-major tile of `rows` rows to that of its step k.
__device__ constexpr uint64_t k_major_step(int k, int rows) { return (k / 4 * rows * 128 + k % 4 * 32) >> 4; }

// The rows of the tile are what is summed over (MN-major, transposed): V of P V. 16 rows, a step, are 2048 bytes.
__device__ constexpr uint64_t mn_major(uint32_t smem, int rows) { return matrix_descriptor(smem, rows * 128, 1024); }

__device__ constexpr uint64_t mn_major_step(int k) { return (k * 2048) >> 4; }

} // namespace fa
