// What a warp's request costs.
#pragma once
#include <cstdint>

#include "ops.h"

namespace emu {

struct Cost {
  unsigned cost, ideal;       // wavefronts of shared memory, or sectors of 32 bytes
};

// source: of an AsyncCopy, where each lane's bytes come from; 0: they are zeros. past_L1: it is a cp.async.cg.
Cost shared_cost(Op, const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source, bool past_L1);
Cost global_cost(const uint64_t* address, unsigned lanes, unsigned width);

}  // namespace emu
