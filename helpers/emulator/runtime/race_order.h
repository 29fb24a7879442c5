// What orders the threads of a block: a clock for each, and what barriers, fences, flags and waits tell them of the others.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "device.h"
#include "tool.h"

namespace emu {

// Every thread has a clock that ticks when it synchronises with others; an access is stamped with the clock of its thread.
//
// TMA and wgmma touch shared memory beside the threads, through the async proxy. Whoever does so is an agent, with a number
// above those of threads and a clock of its own: what it did up to a stamp, a thread has to learn by waiting for it.
constexpr unsigned kThreads = kMaxThreads, kAgents = 512, kActors = kThreads + kAgents;

// What a thread has been told, by actor: stamps up to which things have happened.
struct Clock {
  uint32_t known[kActors];          // before what the thread does now
  uint32_t visible[kActors];        // and, of ordinary stores, made visible to the async proxy by a fence.proxy.async
};

struct Agent {
  ActorKind kind;
  uint16_t thread;                  // that has set it to work; of a warpgroup the first
  unsigned owner;
  uint32_t tick;
};

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

// What those who arrived at a barrier know: in the phase under way, and in the one before.
struct BarrierClocks {
  std::unique_ptr<Clock> arrived, completed;
};

struct MbarrierClocks : BarrierClocks {
  unsigned initialised_by = 0;
  uint32_t init_pc = 0, init_stamp = 0;
  bool fenced = false;              // so that TMA sees that it has been initialised
};

// Functions that may allocate are called between ++critical and --critical.
struct Races {
  unsigned threads = 0;
  uint32_t start = 0;                                // stamps up to it are of blocks that have ended
  uint32_t tick[kThreads], all[kMaxWarps];           // a thread's clock; up to `all` a warp's lanes have been synchronised
  Clock* clock;                                      // of each thread
  Clock everybody{};                                 // what every thread knows besides
  Clock together{};                                  // of lanes that are being synchronised
  bool apart[kMaxWarps], fenced;                     // lanes have been told different things; so has been a fence.proxy.async
  std::vector<Agent> agents;
  std::map<std::pair<ActorKind, unsigned>, std::vector<uint32_t>> groups;  // by kind and owner: the stamps of committed groups
  Flags flags;
  BarrierClocks named[16];
  std::map<uint32_t, MbarrierClocks> mbarrier;       // by offset in shared memory

  Races();
  ~Races();
  Races(const Races&) = delete;
  void begin_block(unsigned threads_of_block);
  unsigned number(const Actor&);                     // of a thread or agent, the same one whenever asked within a block
  Agent& agent(unsigned actor) { return agents[actor - kThreads]; }

  void clear(Clock&) const;
  Clock& made(std::unique_ptr<Clock>&) const;        // it, made if there is none yet
  void release(unsigned thread, Clock& into);        // what it did before, and knew, goes into the clock of a barrier
  void acquire(unsigned thread, const Clock&);
  void order_lanes(unsigned warp, unsigned lanes, bool whole);
  void order_block();
  void complete(BarrierClocks&);                     // the phase under way becomes the one before
  void complete_mbarrier(uint32_t at);
  void memory_fence(unsigned thread);
  void proxy_fence(unsigned thread);
  void strong_access(unsigned thread, uintptr_t flag, unsigned order);
  void commit(const Actor&);
  void waited(unsigned thread, const Actor&, uint64_t group);

 private:
  void join(Clock& to, const Clock& from) const;
  void one_clock(unsigned first, unsigned end, uint32_t* most);
};

// Memory that is mapped when it is first touched, zeroed.
void* lazily(size_t bytes);
void give_back(void*, size_t bytes);

}  // namespace emu
