// A block: its threads as fibers that take turns.
#pragma once
#include <cstdint>

#include "worker.h"

namespace emu {

constexpr size_t kSignalStack = 64 << 10;

void run_block(Worker*, uint64_t block);
[[noreturn]] void leave_block();               // from inside a fiber: the block is abandoned
uintptr_t stack_top(const Thread&);
void wait();                                   // from inside a fiber: until someone makes it ready
void leave_sync_block(Worker*);                // whoever waits there comes to named barrier 0 instead
void stop(Worker*);                            // the current thread is about to wait, or has returned: tools are told

// For a function that a kernel's code calls: where its caller's frame is. It is the same in all that one call of the caller
// calls, and lower in a deeper call.
#if defined(__aarch64__)  // its own frame record may lie anywhere in its frame: the caller's, which has one (-fno-omit-frame-pointer)
#define EMU_FRAME reinterpret_cast<uintptr_t>(__builtin_frame_address(1))
#else                     // its own lies next to the caller's frame
#define EMU_FRAME reinterpret_cast<uintptr_t>(__builtin_frame_address(0))
#endif

}  // namespace emu
