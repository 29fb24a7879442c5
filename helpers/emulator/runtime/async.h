// What goes on beside the threads of a block: named barriers, mbarriers, and the bulk copies of TMA.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "../include/emulator/driver.h"
#include "runtime.h"

namespace emu {

// What a bulk copy moves: a box of a tensor. A copy of n bytes that names no tensor is the box of n elements of one byte.
struct Box {
  TensorMap map;
  int32_t at[5];                    // coordinates of its first element, innermost first
  uint32_t shared;                  // where it lies in shared memory
  uint32_t bytes;                   // there
};

enum class BulkOp : uint8_t { Copy, Add, Min, Max, Inc, Dec, And, Or, Xor };

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
  std::unique_ptr<Clock> arrived, completed;  // tracing: what those who arrived know, in this phase and the one before
  unsigned initialised_by = 0;
  uint32_t init_pc = 0, init_stamp = 0;
  bool fenced = false;              // so that TMA sees that it has been initialised
};

struct NamedBarrier {
  unsigned count = 0, arrived = 0;  // threads
  unsigned yes = 0;                 // of bar.red
  std::unique_ptr<Clock> clock;
};

// A bulk copy from shared memory.
struct BulkStore {
  Box box;
  BulkOp op;
  bool read;
  std::vector<char> data;           // what has been read
  unsigned thread;
  uintptr_t pc;
  Site site;
};

struct BulkGroups {                 // of one thread
  std::vector<BulkStore> store;     // oldest first
  std::vector<std::pair<size_t, uint32_t>> group;  // of every committed group: the stores up to here, and the agent's stamp
};

struct AsyncState {
  std::map<uint32_t, Mbarrier> mbarrier;           // by offset in shared memory
  std::map<uint32_t, const char*> name;            // of those in dynamic shared memory, as they were initialised by
  NamedBarrier named[16];
  std::map<unsigned, BulkGroups> bulk;             // by thread
  unsigned stalls = 0;              // how often all threads were sent back to their loops since anything happened
};

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

// memory.cpp
int region_at(uintptr_t address, size_t bytes);    // the tensor that these bytes belong to; -1: none
// barrier.cpp
int named_barrier(unsigned id, unsigned threads, bool waits, BarrierVote, bool predicate, bool aligned, uintptr_t pc, Site);
void mbarrier_init(uint32_t at, uint32_t count, uintptr_t pc, Site);
void mbarrier_inval(uint32_t at, uintptr_t pc, Site);
uint64_t mbarrier_arrive(uint32_t at, uint32_t count, int64_t expect, bool drop, bool releases, uintptr_t pc, Site);
void mbarrier_expect(uint32_t at, int64_t bytes, uintptr_t pc, Site);     // negative: they have come
enum class Awaited : uint8_t { State, Parity };
bool mbarrier_wait(uint32_t at, Awaited, uint64_t phase, bool acquires, uintptr_t pc, Site);
void mbarrier_land(uint32_t at, Landing, uintptr_t pc, Site);             // it will hear of this
void mbarrier_fence();                                                    // fence.mbarrier_init, fence.proxy.async
std::string mbarrier_name(const Worker*, uint32_t at);                    // "K_full[1]"
std::string mbarrier_state(const Worker*, uint32_t at, uint64_t phase);   // for a report: what is missing
// bulk_copy.cpp
void bulk_load(const Box&, uint32_t mbarrier, Op, uintptr_t pc, Site);
void bulk_store(const Box&, BulkOp, Op, uintptr_t pc, Site);
void bulk_commit();
void bulk_wait(uint32_t groups, bool reads_only);
void bulk_land(const Box&);
// async_copy.cpp
uint64_t copies_issued(Worker*, unsigned thread);
void land_copies(Worker*, unsigned thread, uint64_t issued, unsigned actor);

}  // namespace emu
