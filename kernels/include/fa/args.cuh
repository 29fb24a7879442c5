// The one C interface of every rung: a plain struct of arguments and one launcher.
// helpers/ladder/contract.py mirrors the struct field by field with ctypes.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

enum fa_dtype : int32_t { FA_FP32 = 0, FA_FP16 = 1, FA_BF16 = 2 };

struct fa_args {
  const void *Q, *K, *V;                                      // (B, H, Nq, D), (B, H, Nk, D) twice
  void *O;                                                    // (B, H, Nq, D)
  float *LSE;                                                 // (B, H, Nq): ln sum_j exp(scale * q.k_j), contiguous
  void *workspace[4];                                         // the tensors the header block lists under `workspace`
  int64_t Q_stride[3], K_stride[3], V_stride[3], O_stride[3]; // in elements: batch, head, row; columns are contiguous
  int32_t B, H, Nq, Nk, D;
  int32_t dtype; // fa_dtype
  float scale;
};

// Every rung exports this. Returns the launch's error; work that was launched may still be running.
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream);
