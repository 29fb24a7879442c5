// Tools: what watches kernels run. Memory, barriers and copies announce events, and tools listen. A tool is a file of its own
// that ends by putting a Tool into the list, and a line in tools.cpp.
//
// A tool changes nothing of what a kernel does; what it finds it notes (notes.h). The rules that a GPU enforces itself (bounds,
// alignment, shapes) are checked by the code that announces, before it does.
//
// An event is told in the fiber of the thread that caused it, which a signal may abandon at any time: code that allocates
// stands between ++worker->critical and --worker->critical.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops.h"
#include "session.h"

namespace emu {

struct Worker;
struct Box;

// ---- what events are about

// How strong an access is, and what it orders (PTX ISA, "Memory Consistency Model"). Volatile: a write that is strong only
// if its thread has executed a fence. OfBlock: of scope cta; OfSystem: sys.
enum Order : uint8_t { kWeak = 0, kStrong = 1, kReads = 2, kWrites = 4, kAcquires = 8, kReleases = 16, kVolatile = 32, kOfBlock = 64, kOfSystem = 128 };

constexpr uintptr_t kVolatileFlag = 1;          // for Watcher::polls: by a read of a volatile variable

// Targets that are no tensor: shared memory, cudaMalloc, __device__ variables.
constexpr uint16_t kShared = 0xffff, kAllocated = 0xfffe, kVariable = 0xfffd;
constexpr bool is_tensor(uint16_t target) { return target < kVariable; }

// One lane's access. It is within bounds and aligned, and happens when all tools have been told.
struct Access {
  enum Kind : uint8_t {
    Element,                        // aligned: one access of `bytes`
    Loose,                          // of an object that isn't aligned to its size, so that a GPU takes it in pieces
    Range,                          // memcpy and structures
    BulkRow,                        // of a bulk copy, by TMA: see Watcher::bulk_copy
  } kind;
  Op op;
  uint16_t target;                  // the index of a tensor, kShared, kAllocated or kVariable
  unsigned order;                   // of Order
  uintptr_t address;
  size_t offset, bytes;             // offset: from the start of the tensor or of shared memory
  uintptr_t pc, frame;              // return address of the call in the kernel and its frame; frame 0: not known
  const Site& site;                 // line 0: the pc says it
};

// Who reads or writes shared memory: a thread, the copies that report to one mbarrier (owner: its offset), the bulk groups
// of one thread, or the wgmma of one warpgroup (owner: the first thread). thread: that has set it to work. BulkWrite: bulk groups
// as writers of global memory, where blocks are ordered by flags.
enum class ActorKind : uint8_t { Thread, Mbarrier, BulkGroup, Wgmma, BulkWrite };
struct Actor {
  ActorKind kind;
  unsigned owner, thread;
};

// A copy to shared memory that has been issued: cp.async (by a thread) or a bulk copy (by its mbarrier).
struct IssuedCopy {
  size_t offset, bytes;
  Actor actor;
  bool past_L1;                     // cp.async.cg
  uintptr_t pc;
  const Site& site;
};

struct BarrierPoint {
  enum Kind : uint8_t { Block, Named, Mbarrier } kind;
  unsigned place;                   // a named barrier's number, an mbarrier's offset in shared memory
  bool aligned;                     // all lanes of a warp come together, and wait
  const char* what;                 // the instruction's name
};

enum class Fence : uint8_t { Memory, Proxy, MbarrierInit, ProxyGlobal };  // Proxy: of shared memory, and perhaps of global

// ---- who listens: one for each tool and OS thread
enum Hears : unsigned { kMemory = 1, kExecution = 2, kBasicBlocks = 4 };
struct Watcher {
  Worker* const w;
  const unsigned hears;                                        // the kinds of events that it is told of: there are millions
  Watcher(Worker* worker, unsigned kinds) : w(worker), hears(kinds) {}
  virtual ~Watcher() = default;

