// The trace: what every lane asks of memory, merged into the requests that a warp would make of it, and their costs.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"
#include "race.h"

namespace emu {

struct Worker;

// ---- a lane's stream: basic blocks with their accesses, and the meetings that lanes wait for each other at
enum class EventKind : uint8_t {
  Block,    // a basic block begins; `address` is its key, `bytes` how many accesses follow
  Sync,     // a rendezvous; `address` is its number
  Access,   // aligned: one access of `bytes`
  Loose,    // of an object that isn't aligned to its size, so that a GPU takes it in pieces
  Range,    // memcpy and structures
  Name,     // the array whose name `address` points at begins at `pc` of shared memory
};

struct Event {
  uint64_t address;  // of an access: its target in the upper 16 bits, the address in the lower 48
  uint32_t pc;       // from the start of the kernel's library
  uint16_t bytes;
  uint8_t op;
  EventKind kind;
};
static_assert(sizeof(Event) == 16);

struct Stream {
  Event* event = nullptr;
  uint32_t size = 0, capacity = 0;
  uint32_t at = 0;       // the merge has taken what is before
  uint32_t open = 0;     // the block that accesses are being added to
  uintptr_t top = 0;     // of the lane's stack: how deep a call is, is counted from here
  bool done = false;
};

struct Meeting {
  uint64_t number;
  unsigned members, reached;  // lanes; `reached`: whose streams the merge has taken up to it
};

struct NamedPlace {  // where an array in dynamic shared memory begins
  const char* name;
  uint32_t offset;
};

struct WarpTrace {
  unsigned lanes = 0;         // that exist
  unsigned running = 0;       // lanes that neither wait nor have returned
  unsigned at_barrier = 0;    // lanes at the block's barrier
  uint64_t meetings = 0;
  std::vector<NamedPlace> named;      // the latest name of each place, as far as the merge has come
  std::vector<NamedPlace> named_now;  // as far as the lanes have come
  std::vector<Meeting> met;   // complete, and not yet passed by the merge
};

// ---- what becomes of the requests
struct Cost {
  unsigned cost, ideal;       // wavefronts of shared memory, or sectors of 32 bytes
};

struct RowKey {
  uint32_t pc;
  uint16_t target;            // index of the region; kShared, kAllocated
  uint8_t op, width;
  const char* array;          // of shared memory
  bool operator==(const RowKey& k) const {
    return pc == k.pc && target == k.target && op == k.op && width == k.width && array == k.array;
  }
};
constexpr uint16_t kShared = 0xffff, kAllocated = 0xfffe;

struct Row {
  RowKey key;
  uint64_t requests, bytes, cost, ideal;
  unsigned worst, worst_ideal, warp;
  uint64_t block;
  int64_t address[32];        // from the start of the target; -1: the lane takes no part
};

struct Tracer {
  std::unique_ptr<Stream[]> stream;
  std::unique_ptr<WarpTrace[]> warp;
  std::vector<Row> rows;
  std::vector<uint32_t> slots;                  // a hash table of indices into rows, + 1
  std::map<const char*, uint64_t> instructions; // by Site::what: warps that have executed it
  std::map<uint32_t, Site> sites;               // of the pcs that came with one
  std::set<uint32_t> past_L1;                   // pcs of cp.async.cg
  Tracer();
  ~Tracer();
};

// ---- what Python reads (mirrored in native.py)
struct TraceRow {
  const char *kernel, *target, *file;           // file and line: empty unless the pc says nothing
  int32_t line, shared;
  uint64_t pc;
  int32_t op, width;
  uint64_t requests, bytes, cost, ideal;
  uint32_t worst, worst_ideal, warp, launch;
  uint64_t block;
  int64_t address[32];
};

struct TraceCount {
  const char* name;
  uint64_t count;
};

struct Trace {
  std::vector<TraceRow> rows;
  std::vector<FoundRow> found;
  std::vector<TraceCount> instructions;
  std::map<std::string, uint64_t> counts;
  std::map<std::string, std::string> names;     // strings that rows point at
};

// trace.cpp: called while blocks run
uint32_t trace_pc(const Worker*, uintptr_t pc);         // from the start of the kernel's library; 0: it is elsewhere
void trace_begin(Worker*);                              // a block
void trace_access(Worker*, uint64_t address, uint16_t target, size_t bytes, uint8_t op, EventKind, uintptr_t pc, const Site&,
                  uintptr_t frame);
void trace_instruction(Worker*, uintptr_t pc, Site);    // one without a request, by the current lane: for trace_count
void trace_bulk(Worker*, uintptr_t pc, Op, const struct Box&, Site);  // a bulk copy, issued by the current lane
void trace_past_L1(Worker*, uintptr_t pc);              // the cp.async there is a cp.async.cg
void trace_name(Worker*, const char* name, uint32_t offset);
void trace_sync(Worker*, uint64_t number);              // the current lane comes to a rendezvous
void trace_met(Worker*, unsigned warp, uint64_t number, unsigned members);
void trace_barrier(Worker*);                            // the current lane comes to the block's barrier
void trace_stopped(Worker*, unsigned warp);             // a lane has begun to wait, or has returned
void trace_end(Worker*);                                // the current lane has returned
void trace_count(Worker*, const char* what, uint64_t warps);
void trace_collect(Worker*, unsigned launch);
// trace_cost.cpp
// source: of an AsyncCopy, where each lane's bytes come from; 0: they are zeros. past_L1: it is a cp.async.cg.
Cost shared_cost(Op, const uint32_t* offset, unsigned lanes, unsigned width, const uint64_t* source, bool past_L1);
Cost global_cost(const uint64_t* address, unsigned lanes, unsigned width);

}  // namespace emu
