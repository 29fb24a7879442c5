// cp.async of the running block's threads.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../include/emulator/runtime.h"
#include "tool.h"
#include "worker.h"

namespace emu {

CopyState* new_copy_state();
void delete_copy_state(CopyState*);
void begin_copies(CopyState*, unsigned threads);  // of a block: copies that nobody waited for are gone

// Of the calling thread.
void issue_copy(void* shared, const void* global, size_t bytes, size_t source_bytes, bool past_L1, uintptr_t pc, Site);
void commit_copies();
void wait_copies(uint64_t groups);             // until at most so many committed groups are under way

// cp.async.mbarrier.arrive: so many of a thread's copies, counted from its first, an mbarrier waits for.
uint64_t copies_issued(Worker*, unsigned thread);
void land_copies(Worker*, unsigned thread, uint64_t issued, const Actor&);

}  // namespace emu
