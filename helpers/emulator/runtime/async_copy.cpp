// cp.async (PTX ISA, "Data Movement and Conversion Instructions", "Non-bulk copy: cp.async"): a thread's copies, in groups.
// A copy lands at the wait that covers it and not before: as late as the program allows, its source read then. One that
// nobody waits for never lands.
#include "async_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../include/emulator/ptx.h"
#include "memory.h"
#include "report.h"
#include "tool.h"

namespace emu {

struct Copy {
  char* to;
  const char* from;
  uint8_t bytes, source_bytes;  // zeros behind source_bytes
};

struct Copies {  // of one thread
  uint64_t landed = 0;              // so many are through
  std::vector<Copy> waiting;        // oldest first
  std::vector<size_t> group_end;    // of every committed group, the copies up to here
};

struct CopyState {
  Copies of_thread[kMaxThreads];
};
CopyState* new_copy_state() { return new CopyState; }
void delete_copy_state(CopyState* s) { delete s; }
void begin_copies(CopyState* s, unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    Copies& c = s->of_thread[i];
    c.landed = 0, c.waiting.clear(), c.group_end.clear();
  }
}

namespace {
Copies& mine() { return worker->copies->of_thread[worker->current->number]; }
}  // namespace

void issue_copy(void* shared, const void* global, size_t bytes, size_t source_bytes, bool past_L1, uintptr_t pc, Site site) {
  Worker* w = worker;
  if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes > bytes)
    fail("inline PTX", 801, pc, site, "copies %zu bytes, %zu of them from memory, with %s: 4, 8 or 16, and no more from memory",
         bytes, source_bytes, site.what);
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0 && source_bytes > 0)
    misaligned("copies", reinterpret_cast<uintptr_t>(global), bytes, pc, site);
  const char* from = static_cast<const char*>(global);
  for (size_t left = source_bytes, part; left > 0; left -= part, from += part) {  // 12 bytes are read as 8 and 4
    for (part = 16; part > left;) part /= 2;
    check_access(Op::Load, from, part, pc, site);
  }
  check_access(Op::AsyncCopy, shared, bytes, pc, site);
  ++w->critical;
  mine().waiting.push_back(
      {static_cast<char*>(shared), static_cast<const char*>(global), uint8_t(bytes), uint8_t(source_bytes)});
  --w->critical;
  const unsigned me = w->current->number;
  const IssuedCopy copy{size_t(static_cast<char*>(shared) - w->arena), bytes, {ActorKind::Thread, me, me}, past_L1, pc, site};
  for (Watcher* t : w->on_memory) t->copy_issued(copy);
}

void commit_copies() {
  Worker* w = worker;
  Copies& own = mine();
  ++w->critical;
  own.group_end.push_back(own.waiting.size());
  --w->critical;
}

// The oldest `count` copies.
static void land(Worker* w, Copies& own, size_t count, const Actor& actor) {
  for (size_t i = 0; i < count; ++i) {
    const Copy& c = own.waiting[i];
    memcpy(c.to, c.from, c.source_bytes);
    memset(c.to + c.source_bytes, 0, size_t(c.bytes - c.source_bytes));
    for (Watcher* t : w->on_memory) t->copy_landed(size_t(c.to - w->arena), c.bytes, actor);
  }
  own.waiting.erase(own.waiting.begin(), own.waiting.begin() + long(count));
  own.landed += count;
  for (size_t& end : own.group_end) end -= std::min(end, count);
}

// Until at most `groups` of the committed groups are under way.
void wait_copies(uint64_t groups) {
  Copies& own = mine();
  if (own.group_end.size() <= groups) return;
  const size_t ending = own.group_end.size() - size_t(groups), landing = own.group_end[ending - 1];
  own.group_end.erase(own.group_end.begin(), own.group_end.begin() + long(ending));
  const unsigned me = worker->current->number;
  land(worker, own, landing, {ActorKind::Thread, me, me});
}

uint64_t copies_issued(Worker* w, unsigned thread) {
  const Copies& c = w->copies->of_thread[thread];
  return c.landed + c.waiting.size();
}
void land_copies(Worker* w, unsigned thread, uint64_t issued, const Actor& actor) {
  Copies& c = w->copies->of_thread[thread];
  if (issued > c.landed) land(w, c, size_t(issued - c.landed), actor);
}

#define EMU_PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
void async_copy(void* shared, const void* global, size_t bytes, size_t source_bytes, Site site) {
  issue_copy(shared, global, bytes, source_bytes, bytes == 16, EMU_PC, site);  // as CUDA has it
}
#undef EMU_PC
void async_commit() { commit_copies(); }
void async_wait(unsigned groups) { wait_copies(groups); }

}  // namespace emu
