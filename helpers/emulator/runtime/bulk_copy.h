// Bulk copies of TMA, by the current thread. Those to shared memory report to an mbarrier, those from it are waited for in groups.
#pragma once
#include <cstdint>

#include "ops.h"
#include "tensor_map.h"
#include "worker.h"

namespace emu {

BulkState* new_bulk_state();
void delete_bulk_state(BulkState*);
void begin_bulk(BulkState*);                   // of a block
void end_bulk(Worker*);                        // of a block whose threads have all returned

void bulk_load(const Box&, uint32_t mbarrier, Op, uintptr_t pc, Site);
void bulk_store(const Box&, BulkOp, Op, uintptr_t pc, Site);
void bulk_commit();
void bulk_wait(uint32_t groups, bool reads_only);

}  // namespace emu
