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
void stop(Worker*);                            // the current thread is about to wait, or has returned: tools are told

}  // namespace emu
