// What attention in a model asks for beyond fa_args: rungs 20 and up. Every launcher but 50's and 51's is handed the whole of
// fa_backward_args, and those that need more than its first part say so with fa::model(args) or fa::backward(args).
// helpers/ladder/contract.py mirrors both structs field by field with ctypes.
#pragma once
#include <fa/args.cuh>

struct fa_model_args : fa_args {
  // A packed batch: sequence s has rows q_starts[s] .. q_starts[s + 1] of Q and O, k_starts[s] .. k_starts[s + 1] of K and
  // V, and B is 1. Null: every entry of the batch is a sequence of Nq queries and Nk keys.
  const int32_t *q_starts, *k_starts; // (sequences + 1), from 0, never falling
  const int32_t *lengths;             // (B): keys in use of each sequence; null: Nk
  const int32_t *pages; // (B, max_pages): where a sequence's keys lie in K, V (pages, Hkv, page, D); null: in order
  int32_t sequences, max_pages, page;
  int32_t splits; // pieces that a sequence's keys are cut into, each for CTAs of their own
  int32_t Hkv;    // heads of K and V; query head h reads head h / (H / Hkv)
  int32_t causal; // query i sees keys up to i + Nk - Nq: the last query sees the last key
  int32_t window; // and of those only the last `window` ones; 0: all
};

struct fa_backward_args : fa_model_args {
  const void *dO;                                                 // (B, H, Nq, D)
  void *dQ, *dK, *dV;                                             // (B, H, Nq, D), (B, Hkv, Nk, D) twice
  int64_t dO_stride[3], dQ_stride[3], dK_stride[3], dV_stride[3]; // in elements: batch, head, row
  int32_t deterministic; // dQ's parts are added in one order: the same bits every time
};

namespace fa {

inline const fa_model_args &model(const fa_args *args) { return *static_cast<const fa_model_args *>(args); }
inline const fa_backward_args &backward(const fa_args *args) { return *static_cast<const fa_backward_args *>(args); }

} // namespace fa
