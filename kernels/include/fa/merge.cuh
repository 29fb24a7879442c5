// What a kernel is handed that merges partial results: (O_a, LSE_a) of some keys and (O_b, LSE_b) of others.
// helpers/ladder/contract.py mirrors the struct field by field with ctypes.
#pragma once
#include <fa/args.cuh>

struct fa_merge_args : fa_args {        // O, LSE, B, H, Nq, D; dtype is that of O_b; Q, K and V are null
  const void *O_a, *O_b;                // (B, H, Nq, D)
  const float *LSE_a, *LSE_b;           // (B, H, Nq)
  int64_t O_a_stride[3], O_b_stride[3]; // in elements: batch, head, row; columns are contiguous
  int64_t LSE_a_stride[2], LSE_b_stride[2], LSE_stride[2]; // in elements: batch, head; rows are contiguous
  int32_t a_fp32, o_fp32;                                  // O_a and O are fp32; else as O_b
};

namespace fa {

inline const fa_merge_args &merging(const fa_args *args) { return *static_cast<const fa_merge_args *>(args); }

} // namespace fa
