// What a kernel is handed that reads the keys of other ranks itself: where their tensors and flags are.
// helpers/ladder/contract.py mirrors the struct field by field with ctypes.
#pragma once
#include <fa/model.cuh>

namespace fa {

constexpr int max_ranks = 8, max_copiers = 32;

// Flags of one rank, which the others set: signals[s] says that rank s's K and V may be read, signals[done_signal(s, c)]
// that copier c of rank s has read all it needs of this rank's. A flag's value is the number of the call it speaks of.
constexpr int signals_per_rank = max_ranks * (1 + max_copiers);

__host__ __device__ constexpr int done_signal(int rank, int copier) { return max_ranks + rank * max_copiers + copier; }

enum step : int32_t { announce = 1, attend = 2, settle = 4, fetch = 8 }; // fetch: the copies alone, to time them

} // namespace fa

struct fa_peers_args : fa_model_args { // Q, K and V: this rank's own
  const void *peer_K[8], *peer_V[8];   // of each rank: (B, Hkv, Nk, D), contiguous; this rank's own are not used
  uint32_t *signals[8];                // of each rank: (signals_per_rank), zeros before the first call
  void *near_K, *near_V;               // (B, Hkv, rows, D): copies of what this rank sees of the others' keys
  uint32_t *arrived;                   // B * Hkv * rows / 128 flags of their tiles, zeros before the first call
  int32_t rank, ranks, copiers, steps; // copiers: as many on all ranks; steps: what this call does, of enum step
  uint32_t epoch;                      // the number of the call, from 1; the same on all ranks
};

namespace fa {

inline const fa_peers_args &peers(const fa_args *args) { return *static_cast<const fa_peers_args *>(args); }

} // namespace fa
