// Races between blocks: who has written and read each element of the outputs and workspace in a launch.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange.h"
#include "session.h"

namespace emu {

// A cell of race detection in global memory has 1 << cell_shift bytes.
inline unsigned cell_shift(const Region& r) { return r.item >= 4 ? 2 : 1; }

// Which blocks have written and read an element of global memory in this launch: the first and the last of each. A block
// that has taken part in an atomic, or looked at a flag, is ordered with others in ways not followed here: what it does from
// then on is left out, but for more atomics by the same instruction. (Where flags are set and read with .release and .acquire,
// race_flags.h follows what they order.) Of these each has an entry, too: they clash with stores.
struct Across {
  struct Blocks {
    std::atomic<uint64_t> not_first, last;           // packed, see race_blocks.cpp; 0: nobody
    void add(uint64_t block, uint32_t pc, unsigned thread);
  } writes, reads, atomics;
  std::atomic<uint64_t> value;      // that the first to come has written, and a bit above it
  std::atomic<bool> differ;         // other values have been written too
  std::atomic<bool> parts;          // somebody has written a part of it: whose part is whose isn't followed
};

struct AcrossBlocks {                                // of one launch
  Across* all = nullptr;
  size_t count = 0;
  std::vector<size_t> begin;                         // of each region's elements; SIZE_MAX: not followed

  void begin_launch();
  void end_launch(const Run&, bool notes);           // notes the races, if so
  bool follows(size_t region) const { return begin[region] != SIZE_MAX; }
  size_t element(size_t region, size_t offset) const { return begin[region] + (offset >> cell_shift(session.regions[region])); }
  // A store that has happened.
  void write(size_t region, size_t offset, size_t bytes, uint64_t block, uint32_t pc, unsigned thread);
};

}  // namespace emu
