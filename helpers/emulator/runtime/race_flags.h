// What orders the blocks of a launch: flags in global memory, set with .release and looked at with .acquire (or with a fence
// beside them). PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns". Followed where a kernel has such
// instructions at gpu or sys scope (Session::follows_flags); elsewhere race_blocks.h goes by what blocks do before they meet.
//
// A block's order is that of its threads and agents (race_order.h): a release publishes what its thread knows of them, and of
// other blocks. An access is told by its block, actor and stamp.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "notes.h"
#include "race_order.h"
#include "session.h"

namespace emu {

// What one thread of a block knew of the block's actors when it last released: stamps, by actor.
struct Released {
  uint64_t number;                  // of releases in this launch: a later one of the same thread says more
  std::vector<uint32_t> known;
};
using Knowledge = std::map<uint64_t, std::shared_ptr<const Released>>;  // by block and thread
using Known = std::shared_ptr<const Knowledge>;                         // null: nothing

struct Trail {                      // of an access to an element; block 0: none, else the block's number and one
  uint32_t block, stamp, pc, value;
  uint16_t actor, thread;
  bool strong, any_value;           // any_value: `value` is not known
};

struct Element {
  Trail written, read[2];                        // read: by the first block, and the last of the others: those between are forgotten
};

std::string flag_name(uintptr_t address);      // "arrived[3]"

// One launch: what flags say, and who has touched what.
struct FlagOrder {
  std::mutex lock;
  std::unordered_map<uintptr_t, Known> told;     // by the flag's address
  std::atomic<uint64_t> releases{0};
  std::atomic<bool> used{false};                 // a block has released or acquired: else race_blocks.h knows all there is
  Element* elements = nullptr;
  size_t count = 0;
  struct Clash {
    Trail one, other;                            // one reads, or both write; other writes
    bool one_writes, unfenced;                   // unfenced: ordered, but no fence.proxy.async before TMA reads it
    size_t region, offset;
    uint64_t times;
  };
  std::map<NoteKey, Clash> clashes;              // by kind and both pcs

  void begin_launch(size_t elements_followed);
  void end_launch(const Run&);
  void clash(const char* kind, const Trail& one, const Trail& other, bool one_writes, bool unfenced, size_t region, size_t offset);
};

// One block of it.
struct BlockFlags {
  FlagOrder& launch;
  Races& r;
  uint32_t block = 0;                            // its number, and one
  struct Acquired {
    uint32_t stamp;
    bool fenced;                                 // a fence.proxy.async came after it
    Known known;
  };
  std::map<unsigned, std::vector<Acquired>> acquired;  // by thread: what it knows of other blocks, each time more
  std::map<unsigned, Known> pending, at_fence;   // by thread: read without .acquire; and known at its last fence

  struct Stamped {
    uint32_t stamp;
    bool fenced;
  };
  std::map<unsigned, Stamped> of_system;         // by thread: when it first read a flag with .acquire.sys
  struct FarRead {                               // a bulk copy of what another GPU writes
    unsigned agent;
    uint32_t stamp, pc;
    uint16_t region;
  };
  std::vector<FarRead> far_reads;

  BlockFlags(FlagOrder& of_launch, Races& of_block) : launch(of_launch), r(of_block) {}
  void begin_block(uint64_t number);
  void memory_fence(unsigned thread);            // after that of Races
  void proxy_fence(unsigned thread);
  void sets(unsigned thread, uintptr_t flag, bool releases);  // before it does
  void has_read(unsigned thread, uintptr_t flag, bool acquires, bool of_all_GPUs);
  // What another GPU writes: has a flag of the system been read before, and a fence.proxy.async executed? 0: neither; 1: the first.
  int may_read_far(unsigned thread) const;
  // One that `thread` hasn't waited for; null: there is none.
  const FarRead* still_reads_far(unsigned thread) const;
  // Elements first .. end: Trail as far as it is the same for all; by_TMA: through the async proxy.
  void reads(size_t first, size_t end, const Trail&, unsigned me, bool by_TMA, size_t region, size_t region_first, unsigned shift);
  void writes(size_t first, size_t end, const Trail&, unsigned me, size_t region, size_t region_first, unsigned shift);

 private:
  Known known_now(unsigned thread);              // to a thread that has just executed Races::memory_fence
  void acquire(unsigned thread, const Known&);
  // Is what the trail's block did before what `thread` does now? 2: and before a fence.proxy.async.
  int ordered_before(unsigned thread, const Trail&) const;
};

}  // namespace emu
