// What the matrix instructions of a warp and of a warpgroup have in common: 32 lanes that meet, and 16-bit factors.
#pragma once
#include <cstdint>
#include <cstring>

#include "../include/emulator/runtime.h"
#include "device.h"
#include "ptx_program.h"
#include "report.h"
#include "worker.h"

namespace emu::ptx {

struct MatrixLane {
  Frame* frame;
  const Instruction* instruction;
  const char* row;     // ldmatrix and its kin: the address that this lane gives
  bool alone = false;  // set where not all 32 lanes have come
};

inline MatrixLane& lane_of(void* const operand[32], unsigned l) { return *static_cast<MatrixLane*>(operand[l]); }

inline bool complete_warp(void* const operand[32]) {
  bool whole = true;
  for (unsigned l = 0; l < kWarp; ++l) whole = whole && operand[l] != nullptr;
  if (!whole)
    for (unsigned l = 0; l < kWarp; ++l)
      if (operand[l] != nullptr) lane_of(operand, l).alone = true;
  return whole;
}

inline void meet(MatrixLane& me, Combine combine) {
  const Instruction& i = *me.instruction;
  rendezvous(~0u, &me, combine, here(*me.frame, i));
  if (me.alone)
    fail("inline PTX", 719, me.frame->pc, i.site, "executes %s without all 32 lanes of its warp: some have returned, or don't exist",
         i.site.what);
}

inline float half_to_float(uint32_t h) {  // without branches: a compiler does several at a time
  const uint32_t magnitude = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
  float x = as<float>(uint64_t(magnitude)) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits |= (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  bits |= sign;
  memcpy(&x, &bits, 4);
  return x;
}
inline float brain_to_float(uint32_t b) { return as<float>(uint64_t(b << 16)); }

}  // namespace emu::ptx