  // Memory. The current thread is the one that acts, unless the event says otherwise.
  virtual void array_begins(size_t /*offset*/, size_t /*bytes*/) {}  // of shared memory, uninitialised
  virtual void access(const Access&) {}
  virtual void mbarrier_init(uint32_t /*at*/, uintptr_t /*pc*/) {}
  virtual void copy_issued(const IssuedCopy&) {}               // its bytes are not there until
  virtual void copy_landed(size_t /*offset*/, size_t /*bytes*/, const Actor&) {}
  virtual void async_read(size_t /*offset*/, size_t /*bytes*/, const Actor&, uintptr_t /*pc*/, const Site&) {}  // begins: see async_waited

  // Execution, and basic blocks: told while a trace is being taken.
  virtual void begin_launch() {}
  virtual void begin_block() {}
  virtual void end_block() {}                                  // there is no current thread; also of one that was stopped
  virtual void end_launch() {}
  virtual void basic_block(uintptr_t /*pc*/, uintptr_t /*frame*/) {}  // begins; may set Worker::hold
  virtual void instruction(uintptr_t /*pc*/, const Site&) {}   // that makes no request and meets nobody
  virtual void no_address(uintptr_t /*pc*/, const Site&) {}    // a lane takes part in ldmatrix or stmatrix, its address is ignored
  virtual void bulk_copy(Op, const Box&, uintptr_t /*pc*/, const Site&) {}
  virtual void named(const char* /*array*/, uint32_t /*offset*/) {}  // the source calls what begins there by this name
  virtual void polls(const void*, uintptr_t /*atomic*/) {}     // looks at a flag; `atomic`: the pc, if by an atomic
  virtual void strong_access(const void*, unsigned /*order*/) {}  // has been made, by this Order
  virtual void read_flag(const void*, unsigned /*order*/) {}   // has been read, by this Order
  virtual void fence(Fence) {}
  virtual void stopped(unsigned /*warp*/) {}                   // the current thread begins to wait, is held or has returned
  virtual void yields() {}                                     // the current thread gives its turn away
  virtual void returned() {}                                   // the current thread, from the kernel
  // A rendezvous of lanes (shuffles, votes, mma): the current lane comes to it; all have come.
  virtual void comes(uint64_t /*rendezvous*/) {}
  virtual void met(unsigned /*warp*/, uint64_t /*rendezvous*/, unsigned /*lanes*/, const char* /*what*/) {}
  virtual void lanes_ordered(unsigned /*warp*/, unsigned /*lanes*/) {}  // by __syncwarp: what each did, all of them see
  // Barriers. Whoever arrives releases what it did before to those that pass.
  virtual void arrives(const BarrierPoint&) {}                 // the current thread
  virtual void completed(const BarrierPoint&) {}
  virtual void passes(const BarrierPoint&, unsigned /*thread*/) {}
  virtual void mbarrier_used(uint32_t /*at*/, uintptr_t /*pc*/) {}
  // Reads of shared memory by an agent last until a thread has waited for the group that they were committed to. Groups of
  // an agent are counted from 0 in each block.
  virtual void async_committed(const Actor&) {}
  virtual void async_waited(const Actor&, uint64_t /*group*/) {}
};

// ---- one for the whole process: makes the watchers, and keeps what they share
struct Tool {
  virtual ~Tool() = default;
  virtual bool always() const { return false; }  // in plain launches, too, where only memory is watched
  virtual std::unique_ptr<Watcher> watch(Worker*) = 0;
  virtual void begin_session() {}
  virtual void begin_launch(const Run&) {}       // before the watchers'
  virtual void end_launch(const Run&) {}         // after the watchers'
  virtual void host_wrote(const void* /*address*/, size_t /*bytes*/) {}  // cudaMemset or cudaMemcpy in the launcher's own code
};

// All tools, in the order in which they are told. A tool's file puts it there: static const Listed listed(&tool).
std::vector<Tool*>& tools();
struct Listed {
  explicit Listed(Tool* tool) { tools().push_back(tool); }
};

}  // namespace emu
