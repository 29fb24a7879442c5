// An OS thread, and the block that it runs: threads, warps, shared memory.
#pragma once
#include <csetjmp>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"
#include "device.h"
#include "exchange.h"
#include "fiber.h"
#include "session.h"

namespace emu {

// ---- a CUDA thread
enum class State : uint8_t { Fresh, Ready, Waiting, Held, Done };  // Held: by a tool

enum class At : uint8_t { Instruction, ActiveMask, NamedBarrier, Mbarrier };  // Instruction: __syncthreads too

struct Thread {
  void* resume;
  uintptr_t stack;
  uint64_t index;                 // as thread_index() packs it
  unsigned number;                // linear in the block; lane = number % 32
  unsigned spins;
  const void* flag;               // that it last looked at; null: none
  State state;
  Site site;                      // where it waits
  unsigned mask;                  // of lanes that it waits with; 0: at a barrier
  At at;                          // which: with its `place`, the number or the offset in shared memory, and phase
  unsigned place;
  uint64_t phase;
  int answer;                     // what it is told when it goes on
  bool acquires, undisturbed;
  uintptr_t watched, watched_bytes;  // where on its stack accumulators of wgmma lie
};

// ---- a warp: instructions that some of its lanes wait at
struct Gathering {
  unsigned mask, arrived;
  uint64_t number;                // tells it from all others of the worker
  Combine combine;
  Site site;
  void* operand[kWarp];
};

struct Warp {
  unsigned alive;                 // lanes that exist and have not returned
  unsigned running;               // how many of them neither wait nor are held
  unsigned gatherings;
  Gathering gathering[kWarp];
};

struct Barrier {                  // __syncthreads
  BarrierVote kind;
  Site site;
  unsigned arrived, count;
  int result;                     // of the barrier last completed
};

struct StaticArray {
  const void* key;
  const char* name;
  size_t offset, bytes;
  ArrayShape shape;
};

struct Variable {                 // of the kernel's library
  uintptr_t begin;
  size_t bytes;
  const char* name;               // mangled; null: a static one, of which nothing is known
  bool constant;                  // __constant__: one whose symbol is protected (cuda_runtime.h)
};

struct NamedPlace {               // where an array in dynamic shared memory begins
  const char* name;
  uint32_t offset;
};

struct Stop {                     // a signal that interrupted the reader's code
  volatile int signal = 0;        // 0: none came
  void* address = nullptr;
  uintptr_t pc = 0, stack = 0;    // what was being executed, and its stack pointer
  uintptr_t link = 0;             // AArch64's link register: perhaps a return address that is not on the stack
};

struct CopyState;                 // the cp.async copies of the block: async_copy.cpp
struct BarrierState;              // its named barriers and mbarriers: barrier.h
struct BulkState;                 // its bulk copies from shared memory: bulk_copy.cpp
struct Warpgroups;                // its warpgroups: ptx_wgmma.cpp
struct Watcher;                   // tool.h
struct Notes;                     // notes.h

struct Worker {
  Run* run = nullptr;
  // block
  uint64_t block = 0, block_packed = 0, extent_packed = 0, grid_packed = 0;
  unsigned threads = 0, done = 0;
  Thread* volatile current = nullptr;
  void* scheduler = nullptr;
  Thread thread[kMaxThreads];
  Warp warp[kMaxWarps];
  unsigned queue[kMaxThreads], head = 0, queued = 0;
  uint64_t random = 0;
  Barrier barrier;
  StaticArray array[64];
  unsigned arrays = 0;
  const char* dynamic_name = nullptr;  // of the extern array
  std::vector<NamedPlace> named[kMaxWarps];  // while tracing: arrays in dynamic shared memory, as the warp's lanes have named them
  size_t static_bytes = 0, static_top = 0, dynamic_bytes = 0, dynamic_base = 0;
  bool my_turn = false, abandoned = false;
  std::string output;
  // memory
  Stacks stacks;
  char* arena = nullptr;
  std::vector<Counter> counter;
  unsigned order = 0;                  // of the access under way: see Order in tool.h
  bool hold = false;                   // set by a tool at a basic block: the current thread goes on when the tool makes it ready
  std::vector<Variable> variables;     // of the kernel's library that have been touched
  uint64_t gathered = 0;
  unsigned idle = 0;                   // turns given away since mbarriers were looked at
  CopyState* copies;
  BarrierState* barriers;
  BulkState* bulk;
  Warpgroups* warpgroups;
  // tools
  std::vector<std::unique_ptr<Watcher>> watchers;
  std::vector<Watcher*> on_memory, on_execution, on_basic_blocks;  // who is told of each kind of events
  std::unique_ptr<Notes> notes;
  // faults and stops
  sigjmp_buf escape;
  volatile sig_atomic_t critical = 0;  // in code that a stop must not throw out: it may hold a lock
  Stop fault;
  Thread* faulted = nullptr;
  char* signal_stack = nullptr;

  Worker();
  ~Worker();
  char* dynamic() const { return arena + dynamic_base; }
  unsigned whole_warps() const { return (threads + kWarp - 1) / kWarp * kWarp; }  // threads, and what the last warp lacks
  uint32_t offset(uintptr_t pc) const { return run->module.offset(pc); }
  // The lanes that the warp has, or had before they returned.
  unsigned lanes(unsigned warp) const { return threads - warp * kWarp >= kWarp ? ~0u : (1u << (threads - warp * kWarp)) - 1; }
  void ready(Thread* t) {
    if (t->state == State::Waiting || t->state == State::Held) ++warp[t->number / kWarp].running;
    t->state = State::Ready;
    queue[(head + queued++) % kMaxThreads] = t->number;
  }
};

extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));

}  // namespace emu
