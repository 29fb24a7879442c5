/* C

needs: a C compiler with OpenMP
runs: any machine
dtypes: fp32
D: 64 128
*/
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// [region: vectors]
#ifdef __AVX512F__
enum { W = 16, NV = 4 }; // floats of a vector; vectors of a row of the register tile
#else
enum { W = 8, NV = 2 };
#endif
enum {
  MR = 6,
  Bc = 64,
  Br = 48,
  MOST = 128
}; // rows of the register tile; keys and queries of a tile; the largest head
typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));

// e^x for x <= 0: 2^n in the exponent's bits times a polynomial for e^f, |f| <= ln 2 / 2; 0 below e^-87, so also for -inf.
static inline vec exponential(vec x) {
  const ints in = x >= -87.0f; // all bits of an element where that holds
  const vec low = (vec)((ints)x & in);
  const vec n = (low * 1.44269504f + 12582912.0f) - 12582912.0f; // to the nearest integer
  const vec f = (low - n * 0.693359375f) - n * -2.12194440e-4f;  // in two parts, so that nothing is lost
  vec p = f * (1.0f / 5040) + 1.0f / 720;
  p = p * f + 1.0f / 120, p = p * f + 1.0f / 24, p = p * f + 1.0f / 6, p = p * f + 0.5f, p = p * f + 1.0f,
  p = p * f + 1.0f;
  const ints bits = (__builtin_convertvector(n, ints) + 127) << 23;
  return (vec)((ints)(p * (vec)bits) & in);
}

static inline vec larger(vec a, vec b) {
  const ints first = a > b;
  return (vec)(((ints)a & first) | ((ints)b & ~first));
}
// [end: vectors]

// [region: product]
// C (MR x NV·W) += A (MR x K) · B (K x NV·W), in registers: each value of B is used MR times, each of A NV·W times.
static inline void product(vec C[MR][NV], const float *A, int lda, const float *B, int ldb, int K) {
  for (int k = 0; k < K; ++k)
    for (int c = 0; c < NV; ++c) {
      vec b;
      memcpy(&b, B + (size_t)k * ldb + c * W, sizeof b);
      for (int r = 0; r < MR; ++r) C[r][c] += A[r * lda + k] * b;
    }
}
// [end: product]

// [region: online_softmax]
// S (MR x Bc) becomes P. The state of each row: m, the maximum so far, l, the sum; `alpha` rescales what was summed before.
static inline void online_softmax(float S[MR][Bc], float *m, float *l, float *alpha) {
  for (int r = 0; r < MR; ++r) {
    vec s[Bc / W], top, total = {0};
    memcpy(s, S[r], sizeof s);
    top = s[0];
    for (int j = 1; j < Bc / W; ++j) top = larger(top, s[j]);
    float most = m[r], sum = 0;
    for (int i = 0; i < W; ++i) most = top[i] > most ? top[i] : most;
    const float base = most == -INFINITY ? 0 : most; // a row that has seen no key yet
    for (int j = 0; j < Bc / W; ++j) total += s[j] = exponential(s[j] - base);
    memcpy(S[r], s, sizeof s);
    for (int i = 0; i < W; ++i) sum += total[i];
    alpha[r] = expf(m[r] - base);
    l[r] = alpha[r] * l[r] + sum;
    m[r] = most;
  }
}
// [end: online_softmax]

// [region: tile]
// Br queries of one head against all keys. Kt: K in tiles of Bc keys, each transposed (d x Bc), zero from key Nk on.
static void query_tile(const float *Q, const float *Kt, const float *V, float *O, float *LSE, int first, int Nq, int Nk,
                       int d, float scale, int causal) {
  float q[Br][MOST] = {0}, o[Br][MOST] = {0}, m[Br], l[Br] = {0};
  const int rows = Nq - first < Br ? Nq - first : Br;
  for (int r = 0; r < Br; ++r) m[r] = -INFINITY;
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < d; ++k) q[r][k] = scale * Q[(size_t)(first + r) * d + k];
  const int sees = first + Nk - Nq; // the last key of the tile's first query
  const int end = !causal ? Nk : sees + rows < Nk ? sees + rows : Nk;
  for (int j = 0; j < end; j += Bc) {
    const int keys = Nk - j < Bc ? Nk - j : Bc;
    for (int r0 = 0; r0 < rows; r0 += MR) {
      float S[MR][Bc], alpha[MR];
      vec C[MR][NV];
      for (int c = 0; c < Bc; c += NV * W) {
        memset(C, 0, sizeof C);
        product(C, &q[r0][0], MOST, Kt + (size_t)j * d + c, Bc, d);
        for (int r = 0; r < MR; ++r) memcpy(&S[r][c], C[r], sizeof C[r]);
      }
      for (int r = 0; r < MR; ++r) {
        const int see = causal && sees + r0 + r - j + 1 < keys ? sees + r0 + r - j + 1 : keys;
        for (int c = see < 0 ? 0 : see; c < Bc; ++c) S[r][c] = -INFINITY;
      }
      online_softmax(S, m + r0, l + r0, alpha);
      for (int c = 0; c < d; c += NV * W) {
        for (int r = 0; r < MR; ++r) {
          memcpy(C[r], &o[r0 + r][c], sizeof C[r]);
          for (int x = 0; x < NV; ++x) C[r][x] *= alpha[r];
        }
        product(C, &S[0][0], Bc, V + (size_t)j * d + c, d, keys);
        for (int r = 0; r < MR; ++r) memcpy(&o[r0 + r][c], C[r], sizeof C[r]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < d; ++k) O[(size_t)(first + r) * d + k] = l[r] == 0 ? 0 : o[r][k] / l[r];
    LSE[first + r] = m[r] + logf(l[r]);
  }
}
// [end: tile]

// [region: heads]
// q (BH,Nq,d), k and v (BH,Nk,d), o and lse, dense. Returns 0, or 1 where there is no memory for K transposed.
int attention(const float *q, const float *k, const float *v, float *o, float *lse, int BH, int Nq, int Nk, int d,
              float scale, int causal) {
  const int padded = (Nk + Bc - 1) / Bc * Bc, tiles = (Nq + Br - 1) / Br;
  float *Kt = calloc((size_t)BH * d * padded, sizeof(float));
  if (!Kt) return 1;
#pragma omp parallel
  {
#pragma omp for
    for (int bh = 0; bh < BH; ++bh)
      for (int j0 = 0; j0 < Nk; j0 += 16) // 16 keys at a time: whole cache lines are written
        for (int c = 0; c < d; ++c)
          for (int j = j0; j < (j0 + 16 < Nk ? j0 + 16 : Nk); ++j)
            Kt[((size_t)bh * padded + j / Bc * Bc) * d + c * Bc + j % Bc] = k[((size_t)bh * Nk + j) * d + c];
#pragma omp for schedule(dynamic)
    for (int tile = 0; tile < BH * tiles; ++tile) {
      const size_t bh = tile / tiles, i = tiles - 1 - tile % tiles; // the longest first, where the mask is causal
      query_tile(q + bh * Nq * d, Kt + bh * d * padded, v + bh * Nk * d, o + bh * Nq * d, lse + bh * Nq, i * Br, Nq, Nk,
                 d, scale, causal);
    }
  }
  free(Kt);
  return 0;
}
// [end: heads]
