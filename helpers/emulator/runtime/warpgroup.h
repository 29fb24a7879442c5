// Warpgroups of the running block, as the rest of the runtime sees them: ptx_wgmma.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "worker.h"

namespace emu {

Warpgroups* new_warpgroups();
void delete_warpgroups(Warpgroups*);
void begin_warpgroups(Worker*);                // of a block
void touch_accumulator(Worker*, uintptr_t address, size_t bytes, bool write, uintptr_t pc);  // if it is one, by the current thread
void warpgroup_returns(Worker*);               // the current thread has come to the kernel's end
bool record_warpgroup_deadlock(Worker*);       // if nobody can go on for want of a warp of some warpgroup, or of registers

}  // namespace emu
