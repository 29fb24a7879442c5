// Tensor maps, and the boxes of a tensor that TMA moves.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../include/emulator/driver.h"
#include "worker.h"

namespace emu {

// What a bulk copy moves: a box of a tensor. A copy of n bytes that names no tensor is the box of n elements of one byte.
struct Box {
  TensorMap map;
  int32_t at[5];                    // coordinates of its first element, innermost first
  uint32_t shared;                  // where it lies in shared memory
  uint32_t bytes;                   // there
};

enum class BulkOp : uint8_t { Copy, Add, Min, Max, Inc, Dec, And, Or, Xor };

void load_box(const Worker*, const Box&);                                // from the tensor to shared memory
std::vector<char> read_box(const Worker*, const Box&);                   // from shared memory
void write_box(const Box&, BulkOp, const std::vector<char>& data);       // to the tensor

// For every row of the box: visit(its place in the box, the address of its first element, [first, end) of its elements that
// lie in the tensor).
template <class Visit>
void each_row(const Box& b, Visit visit) {
  const TensorMap& m = b.map;
  const int64_t low = std::max<int64_t>(0, -int64_t(b.at[0]));
  const int64_t high = std::max<int64_t>(low, std::min<int64_t>(m.box, int64_t(m.size[0]) - b.at[0]));
  uint32_t place = 0;
  unsigned i[4];
  for (i[3] = 0; i[3] < m.rows[3]; ++i[3])
    for (i[2] = 0; i[2] < m.rows[2]; ++i[2])
      for (i[1] = 0; i[1] < m.rows[1]; ++i[1])
        for (i[0] = 0; i[0] < m.rows[0]; ++i[0], place += m.box * m.item) {
          int64_t offset = int64_t(b.at[0]) * m.item;
          bool inside = true;
          for (unsigned d = 0; d < 4; ++d) {
            const int64_t at = int64_t(b.at[d + 1]) + int64_t(i[d]) * m.step[d];
            inside = inside && at >= 0 && at < int64_t(m.size[d + 1]);
            offset += at * int64_t(m.stride[d]);
          }
          visit(place, m.base + offset, inside ? unsigned(low) : 0u, inside ? unsigned(high) : 0u);
        }
}

}  // namespace emu
