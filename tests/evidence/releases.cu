// A pipeline of one place: a thread copies a row into shared memory (cp.async.bulk), 128 threads read it and give the place
// back on an mbarrier, in one of four ways. Not a rung: tests ask racecheck and the emulator what they make of it.
#include <fa/bulk.cuh>
#include <fa/sm90.cuh>

constexpr int readers = 128;
enum release {
  every_thread = 1,       // each for itself
  one_per_warp = 2,       // a lane, once its warp has met
  one_for_all = 3,        // a thread, once all have met
  one_unsynchronised = 4, // a thread that knows nothing of the others: wrong
};

// How many of them one arrival speaks for
__host__ __device__ constexpr int spoken_for(release how) {
  return how == every_thread ? 1 : how == one_per_warp ? 32 : readers;
}

// O (readers): the sums of the columns of Q (Nq, readers), each read by its column's neighbour
template <release how> __global__ void column_sums(const fa_args a) {
  __shared__ __align__(16) float row_smem[readers];
  __shared__ uint64_t barriers[2];
  const uint32_t full = fa::smem_address(&barriers[0]), empty = fa::smem_address(&barriers[1]);
  if (threadIdx.x == 0) {
    fa::mbarrier_init(full, 1);
    fa::mbarrier_init(empty, readers / spoken_for(how));
    fa::fence_mbarrier_init();
  }
  __syncthreads(); // the barriers are set up

  if (threadIdx.x >= readers) { // the producer's warp, of which one lane works
    const float *Q = static_cast<const float *>(a.Q);
    for (int n = 0; n < a.Nq && threadIdx.x == readers; ++n) {
      fa::mbarrier_wait(empty, n % 2 ^ 1); // row n - 1 has been read
      fa::mbarrier_arrive_expect_tx(full, sizeof(row_smem));
      fa::cp_async_bulk(fa::smem_address(row_smem), Q + n * readers, sizeof(row_smem), full);
    }
    return;
  }
  float sum = 0.f;
  for (int n = 0; n < a.Nq; ++n) {
    fa::mbarrier_wait(full, n % 2); // row n is there
    sum += row_smem[(threadIdx.x + 1) % readers];
    if (how == one_per_warp) __syncwarp();            // the warp has read it
    if (how == one_for_all) fa::bar_sync(1, readers); // all have read it
    if (threadIdx.x % spoken_for(how) == 0) fa::mbarrier_arrive(empty);
  }
  static_cast<float *>(a.O)[threadIdx.x] = sum;
}

template <release how> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  column_sums<how><<<1, readers + 32, 0, stream>>>(a);
  return cudaGetLastError();
}

// H says how the place is given back.
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  switch (args->H) {
  case every_thread:
    return launch<every_thread>(*args, stream);
  case one_per_warp:
    return launch<one_per_warp>(*args, stream);
  case one_for_all:
    return launch<one_for_all>(*args, stream);
  default:
    return launch<one_unsynchronised>(*args, stream);
  }
}
