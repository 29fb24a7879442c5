// The emulator's insides. One block runs on one OS thread at a time; each of its CUDA threads is a fiber of that OS thread.
#pragma once
#include <csetjmp>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"

namespace emu {
// What a lane does in a memory instruction: see check_access.
enum class Op : uint8_t { Load, Store, LoadMatrix, StoreMatrix, AsyncCopy, Atomic, BulkTensor, Bulk, ReduceTensor, ReduceBulk, NoAddress, Instruction };
// Who reads or writes shared memory beside the threads: see proxy_agent.
enum class AgentKind : uint8_t { Mbarrier, BulkGroup, Wgmma };
}  // namespace emu

#include "fiber.h"
#include "trace.h"

namespace emu {

// The emulated device: the limits of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities").
constexpr unsigned kMaxThreads = 1024, kWarp = 32, kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStaticShared = 48 << 10, kSharedOptIn = 227 << 10, kSharedPerBlock = 48 << 10;
constexpr size_t kGap = 128;                      // between static arrays, so that an overrun of one is seen
constexpr size_t kStaticArena = 64 << 10;         // static arrays with their gaps; the dynamic array follows, at dynamic_base
constexpr size_t kDescribed = 256 << 10;          // how far the 14 bits of a wgmma descriptor's address reach
constexpr size_t kArena = kStaticArena + (228 << 10);
constexpr unsigned char kUnwritten = 0, kWritten = 1, kInFlight = 2;  // what has become of a byte of shared memory
constexpr size_t kSignalStack = 64 << 10;
constexpr size_t kPrinted = 1 << 20;              // bytes, as CUDA's default: what goes beyond is lost

// ---- what Python hands over and reads back (mirrored with ctypes in native.py)
struct Region {
  const char* name;
  char* base;
  uint64_t bytes;                 // from the first element to the end of the last
  uint64_t item;                  // bytes of an element
  int32_t contiguous, dims;
  int32_t given;                  // an input; the bytes of outputs and workspace hold nothing until they are written
  int64_t size[8], stride[8];     // in elements, strides decreasing
};

struct Finding {
  char kind[32];
  char text[4096];                // one sentence
  char file[1024];                // where, if known without a pc
  char module[1024];              // else the library and the offset in it
  uint64_t offset, outer[4];      // outer: calls around it, innermost first, if what is at `offset` is the emulator's own
  int32_t line, error;            // error: a cudaError_t
  uint64_t block;
  char kernel[256];
};

struct Counter {
  uint64_t read, written;
};

// A kernel's library: its constants and __device__ variables, and its code.
struct Module {
  uintptr_t begin = 0, end = 0, code_begin = 0, code_end = 0;
  bool holds(uintptr_t address) const { return address - begin < end - begin; }
  bool executes(uintptr_t pc) const { return pc - code_begin < code_end - code_begin; }
};

// Where the OS threads of blocks, and the one that executes fa_launch itself, are thrown out of the reader's code.
struct Stop {
  volatile int signal = 0;          // 0: none came
  void* address = nullptr;
  uintptr_t pc = 0, stack = 0;      // what was being executed, and its stack pointer
};
struct Host {                       // fa_launch, on its way
  sigjmp_buf escape;
  Module module;
  Stop stop;
  std::string kind, text;           // what it did, where no signal says so
  uintptr_t stack_top = 0;
};

// ---- a CUDA thread
enum class State : uint8_t { Fresh, Ready, Waiting, Held, Done };  // Held: until its trace has been merged

enum class At : uint8_t { Instruction, ActiveMask, NamedBarrier, Mbarrier };  // Instruction: __syncthreads too

struct Thread {
  void* resume;
  uintptr_t stack;
  uint64_t index;                 // as thread_index() packs it
  unsigned number;                // linear in the block; lane = number % 32
  unsigned spins;
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
  ArrayShape shape;
};

struct Run;
struct PtxState;                  // what inline PTX has under way: async_copy.cpp
struct AsyncState;                // barriers of part of the block, and bulk copies: async.h
struct Warpgroups;                // and its warpgroups: ptx_wgmma.cpp

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
  uint64_t random = 0;
  Barrier barrier;
  StaticArray array[64];
  unsigned arrays = 0;
  const char* dynamic_name = nullptr;  // of the extern array
  size_t static_bytes = 0, static_top = 0, dynamic_bytes = 0, dynamic_base = 0;
  bool my_turn = false, abandoned = false;
  bool synchronised = false;           // with other blocks: it has executed an atomic, or looked at a flag, in global memory
  uintptr_t only_atomic = 0;           // the one atomic instruction that made it so; 0: there was none, or more than it
  std::string output;
  // memory
  Stacks stacks;
  char* arena = nullptr;
  unsigned char* written = nullptr;  // per byte of the arena: kUnwritten, kWritten or kInFlight
  std::vector<Counter> counter;
  std::unique_ptr<Tracer> tracer;    // while a trace is being taken
  std::unique_ptr<Races> races;      // with the tracer
  uint64_t gathered = 0;
  PtxState* ptx;
  AsyncState* async;
  unsigned idle = 0;                   // turns given away since mbarriers were looked at
  Warpgroups* warpgroups;
  // faults and stops
  sigjmp_buf escape;
  volatile sig_atomic_t critical = 0;  // in code that a stop must not throw out: it may hold a lock
  Stop fault;
  Thread* faulted = nullptr;
  char* signal_stack = nullptr;

