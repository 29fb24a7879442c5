// Races: two accesses of one place by different threads, one of them a write, that nothing orders. In shared memory, and
// in the outputs and workspace in global memory, there between blocks too.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../include/emulator/runtime.h"

namespace emu {

struct Worker;

// Every thread has a clock that ticks when it synchronises with others; an access is stamped with the clock of its thread.
// A cell, two bytes of shared memory or an element of a tensor, remembers who wrote it last, and from which two warps it
// has been read since.
//
// TMA and wgmma touch shared memory beside the threads, through the async proxy. Whoever does so is an agent, with a number
// above those of threads and a clock of its own: what it did up to a stamp, a thread has to learn by waiting for it.
constexpr unsigned kThreads = 1024, kAgents = 512, kActors = kThreads + kAgents;

// What a thread has been told, by actor: stamps up to which things have happened.
struct Clock {
  uint32_t known[kActors];          // before what the thread does now
  uint32_t visible[kActors];        // and, of ordinary stores, made visible to the async proxy by a fence.proxy.async
};

struct Agent {
  AgentKind kind;
  uint16_t thread;                  // that has set it to work; of a warpgroup the first
  unsigned owner;
  uint32_t tick;
};

// Who of the agents has read 16 bytes of shared memory.
struct AgentReads {
  struct {
    uint32_t stamp, pc;             // stamp 0: none
    uint16_t agent;
  } by[4];
};

struct Readers {
  uint32_t stamp, lanes, pc;        // stamp 0: none
  uint16_t warp;
  uint8_t bytes, lane;              // which of its bytes, and kStrongly; the lane that read last
};
constexpr uint8_t kStrongly = 0x80; // see Flags

struct Cell {
  uint32_t stamp, pc;
  uint16_t thread;
  uint8_t bytes;
  bool strong : 1, in_flight : 1;
  Readers reader[2];
};

// What a pair of instructions has been found to do, the first time in words.
struct Found {
  uint64_t count, block;            // `block`: of the first time
  std::string text;                 // "{other}" stands for the line of the other instruction
  int32_t apart;                    // at most: 0 in one warp, 1 in one block, 2 in two blocks
};
enum class Wrong : uint8_t { Race, InFlight, Unwritten, UnwrittenTensor, Overwritten, Unfenced, UnfencedInit };

struct Sighting {
  Wrong wrong;
  uint32_t pc, other_pc, offset, bytes;
  uint16_t thread, other;           // other: perhaps an agent
  bool writes, other_writes;
  uint16_t region;                  // or kShared; `offset` is from its start
};

struct Overwrite {                  // of what somebody else has written: no race if the value is the same
  uint16_t thread, other, region;
  bool other_block;                 // perhaps; then `other`, `other_pc` and `old` say nothing
  uint32_t pc, other_pc, offset, bytes;
  unsigned char old[16];
};

// Which blocks have written and read an element of global memory in this launch: the first and the last of each. A block
// that has taken part in an atomic, or looked at a flag, is ordered with others in ways not followed here: what it does from
// then on is left out, but for more atomics by the same instruction. Of these each has an entry, too: they clash with stores.
struct Across {
  struct Blocks {
    std::atomic<uint64_t> not_first, last;           // as across() packs them; 0: nobody
  } writes, reads, atomics;
  std::atomic<uint64_t> value;      // that the first to come has written, and a bit above it
  std::atomic<bool> differ;         // other values have been written too
  std::atomic<bool> parts;          // somebody has written a part of it: whose part is whose isn't followed
};
struct AcrossBlocks {                                // of one launch
  Across* all = nullptr;
  size_t count = 0;
  std::vector<size_t> begin;                         // of each region's elements; SIZE_MAX: not followed
};
void across_begin(AcrossBlocks&);
void across_end(AcrossBlocks&, unsigned launch, const struct Run&);

using FoundKey = std::tuple<Wrong, uint32_t, uint32_t>;

// Flags: a thread that reads what another has written there, and then executes a fence, comes after all that the other had
// done before the fence that stood before its write. (PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns".)
// Such reads and writes are strong: atomics, accesses with .relaxed, .acquire or .release, and volatile ones, of these a
// write only if its thread has executed a fence. Two strong accesses don't race.
constexpr size_t kFlags = 1024;                      // any more of them count as one
struct Flags {
  std::map<unsigned, std::unique_ptr<Clock>> fenced; // by thread: what it knew at its last fence
  std::map<unsigned, std::unique_ptr<Clock>> seen;   // by thread: what flags have told it since; null: nothing
  std::map<uintptr_t, std::unique_ptr<Clock>> told;  // by the flag's address: what those knew who have written there
};
enum Order : uint8_t { kWeak = 0, kStrong = 1, kReads = 2, kWrites = 4, kAcquires = 8, kReleases = 16 };

struct Races {
  Cell *cell, *element = nullptr;                    // of shared memory; of the regions that AcrossBlocks follows
  size_t elements = 0;
  AgentReads* reads;                                 // of shared memory
  uint32_t start = 0;                                // stamps up to it are of blocks that have ended
  uint32_t tick[kThreads], all[32];                  // a thread's clock; up to `all` a warp's lanes have been synchronised
  Clock* clock;                                      // of each thread
  Clock everybody;                                   // what every thread knows besides
  Clock together;                                    // of lanes that are being synchronised
  bool apart[32], fenced;                            // lanes have been told different things; so has been a fence.proxy.async
  std::vector<Agent> agents;
  std::vector<Overwrite> overwrites;
  std::map<FoundKey, Found> found;
  Flags flags;
  bool strong = false;                               // so is the access under way
  Races();
  ~Races();
};

// ---- what Python reads (mirrored in native.py)
struct FoundRow {
  const char *kind, *text;
  uint64_t pc, other_pc, count, block;               // other_pc 0: there is none
  int32_t launch, apart;
};

void races_begin(Worker*);
void races_end(Worker*);                             // of the block
void races_begin_launch(Worker*, size_t elements);
void race_access(Worker*, size_t offset, size_t bytes, Op, uintptr_t pc);
void race_global(Worker*, size_t region, uint64_t offset, size_t bytes, Op, uintptr_t pc);
void race_unwritten(Worker*, size_t offset, size_t bytes, uintptr_t pc);
void race_unwritten_tensor(Worker*, size_t region, uint64_t offset, size_t bytes, uintptr_t pc);
void race_settle(Worker*);                           // the current thread's last store has happened
void race_issued(Worker*, size_t offset, size_t bytes, unsigned actor, uintptr_t pc);
void race_landed(Worker*, size_t offset, size_t bytes, unsigned actor);
// What the current thread does with these bytes has to come after what another did with them at the stamp.
void race_after(Worker*, size_t offset, size_t bytes, unsigned other, uint32_t stamp, uint32_t other_pc, uintptr_t pc);
void race_unfenced_init(Worker*, size_t offset, uint32_t init_pc, unsigned by, uintptr_t pc);  // of an mbarrier
void race_flag(Worker*, const void* flag, unsigned order);  // a strong access of the current thread
void order_lanes(Worker*, unsigned warp, unsigned lanes);  // __syncwarp: what they did before, each of them sees
void order_block(Worker*);                           // the same for all threads
void release(Worker*, unsigned thread, Clock&);      // what it did before, and knew, goes into the clock of a barrier
void acquire(Worker*, unsigned thread, const Clock&);
void clear(Worker*, Clock&);
Clock& clock_of(Worker*, std::unique_ptr<Clock>&);   // made when it is first asked for
void races_collect(Worker*, unsigned launch);

}  // namespace emu
