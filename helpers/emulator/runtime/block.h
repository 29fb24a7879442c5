// A block: its threads as fibers that take turns.
#pragma once
#include <cstdint>

#include "worker.h"

namespace emu {

constexpr size_t kSignalStack = 64 << 10;

void run_block(Worker*, uint64_t block);
[[noreturn]] void leave_block();               // from inside a fiber: the block is abandoned
uintptr_t stack_top(const Thread&);

// In a function that the kernel's code calls: an address in the frame of its caller or next to it, the same in every such function
// that one call of the caller makes, and the lower the deeper the caller. On AArch64 a function's frame record may lie anywhere in its
// frame, so it is the caller's own (the kernel is compiled with frame pointers there).
#if defined(__aarch64__)
#define EMU_FRAME reinterpret_cast<uintptr_t>(__builtin_frame_address(1))
#else
#define EMU_FRAME reinterpret_cast<uintptr_t>(__builtin_frame_address(0))
#endif
void wait();                                   // from inside a fiber: until someone makes it ready
void stop(Worker*);                            // the current thread is about to wait, or has returned: tools are told

}  // namespace emu
