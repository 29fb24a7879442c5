// The families of instructions, each in a .cpp of its own.
#pragma once
#include "ptx_decoder.h"

namespace emu::ptx {

bool decode_arithmetic(Decoder&);  // arithmetic, logic, comparison, conversion
bool decode_async(Decoder&);       // barriers of part of a block, mbarriers, bulk copies
bool decode_control(Decoder&);     // branches
bool decode_memory(Decoder&);      // loads, stores, atomics, cp.async, fences
bool decode_matrix(Decoder&);      // ldmatrix, stmatrix, mma
bool decode_warp(Decoder&);        // shuffles, votes, barriers of a warp
bool decode_warpgroup(Decoder&);   // wgmma, setmaxnreg

}  // namespace emu::ptx
