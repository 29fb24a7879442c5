// A fiber: a stack of its own and a switch of a few instructions. One per CUDA thread of the block being run.
#pragma once
#include <cstddef>

namespace emu {

constexpr size_t kStackBytes = 256 << 10;  // of which the kernel touches a page or two: the rest is never mapped

// Stops here (where to resume goes to *stopped) and continues at `resume`.
extern "C" void emu_switch(void** stopped, void* resume);

// A fresh fiber that will call entry(); entry must never return.
void* fiber_at(char* stack_top, void (*entry)());

size_t page_bytes();
size_t guard_bytes();                        // of the pages below a stack

// Lazily mapped stacks, each above guard pages, so that endless recursion faults instead of eating its neighbour.
class Stacks {
 public:
  void reserve(size_t count);                // throws std::bad_alloc
  char* bottom(size_t i) const;              // lowest usable byte of stack i
  char* top(size_t i) const { return bottom(i) + kStackBytes; }
  bool guards(const void* address) const;    // does the address lie in a guard page?

 private:
  static constexpr size_t kChunk = 32, kMax = 1024;  // mapped a warp at a time
  char* chunk_[kMax / kChunk] = {};
};

}  // namespace emu