  Worker();
  ~Worker();
  char* dynamic() const { return arena + dynamic_base; }
  void ready(Thread* t) {
    if (tracer != nullptr && (t->state == State::Waiting || t->state == State::Held))
      ++tracer->warp[t->number / kWarp].running;
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
  Module module;
  std::atomic<uint64_t> next{0}, finished{0}, limit{0};  // blocks at or beyond `limit` are not begun
  std::mutex lock;
  std::condition_variable turned;
  std::atomic<uint64_t> turn{0};               // every block below it has finished
  std::set<uint64_t> early;                    // finished blocks beyond it
  std::map<uint64_t, std::string> output;
  size_t printed = 0;                          // bytes of it
  std::vector<Finding> findings;
  AcrossBlocks across;
  std::map<uint64_t, std::vector<std::function<void()>>> late;  // by block: bulk copies to global memory that nobody waited for
};

// ---- from one call of fa_launch to its end
struct Session {
  std::vector<Region> regions;
  std::vector<Counter> counter;
  std::vector<std::vector<unsigned char>> written;  // tracing: per element of a region kUnwritten or kWritten; none if given
  std::map<void*, size_t> allocations;         // cudaMalloc inside the reader's own code
  std::string output;
  std::string hint;
  std::vector<Finding> findings;
  bool tracing = false;
  uint64_t schedule = 0;                       // 0: threads take turns in order; else in an order drawn from it
  Trace trace;
  unsigned launches = 0;
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
uintptr_t stack_top(const Thread&);
void wait();                                   // from inside a fiber: until someone makes it ready
// report.cpp
// From inside a fiber: "thread 5 of block 0 " and the rest of the sentence; the block ends here.
[[noreturn]] void fail(const char* kind, int error, uintptr_t pc, Site, const char* format, ...)
    __attribute__((format(printf, 5, 6)));
void record(Worker*, const char* kind, int error, uintptr_t pc, Site, const std::string& text, const struct Calls* = nullptr);
void record_stop(Worker*);                              // it came between two threads
void record_deadlock(Worker*);
std::string thread_name(const Worker*, const Thread*);  // "thread 5"
std::string block_name(const Worker*);                   // "block (0, 1)"
std::string describe(const Worker*, const Thread*);     // "thread 5 of block (0, 1)"
std::string place_of(const Worker*, const Site&);        // "file:line", in a form in which Python can put the reader's line
void record_fault(Worker*);
void record_host_fault(const Host&);
// memory.cpp
void add_counters(Worker*);
StaticArray shared_array(const Worker*, size_t offset);  // that the offset lies in, or behind
const char* shared_name(const Worker*, const std::vector<NamedPlace>&, size_t offset, size_t* begin);  // of the array there
std::string shared_place(const Worker*, unsigned warp, size_t offset);  // "K_smem[12][3]", "K_smem + 384 B"
std::string address_in_words(const Worker*, uintptr_t);  // the same, "O + 128 bytes", or the address
[[noreturn]] void misaligned(const char* does, uintptr_t address, size_t bytes, uintptr_t pc, Site);  // to a multiple of bytes
// One lane's part in a memory instruction, before it happens; instructions that the runtime executes itself call this,
// lane by lane, each in its own fiber. Fails if the access can't happen: bounds, alignment (to `bytes`), initialisation.
// LoadMatrix and StoreMatrix: the 16-byte row whose address this lane gives; a lane whose address the instruction
// ignores says NoAddress. AsyncCopy: the destination in shared memory; its global source is a Load with the same pc.
// pc: the return address of the call in the kernel.
void check_access(Op, const void* address, size_t bytes, uintptr_t pc, Site);
// The same of an access that may be one of a flag, with an Order; before it, of one that reads, `spin`. atomic: its pc, if it is one.
void strong_access(Op, const void* address, size_t bytes, unsigned order, uintptr_t pc, Site);
void spin(const void* flag, uintptr_t atomic);
// A cp.async or a bulk copy to shared memory has been issued, its bytes not yet written; and later the wait that covers it
// lets it land. In between nobody may touch them. actor: the thread, or the agent whose copy it is.
void async_issued(void* shared, size_t bytes, unsigned actor, uintptr_t pc, Site);
void async_landed(void* shared, size_t bytes, unsigned actor);
// The bytes at `offset` of shared memory lie in one array; fails otherwise.
void check_bounds(size_t offset, size_t bytes, bool write, uintptr_t pc, Site);
// A run of bytes in global memory that a bulk copy reads or writes.
void bulk_access(Op, bool write, const void* address, size_t bytes, uintptr_t pc, Site);
// The bytes at `offset` of shared memory exist, have been written and are not in flight; fails otherwise (while tracing,
// all but the first is noted).
void check_async_read(size_t offset, size_t bytes, uintptr_t pc, Site);
// race.cpp: the async proxy. An agent is the copies that report to one mbarrier (owner: its offset), the bulk groups of one
// thread, or the wgmma of one warpgroup (owner: the first thread). Its reads of shared memory begin with proxy_read, which
// looks whether what is read has been written, in order, and with a fence.proxy.async if by ordinary stores (of a warpgroup:
// for each of its warps). They last until a thread that has waited says proxy_waited with the group that proxy_commit
// gave for them, and tell of any write that isn't ordered behind such a wait. Without a trace only check_async_read is done.
// proxy_write, while tracing, is for a copy that the current thread starts: what threads have written there has to be fenced too.
unsigned proxy_agent(AgentKind, unsigned owner, unsigned thread);  // the same one whenever asked within a block
void proxy_read(unsigned agent, const void* shared, size_t bytes, uintptr_t pc, Site);  // multiples of 16 bytes
void proxy_write(const void* shared, size_t bytes, uintptr_t pc);
uint32_t proxy_commit(unsigned agent);                 // what has been begun is a group
void proxy_waited(unsigned agent, uint32_t group);     // the current thread has waited for all groups up to this one
void proxy_fence();                                    // fence.proxy.async by the current thread
// async_copy.cpp
PtxState* new_ptx_state();
void delete_ptx_state(PtxState*);
void begin_ptx(PtxState*, unsigned threads);   // of a block: copies that nobody waited for are gone
// ptx_wgmma.cpp
Warpgroups* new_warpgroups();
void delete_warpgroups(Warpgroups*);
void begin_warpgroups(Worker*);                // of a block
void touch_accumulator(Worker*, uintptr_t address, size_t bytes, bool write, uintptr_t pc);  // if it is one, by the current thread
void warpgroup_returns(Worker*);               // the current thread has come to the kernel's end
bool record_warpgroup_deadlock(Worker*);       // if nobody can go on for want of a warp of some warpgroup, or of registers
// barrier.cpp
AsyncState* new_async_state();
void delete_async_state(AsyncState*);
void begin_async(AsyncState*);
bool async_progress(Worker*, bool stalled);    // stalled: nobody can run
// bulk_copy.cpp
void end_async(Worker*);                       // of a block whose threads have all returned
// grid.cpp
void fail_launcher(const char* kind, const std::string& text, uintptr_t pc);  // "fa_launch " and the text: it ends here, if it runs
void wait_for_turn(Worker*);
void install_signals();
void restore_signals();

}  // namespace emu
