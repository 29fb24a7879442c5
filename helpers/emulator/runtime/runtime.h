// The emulator's insides. One block runs on one OS thread at a time; each of its CUDA threads is a fiber of that OS thread.
#pragma once
#include <csetjmp>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"
#include "fiber.h"

namespace emu {

// The emulated device: the limits of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr unsigned kMaxThreads = 1024, kWarp = 32, kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStaticShared = 48 << 10, kSharedOptIn = 227 << 10, kSharedPerBlock = 48 << 10;
constexpr size_t kGap = 128;                      // between static arrays, so that an overrun of one is seen
constexpr size_t kStaticArena = 64 << 10;         // static arrays with their gaps; the dynamic array follows, 1024-aligned
constexpr size_t kArena = kStaticArena + (228 << 10);
constexpr size_t kSignalStack = 64 << 10;

// ---- what Python hands over and reads back (mirrored with ctypes in native.py)
struct Region {
  const char* name;
  char* base;
  uint64_t bytes;                 // from the first element to the end of the last
  uint64_t item;                  // bytes of an element
  int32_t contiguous, dims;
  int64_t size[8], stride[8];     // in elements, strides decreasing
};

struct Finding {
  char kind[32];
  char text[4096];                // one sentence
  char file[1024];                // where, if known without a pc
  char module[1024];              // else the library and the offset in it
  uint64_t offset;
  int32_t line, error;            // error: a cudaError_t
  uint64_t block;
  char kernel[256];
};

struct Counter {
  uint64_t read, written;
};

// ---- a CUDA thread
enum class State : uint8_t { Fresh, Ready, Waiting, Done };

struct Thread {
  void* resume;
  uintptr_t stack;
  uint64_t index;                 // as thread_index() packs it
  unsigned number;                // linear in the block; lane = number % 32
  unsigned spins;
  State state;
  Site site;                      // where it waits
  unsigned mask;
};

// ---- a warp: instructions that some of its lanes wait at
struct Gathering {
  unsigned mask, arrived;
  Combine combine;
  Site site;
  void* operand[kWarp];
};

struct Warp {
  unsigned alive;                 // lanes that exist and have not returned
  unsigned gatherings;
  Gathering gathering[kWarp];
};

struct Barrier {
  BarrierVote kind;
  Site site;
  unsigned arrived, count;
  int result;                     // of the barrier last completed
};

struct StaticArray {
  const void* key;
  const char* name;
  size_t offset, bytes;
};

struct Run;

// ---- an OS thread and the block it runs
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
  Barrier barrier;
  StaticArray array[64];
  unsigned arrays = 0;
  size_t static_bytes = 0, static_top = 0, dynamic_bytes = 0;
  bool my_turn = false, abandoned = false;
  std::string output;
  // memory
  Stacks stacks;
  char* arena = nullptr;
  unsigned char* written = nullptr;  // per byte of the arena: has the block stored to it?
  std::vector<Counter> counter;
  // faults and stops
  sigjmp_buf escape;
  volatile sig_atomic_t critical = 0;  // in code that a stop must not throw out: it may hold a lock
  int fault_signal = 0;
  Thread* faulted = nullptr;
  void* fault_address = nullptr;
  uintptr_t fault_pc = 0;
  char* signal_stack = nullptr;

  Worker();
  ~Worker();
  char* dynamic() const { return arena + kStaticArena; }
  void ready(Thread* t) {
    t->state = State::Ready;
    queue[(head + queued++) % kMaxThreads] = t->number;
  }
};

extern thread_local Worker* worker __attribute__((tls_model("initial-exec")));

// ---- one launch
struct Run {
  const Launch* launch;
  uint64_t blocks;
  unsigned threads;
  uintptr_t module_begin = 0, module_end = 0;  // the kernel's own library: constants and __device__ variables
  std::atomic<uint64_t> next{0}, finished{0}, limit{0};  // blocks at or beyond `limit` are not begun
  std::mutex lock;
  std::condition_variable turned;
  std::atomic<uint64_t> turn{0};               // every block below it has finished
  std::set<uint64_t> early;                    // finished blocks beyond it
  std::map<uint64_t, std::string> output;
  std::vector<Finding> findings;
};

// ---- from one call of fa_launch to its end
struct Session {
  std::vector<Region> regions;
  std::vector<Counter> counter;
  std::map<void*, size_t> allocations;         // cudaMalloc inside the reader's own code
  std::string output;
  std::string hint;
  std::vector<Finding> findings;
  std::atomic<bool> stop{false};
  std::atomic<Run*> run{nullptr};
  std::mutex lock;
  unsigned os_threads = 1;
  int sticky = 0, last_error = 0;
};
extern Session session;

// block.cpp
void run_block(Worker*, uint64_t block);
[[noreturn]] void leave_block();               // from inside a fiber: the block is abandoned
void wait();                                   // from inside a fiber: until someone makes it ready
// report.cpp
// From inside a fiber: "thread 5 of block 0 " and the rest of the sentence; the block ends here.
[[noreturn]] void fail(const char* kind, int error, uintptr_t pc, Site, const char* format, ...)
    __attribute__((format(printf, 5, 6)));
void record(Worker*, const char* kind, int error, uintptr_t pc, Site, const std::string& text);
void record_deadlock(Worker*);
void record_fault(Worker*);
// memory.cpp
void add_counters(Worker*);
void check_access(const void* address, size_t bytes, bool write, bool aligned, uintptr_t pc, Site);
// grid.cpp
void wait_for_turn(Worker*);
void install_signals();
void restore_signals();

}  // namespace emu
