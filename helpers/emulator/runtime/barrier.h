// Barriers of part of a block: named barriers, which count the threads of whole warps, and mbarriers, which count arrivals and bytes.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "tensor_map.h"
#include "worker.h"

namespace emu {

// What an mbarrier waits to hear of: a copy to shared memory, or the arrival of a thread whose first `copies` cp.async have
// landed.
struct Landing {
  Box box;
  uint64_t copies;
  bool arrival;
  unsigned thread;
  uintptr_t pc;
  Site site;
};

struct Mbarrier {
  uint32_t count = 0, pending = 0;  // arrivals of a phase; those still missing
  int64_t bytes = 0;                // the tx-count: bytes expected and not yet there
  uint64_t phase = 0;
  std::deque<Landing> landing;      // what has been begun, oldest first
};

struct NamedBarrier {
  unsigned count = 0, arrived = 0;  // threads; arrived: and lanes of their warps that don't exist or have returned
  unsigned yes = 0, no = 0;         // of bar.red
  BarrierVote vote = BarrierVote::None;
  unsigned come[kMaxWarps] = {};    // the lanes of each warp that have come
};

struct BarrierState {
  std::map<uint32_t, Mbarrier> mbarrier;           // by offset in shared memory
  std::map<uint32_t, const char*> name;            // of those in dynamic shared memory, as they were initialised by
  NamedBarrier named[16];
  unsigned stalls = 0;              // how often all threads were sent back to their loops since anything happened
};

BarrierState* new_barrier_state();
void delete_barrier_state(BarrierState*);
void begin_barriers(BarrierState*);            // of a block
bool barrier_progress(Worker*, bool stalled);  // stalled: nobody can run

void returns_from_named_barriers(Worker*);     // the current thread
int named_barrier(unsigned id, unsigned threads, bool waits, BarrierVote, bool predicate, bool aligned, uintptr_t pc, Site);
void mbarrier_init(uint32_t at, uint32_t count, uintptr_t pc, Site);
void mbarrier_inval(uint32_t at, uintptr_t pc, Site);
uint64_t mbarrier_arrive(uint32_t at, uint32_t count, int64_t expect, bool drop, bool releases, uintptr_t pc, Site);
void mbarrier_expect(uint32_t at, int64_t bytes, uintptr_t pc, Site);     // negative: they have come
enum class Awaited : uint8_t { State, Parity };
bool mbarrier_wait(uint32_t at, Awaited, uint64_t phase, bool acquires, uintptr_t pc, Site);
void mbarrier_land(uint32_t at, Landing, uintptr_t pc, Site);             // it will hear of this
void fence_mbarrier_init();
void fence_proxy_async();
void fence_proxy_async_global();
std::string mbarrier_name(const Worker*, uint32_t at);                    // "K_full[1]"
std::string mbarrier_state(const Worker*, uint32_t at, uint64_t phase);   // for a report: what is missing
std::string shared_or_mbarrier(const Worker*, unsigned warp, size_t offset);  // "the mbarrier K_full[1]", "K_smem[12][3]"

}  // namespace emu
