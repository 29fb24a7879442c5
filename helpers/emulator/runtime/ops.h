// The memory operations and the names that Python shows for them. helpers/emulator reads the names from this file.
#pragma once
#include <cstdint>

namespace emu {

#define EMU_OPS(x)                              \
  x(Load, "load")                               \
  x(Store, "store")                             \
  x(LoadMatrix, "ldmatrix")                     \
  x(StoreMatrix, "stmatrix")                    \
  x(AsyncCopy, "cp.async")                      \
  x(Atomic, "atomic")                           \
  x(BulkTensor, "cp.async.bulk.tensor")         \
  x(Bulk, "cp.async.bulk")                      \
  x(ReduceTensor, "cp.reduce.async.bulk.tensor") \
  x(ReduceBulk, "cp.reduce.async.bulk")

// What a lane does in a memory instruction (check_access in memory.h). NoAddress: it takes part, and its address is ignored.
// Instruction: one that makes no request, in the tracer's streams.
#define EMU_ENUMERATOR(op, name) op,
enum class Op : uint8_t { EMU_OPS(EMU_ENUMERATOR) NoAddress, Instruction };
#undef EMU_ENUMERATOR

inline bool writes(Op op) {
  constexpr unsigned writing = 1u << unsigned(Op::Store) | 1u << unsigned(Op::StoreMatrix) | 1u << unsigned(Op::AsyncCopy);
  return writing >> unsigned(op) & 1;
}

}  // namespace emu
