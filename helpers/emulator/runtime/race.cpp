// What orders two accesses is what the CUDA C++ Programming Guide says does: __syncthreads() for the threads of a block,
// __syncwarp() for the lanes it names; and what the PTX ISA says does: named barriers, and mbarriers for whoever waits
// after those who arrive; and flags, with the fences around them (race.h). Shuffles, votes and other warp instructions order
// no memory.
//
// Blocks of a launch are ordered by nothing but atomics and flags. Threads that write the same value to one place are left alone, as
// compute-sanitizer's racecheck does by default; and atomics don't race with atomics.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "async.h"

namespace emu {

namespace {

constexpr size_t kCells = kArena / 2;

static_assert(kThreads == kMaxThreads);

// Does what `other` did at `stamp` come before what `thread` does now?
bool ordered(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  if (thread == other || stamp <= r.everybody.known[other] || stamp <= r.clock[thread].known[other]) return true;
  return thread / kWarp == other / kWarp && stamp <= r.all[thread / kWarp];
}

// Has a fence.proxy.async, by whomever on the way from the one to the other, let the async proxy see it?
bool visible(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  return stamp <= r.everybody.visible[other] || stamp <= r.clock[thread].visible[other];
}

void join(uint32_t* __restrict to, const uint32_t* __restrict from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
}

void join(Worker* w, Clock& to, const Clock& from) {
  const size_t agents = w->races->agents.size();
  join(to.known, from.known, w->threads);
  join(to.known + kThreads, from.known + kThreads, agents);
  join(to.visible, from.visible, w->threads);
}

const char* const kKinds[] = {"race", "in flight", "uninitialised shared memory", "uninitialised memory", "overwritten", "proxy fence", "proxy fence"};

std::string place_in_words(const Worker* w, const Sighting& s) {
  if (s.region == kShared && w->async->mbarrier.count(uint32_t(s.offset)) != 0) return "the mbarrier " + mbarrier_name(w, uint32_t(s.offset));
  return s.region == kShared ? shared_place(w, s.thread / kWarp, s.offset)
                             : std::string(session.regions[s.region].name) + " + " + std::to_string(s.offset) + " B";
}

std::string actor_name(const Worker* w, unsigned actor) {
  if (actor < kThreads) return thread_name(w, &w->thread[actor]);
  const Agent& a = w->races->agents[actor - kThreads];
  if (a.kind == AgentKind::Wgmma) return "the wgmma of warps " + std::to_string(a.thread / kWarp) + "-" + std::to_string(a.thread / kWarp + 3);
  return "the bulk copy of " + thread_name(w, &w->thread[a.thread]);
}

std::string in_words(const Worker* w, const Sighting& s) {
  const std::string who = describe(w, &w->thread[s.thread]), other = actor_name(w, s.other);
  const std::string does = who + (s.writes ? " writes " : " reads ") + place_in_words(w, s);
  switch (s.wrong) {
    case Wrong::Race:
      return does + ", which " + other + (s.other_writes ? " writes" : " reads") + " on {other}, and nothing orders the two";
    case Wrong::InFlight:
      return does + " while " +
             (s.other >= kThreads ? other : s.other == s.thread ? "its own cp.async" : "the cp.async of " + other) +
             " on {other} may still be writing it";
    case Wrong::Overwritten: return does + " while " + other + " on {other} may still be reading it";
    case Wrong::Unfenced:
      return does + " through the async proxy, and " + other + " wrote it on {other} with no fence.proxy.async between the two";
    case Wrong::Unwritten: return does + ", which nobody has written";
    case Wrong::UnwrittenTensor:
      return who + " reads " + std::to_string(s.bytes) + " bytes at " + session.regions[s.region].name + " + " +
             std::to_string(s.offset) + " bytes, which no kernel has written";
    case Wrong::UnfencedInit:
      return who + " starts a copy that reports to " + place_in_words(w, s) + ", which " + other +
             " initialised on {other} with no fence.mbarrier_init after it";
  }
  return "";
}

// A race has no order of its own: the reader is told of first, of two writers the one that stands further down.
void note(Worker* w, Sighting s) {
  Races& r = *w->races;
  if (s.wrong == Wrong::Race && s.writes && (!s.other_writes || s.other_pc > s.pc)) {
    std::swap(s.pc, s.other_pc);
    std::swap(s.thread, s.other);
    std::swap(s.writes, s.other_writes);
  }
  ++w->critical;
  Found& f = r.found[{s.wrong, s.pc, s.other_pc}];
  const int apart = s.thread / kWarp != s.other / kWarp;
  if (f.count++ == 0) {
    f.block = w->block;
    f.apart = apart;
    f.text = in_words(w, s);
  }
  f.apart = std::max(f.apart, apart);
  --w->critical;
}

// ---- between blocks

uint64_t across(uint64_t block, uint32_t pc, unsigned thread) { return (block + 1) << 32 | (pc & 0x3fffff) << 10 | thread; }

void raise(std::atomic<uint64_t>& most, uint64_t value) {
  for (uint64_t now = most.load(std::memory_order_relaxed); now < value && !most.compare_exchange_weak(now, value);) {
  }
}

void note_across(Worker* w, Across::Blocks& blocks, uint32_t pc, unsigned thread) {
  const uint64_t me = across(w->block, pc, thread);
  raise(blocks.not_first, ~me);
  raise(blocks.last, me);
}

// ---- in a block

struct Memory {
  Cell* cell;
  unsigned shift;                   // a cell has 1 << shift bytes
  const char* base;
  uint16_t region;
  size_t element;                   // of the first cell in AcrossBlocks
};

unsigned cell_shift(const Region& r) { return r.item >= 4 ? 2 : 1; }

// A store that has happened.
void write_across(Worker* w, const Overwrite& o, const char* base) {
  const unsigned shift = cell_shift(session.regions[o.region]);
  for (size_t at = o.offset >> shift; at <= (o.offset + o.bytes - 1) >> shift; ++at) {
    const size_t element = w->run->across.begin[o.region] + at;
    Across& a = w->run->across.all[element];
    note_across(w, a.writes, o.pc, o.thread);
    if (o.offset > at << shift || o.offset + o.bytes < (at + 1) << shift) a.parts = true;
    uint64_t value = uint64_t(1) << 32, none = 0;
    memcpy(&value, base + (at << shift), size_t(1) << shift);
    if (!a.value.compare_exchange_strong(none, value) && none != value) a.differ = true;
  }
}

void remember(Worker* w, const Overwrite& o, const char* base) {
  ++w->critical;
  w->races->overwrites.push_back(o);
  if (!o.other_block) memcpy(w->races->overwrites.back().old, base + o.offset, o.bytes);
  --w->critical;
}

// A write of what an agent of the async proxy may still be reading.
template <class Sight>
void check_agents(Worker* w, size_t offset, size_t bytes, const Sight& sighting) {
  Races& r = *w->races;
  if (r.agents.empty()) return;
  uint32_t told = 0;
  for (size_t at = offset / 16; at <= (offset + bytes - 1) / 16; ++at)
    for (auto& read : r.reads[at].by) {
      if (read.stamp <= r.start) continue;
      if (told != read.pc && !ordered(r, w->current->number, read.agent, read.stamp))
        note(w, sighting(Wrong::Overwritten, told = read.pc, read.agent, false));
    }
}

void check_cells(Worker* w, const Memory& m, size_t offset, size_t bytes, Op op, uint32_t pc) {
  Races& r = *w->races;
  const unsigned me = w->current->number, warp = me / kWarp, lane = me % kWarp;
  const bool atomic = op == Op::Atomic, strong = atomic || r.strong, write = op == Op::Store || op == Op::StoreMatrix || op == Op::AsyncCopy || atomic;
  const bool between_blocks = m.region != kShared && !strong && op != Op::AsyncCopy && !w->synchronised;
  const bool first_atomic = atomic && m.region != kShared && (!w->synchronised || w->only_atomic != 0);
  const uint32_t now = r.tick[me];
  const auto sighting = [&](Wrong wrong, uint32_t other_pc, unsigned other, bool other_writes) {
    return Sighting{wrong,        pc,    other_pc,     uint32_t(offset), uint32_t(bytes), uint16_t(me), uint16_t(other),
                    write,        other_writes, m.region};
  };
  uint32_t told_flight = 0, told_write = 0, told_read = 0;  // pcs that this access has already been found to clash with
  if (write && m.region == kShared) check_agents(w, offset, bytes, sighting);
  for (size_t at = offset >> m.shift; at <= (offset + bytes - 1) >> m.shift; ++at) {
    Cell& c = m.cell[at];
    const size_t begin = at << m.shift, end = begin + (1u << m.shift);
    const unsigned low = offset > begin ? unsigned(offset - begin) : 0;
    const unsigned high = unsigned((offset + bytes < end ? offset + bytes : end) - begin);
    const uint8_t mask = uint8_t((1u << high) - (1u << low));
    const bool written = c.stamp > r.start && (c.bytes & mask) != 0;
    if (written && c.in_flight) {
      if (told_flight != c.pc) note(w, sighting(Wrong::InFlight, told_flight = c.pc, c.thread, true));
      continue;
    }
    if (written && !(strong && c.strong) && told_write != c.pc && !ordered(r, me, c.thread, c.stamp)) {
      told_write = c.pc;
      if (write && !strong && !c.strong && op != Op::AsyncCopy)
        remember(w, {uint16_t(me), c.thread, m.region, false, pc, c.pc, uint32_t(offset), uint32_t(bytes), {}}, m.base);
      else
        note(w, sighting(Wrong::Race, c.pc, c.thread, true));
    }
    if (!write) {
      const auto is = [&](const Readers& reader) { return reader.warp == warp && reader.stamp == now; };
      const auto over = [&](const Readers& reader) {
        return reader.stamp <= r.start || ordered(r, me, reader.warp * kWarp + reader.lane, reader.stamp);
      };
      Readers* const mine = is(c.reader[0])              ? &c.reader[0]
                            : is(c.reader[1])            ? &c.reader[1]
                            : over(c.reader[0])          ? &c.reader[0]
                            : over(c.reader[1])          ? &c.reader[1]
                            : c.reader[0].warp == warp   ? &c.reader[0]
                                                         : &c.reader[1];
      if (between_blocks && !written && c.reader[0].stamp <= r.start) note_across(w, w->run->across.all[m.element + at].reads, pc, me);
      const uint8_t how = strong ? mask | kStrongly : mask;
      if (mine->warp == warp && mine->stamp == now && mine->bytes == how)
        mine->lanes |= 1u << lane;
      else if (strong && is(*mine))
        continue;  // what isn't strong says more
      else
        *mine = {now, 1u << lane, pc, uint16_t(warp), how, uint8_t(lane)};
      mine->pc = pc;
      mine->lane = uint8_t(lane);
      continue;
    }
    for (Readers& reader : c.reader) {
      if (reader.stamp <= r.start || (reader.bytes & mask) == 0) continue;
      unsigned other = kMaxThreads;
      if (reader.warp != warp || reader.stamp > r.all[warp])
        for (unsigned rest = reader.lanes; rest != 0 && other == kMaxThreads; rest &= rest - 1) {
          const unsigned l = reader.warp * kWarp + unsigned(__builtin_ctz(rest));
          if (!ordered(r, me, l, reader.stamp)) other = l;
        }
      if (other != kMaxThreads && told_read != reader.pc && !(strong && (reader.bytes & kStrongly)))
        note(w, sighting(Wrong::Race, told_read = reader.pc, other, false));
      reader.stamp = 0;
    }
    c.stamp = now;
    c.pc = pc;
    c.thread = uint16_t(me);
    c.bytes = mask;
    c.strong = strong;
    c.in_flight = false;
    if (first_atomic) note_across(w, w->run->across.all[m.element + at].atomics, pc, me);
  }
  if (write && between_blocks) remember(w, {uint16_t(me), 0, m.region, true, pc, 0, uint32_t(offset), uint32_t(bytes), {}}, m.base);
}

void check(Worker* w, const Memory& m, size_t offset, size_t bytes, Op op, uintptr_t pc) {
  const uint32_t at = trace_pc(w, pc);
  for (; bytes > 16; bytes -= 16, offset += 16) check_cells(w, m, offset, 16, op, at);
  check_cells(w, m, offset, bytes, op, at);
}

void* lazily(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return p;
}

}  // namespace

Races::Races() {
  cell = static_cast<Cell*>(lazily(kCells * sizeof(Cell)));
  reads = static_cast<AgentReads*>(lazily(kArena / 16 * sizeof(AgentReads)));
  clock = static_cast<Clock*>(lazily(kThreads * sizeof(Clock)));
  memset(&everybody, 0, sizeof everybody);
  for (uint32_t& t : tick) t = 1;
}

Races::~Races() {
  munmap(cell, kCells * sizeof(Cell));
  munmap(reads, kArena / 16 * sizeof(AgentReads));
  munmap(clock, kThreads * sizeof(Clock));
  if (element != nullptr) munmap(element, elements * sizeof(Cell));
}

// Cells of an earlier launch may stay as they are: their stamps are old.
void races_begin_launch(Worker* w, size_t elements) {
  Races& r = *w->races;
  if (elements <= r.elements) return;
  if (r.element != nullptr) munmap(r.element, r.elements * sizeof(Cell));
  r.element = static_cast<Cell*>(lazily(elements * sizeof(Cell)));
  r.elements = elements;
}

// Stamps only grow, so that all those of earlier blocks lie below `start`, in clocks too.
void races_begin(Worker* w) {
  Races& r = *w->races;
  for (uint32_t t : r.tick) r.start = std::max(r.start, t);
  for (const Agent& a : r.agents) r.start = std::max(r.start, a.tick);
  for (uint32_t& t : r.tick) t = r.start + 1;
  for (uint32_t& all : r.all) all = r.start;
  memset(r.apart, 0, sizeof r.apart);
  r.fenced = false;
  r.agents.clear();
  r.overwrites.clear();
  r.flags = {};
  r.strong = false;
}

void race_access(Worker* w, size_t offset, size_t bytes, Op op, uintptr_t pc) {
  check(w, {w->races->cell, 1, w->arena, kShared, 0}, offset, bytes, op, pc);
}

void race_global(Worker* w, size_t region, uint64_t offset, size_t bytes, Op op, uintptr_t pc) {
  const size_t begin = w->run->across.begin[region];
  if (begin == SIZE_MAX) return;
  const Region& r = session.regions[region];
  check(w, {w->races->element + begin, cell_shift(r), r.base, uint16_t(region), begin}, offset, bytes, op, pc);
}

void race_unwritten(Worker* w, size_t offset, size_t bytes, uintptr_t pc) {
  const uint16_t me = uint16_t(w->current->number);
  note(w, {Wrong::Unwritten, trace_pc(w, pc), 0, uint32_t(offset), uint32_t(bytes), me, me, false, false, kShared});
}

void race_unwritten_tensor(Worker* w, size_t region, uint64_t offset, size_t bytes, uintptr_t pc) {
  const uint16_t me = uint16_t(w->current->number);
  note(w, {Wrong::UnwrittenTensor, trace_pc(w, pc), 0, uint32_t(offset), uint32_t(bytes), me, me, false, false, uint16_t(region)});
}

void race_after(Worker* w, size_t offset, size_t bytes, unsigned other, uint32_t stamp, uint32_t other_pc, uintptr_t pc) {
  const unsigned me = w->current->number;
  if (!ordered(*w->races, me, other, stamp))
    note(w, {Wrong::Race, trace_pc(w, pc), other_pc, uint32_t(offset), uint32_t(bytes), uint16_t(me), uint16_t(other), false, true, kShared});
}

void race_unfenced_init(Worker* w, size_t offset, uint32_t init_pc, unsigned by, uintptr_t pc) {
  note(w, {Wrong::UnfencedInit, trace_pc(w, pc), init_pc, uint32_t(offset), 8, uint16_t(w->current->number), uint16_t(by), false,
           true, kShared});
}

void race_settle(Worker* w) {
  Races& r = *w->races;
  if (r.overwrites.empty()) return;
  ++w->critical;
  for (size_t i = 0; i < r.overwrites.size();) {
    const Overwrite o = r.overwrites[i];
    if (w->current != nullptr && o.thread != w->current->number) {
      ++i;
      continue;
    }
    const char* base = o.region == kShared ? w->arena : session.regions[o.region].base;
    if (o.other_block)
      write_across(w, o, base);
    else if (memcmp(o.old, base + o.offset, o.bytes) != 0)
      note(w, {Wrong::Race, o.pc, o.other_pc, o.offset, o.bytes, o.thread, o.other, true, true, o.region});
    r.overwrites.erase(r.overwrites.begin() + long(i));
  }
  --w->critical;
}

// Who writes: the current thread, or an agent.
static void race_writes(Worker* w, size_t offset, size_t bytes, unsigned actor, uint32_t pc, bool in_flight) {
  Races& r = *w->races;
  const uint32_t stamp = actor < kThreads ? r.tick[actor] : r.agents[actor - kThreads].tick;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    Cell& c = r.cell[at];
    c.stamp = stamp;
    if (pc != 0) c.pc = pc;
    c.thread = uint16_t(actor);
    c.bytes = 3;
    c.strong = false;
    c.in_flight = in_flight;
  }
}

void race_issued(Worker* w, size_t offset, size_t bytes, unsigned actor, uintptr_t pc) {
  race_writes(w, offset, bytes, actor, trace_pc(w, pc), true);
}
void race_landed(Worker* w, size_t offset, size_t bytes, unsigned actor) { race_writes(w, offset, bytes, actor, 0, false); }

// ---- what orders threads

void clear(Worker* w, Clock& c) {
  memset(c.known, 0, w->threads * sizeof c.known[0]);
  memset(c.known + kThreads, 0, kAgents * sizeof c.known[0]);
  memset(c.visible, 0, w->threads * sizeof c.visible[0]);
}

Clock& clock_of(Worker* w, std::unique_ptr<Clock>& c) {
  if (c == nullptr) {
    ++w->critical;
    c.reset(new Clock);
    --w->critical;
    clear(w, *c);
  }
  return *c;
}

void release(Worker* w, unsigned thread, Clock& into) {
  Races& r = *w->races;
  join(w, into, r.clock[thread]);
  const unsigned first = thread / kWarp * kWarp, end = std::min(first + kWarp, w->threads);
  for (unsigned i = first; i < end; ++i) into.known[i] = std::max(into.known[i], r.all[thread / kWarp]);
  into.known[thread] = r.tick[thread]++;
}

void acquire(Worker* w, unsigned thread, const Clock& from) {
  Races& r = *w->races;
  join(w, r.clock[thread], from);
  r.apart[thread / kWarp] = true;
}

static void one_clock(Races& r, unsigned first, unsigned end, uint32_t* most) {
  *most = *std::max_element(r.tick + first, r.tick + end);
  for (unsigned i = first; i < end; ++i) r.tick[i] = *most + 1;
}

void order_lanes(Worker* w, unsigned warp, unsigned lanes) {
  if (w->races == nullptr) return;
  Races& r = *w->races;
  const unsigned first = warp * kWarp;
  const bool whole = lanes == w->tracer->warp[warp].lanes;
  if (!whole || r.apart[warp]) {
    Clock& together = r.together;
    clear(w, together);
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned i = first + unsigned(__builtin_ctz(rest));
      join(w, together, r.clock[i]);
      together.known[i] = r.tick[i]++;
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) r.clock[first + unsigned(__builtin_ctz(rest))] = together;
    r.apart[warp] = !whole;
  }
  if (whole) one_clock(r, first, std::min(first + kWarp, w->threads), &r.all[warp]);
}

void order_block(Worker* w) {
  if (w->races == nullptr) return;
  Races& r = *w->races;
  for (unsigned i = 0; i < w->threads; ++i) {
    join(r.everybody.known + kThreads, r.clock[i].known + kThreads, r.agents.size());
    if (r.fenced) join(r.everybody.visible, r.clock[i].visible, w->threads);
  }
  r.fenced = false;
  for (unsigned first = 0; first < w->threads; first += kWarp) {
    const unsigned end = std::min(first + kWarp, w->threads);
    one_clock(r, first, end, &r.all[first / kWarp]);
    for (unsigned i = first; i < end; ++i) r.everybody.known[i] = r.all[first / kWarp];
  }
}

// ---- flags

void memory_fence() {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr || w->races == nullptr) return;
  Flags& flags = w->races->flags;
  const unsigned me = w->current->number;
  race_settle(w);
  ++w->critical;
  std::unique_ptr<Clock>& seen = flags.seen[me];
  if (seen != nullptr) acquire(w, me, *seen);
  seen.reset();
  Clock& now = clock_of(w, flags.fenced[me]);
  clear(w, now);
  release(w, me, now);
  --w->critical;
}

void race_flag(Worker* w, const void* flag, unsigned order) {
  Flags& flags = w->races->flags;
  if ((order & kReleases) != 0) memory_fence();
  if (flags.fenced.empty()) return;
  const unsigned me = w->current->number;
  ++w->critical;
  auto told = flags.told.find(reinterpret_cast<uintptr_t>(flag));
  if (told == flags.told.end() && flags.told.size() >= kFlags) told = flags.told.find(0);
  if ((order & kReads) != 0 && told != flags.told.end()) {
    if ((order & kAcquires) != 0) acquire(w, me, *told->second);
    else join(w, clock_of(w, flags.seen[me]), *told->second);
  }
  const auto mine = flags.fenced.find(me);
  if ((order & kWrites) != 0 && mine != flags.fenced.end()) {
    if (told == flags.told.end())
      told = flags.told.emplace(flags.told.size() + 1 < kFlags ? reinterpret_cast<uintptr_t>(flag) : 0, nullptr).first;
    join(w, clock_of(w, told->second), *mine->second);
  }
  --w->critical;
}

// ---- the async proxy

void proxy_fence() {
  Worker* w = worker;
  if (w->races == nullptr) return;
  Races& r = *w->races;
  const unsigned me = w->current->number, warp = me / kWarp;
  race_settle(w);
  mbarrier_fence();
  Clock& mine = r.clock[me];
  join(mine.visible, mine.known, w->threads);
  join(mine.visible, r.everybody.known, w->threads);
  for (unsigned i = warp * kWarp; i < std::min((warp + 1) * kWarp, w->threads); ++i)
    mine.visible[i] = std::max(mine.visible[i], r.all[warp]);
  mine.visible[me] = r.tick[me]++;
  r.fenced = r.apart[warp] = true;
}

unsigned proxy_agent(AgentKind kind, unsigned owner, unsigned thread) {
  Worker* w = worker;
  if (w->races == nullptr) return kThreads;
  Races& r = *w->races;
  for (unsigned i = 0; i < r.agents.size(); ++i)
    if (r.agents[i].kind == kind && r.agents[i].owner == owner) return kThreads + i;
  if (r.agents.size() == kAgents) return kThreads + kAgents - 1;  // more than any kernel has: the last ones are not told apart
  ++w->critical;
  r.agents.push_back({kind, uint16_t(thread), owner, r.start + 1});
  --w->critical;
  return kThreads + unsigned(r.agents.size()) - 1;
}

void proxy_read(unsigned agent, const void* shared, size_t bytes, uintptr_t pc, Site site) {
  Worker* w = worker;
  const size_t offset = size_t(static_cast<const char*>(shared) - w->arena);
  check_async_read(offset, bytes, pc, site);
  if (w->races == nullptr) return;
  Races& r = *w->races;
  const Agent& a = r.agents[agent - kThreads];
  const uint32_t at_pc = trace_pc(w, pc);
  const unsigned readers = a.kind == AgentKind::Wgmma ? 4 : 1;  // the first lanes of the warps that execute it
  uint32_t told_flight = 0, told_write = 0, told_fence = 0;
  const Cell* before = nullptr;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    const Cell& c = r.cell[at];
    if (c.stamp <= r.start) continue;
    if (before != nullptr && before->stamp == c.stamp && before->thread == c.thread && before->pc == c.pc) continue;
    before = &c;
    for (unsigned i = 0; i < readers; ++i) {
      const unsigned me = a.thread + i * kWarp;
      const Sighting s{Wrong::Race,     at_pc, c.pc, uint32_t(2 * at), uint32_t(bytes), uint16_t(me), c.thread, false,
                       true,            kShared};
      const auto tell = [&](Wrong wrong, uint32_t& told) {
        if (told == c.pc) return;
        told = c.pc;
        Sighting found = s;
        found.wrong = wrong;
        note(w, found);
      };
      if (c.in_flight) tell(Wrong::InFlight, told_flight);
      else if (!ordered(r, me, c.thread, c.stamp)) tell(Wrong::Race, told_write);
      else if (c.thread < kThreads && !visible(r, me, c.thread, c.stamp)) tell(Wrong::Unfenced, told_fence);
    }
  }
  for (size_t at = offset / 16; at <= (offset + bytes - 1) / 16; ++at) {
    auto& by = r.reads[at].by;
    auto* slot = std::find_if(by, std::end(by), [&](const auto& read) { return read.stamp > r.start && read.agent == agent; });
    if (slot == std::end(by))
      slot = std::find_if(by, std::end(by), [&](const auto& read) {
        return read.stamp <= r.start || ordered(r, a.thread, read.agent, read.stamp);
      });
    if (slot == std::end(by)) slot = by;
    *slot = {a.tick, at_pc, uint16_t(agent)};
  }
}

// What readers have left needs no fence: it is enough that they are done.
void proxy_write(const void* shared, size_t bytes, uintptr_t pc) {
  Worker* w = worker;
  Races& r = *w->races;
  const size_t offset = size_t(static_cast<const char*>(shared) - w->arena);
  const unsigned me = w->current->number;
  race_settle(w);
  uint32_t told = 0;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    const Cell& c = r.cell[at];
    if (c.stamp <= r.start || c.in_flight || c.thread >= kThreads || c.pc == told) continue;
    if (ordered(r, me, c.thread, c.stamp) && !visible(r, me, c.thread, c.stamp))
      note(w, {Wrong::Unfenced, trace_pc(w, pc), told = c.pc, uint32_t(2 * at), uint32_t(bytes), uint16_t(me), c.thread, true, true, kShared});
  }
  race_access(w, offset, bytes, Op::AsyncCopy, pc);
}

uint32_t proxy_commit(unsigned agent) {
  Worker* w = worker;
  return w->races == nullptr ? 0 : w->races->agents[agent - kThreads].tick++;
}

void proxy_waited(unsigned agent, uint32_t group) {
  Worker* w = worker;
  if (w->races == nullptr) return;
  uint32_t& known = w->races->clock[w->current->number].known[agent];
  known = std::max(known, group);
  w->races->apart[w->current->number / kWarp] = true;
}

void races_end(Worker* w) {
  race_settle(w);
}

void races_collect(Worker* w, unsigned launch) {
  for (auto& [key, f] : w->races->found) {
    const char* text = session.trace.names.emplace(f.text, f.text).first->second.c_str();
    const auto [wrong, pc, other_pc] = key;
    session.trace.found.push_back(
        {kKinds[size_t(wrong)], text, pc, other_pc, f.count, f.block, int32_t(launch), f.apart});
  }
  w->races->found.clear();
}

// ---- between blocks

constexpr size_t kFollowed = 4 << 20;  // elements in all: a trace is for small inputs

void across_begin(AcrossBlocks& a) {
  a.begin.assign(session.regions.size(), SIZE_MAX);
  for (size_t i = 0; i < session.regions.size(); ++i) {
    const Region& r = session.regions[i];
    const size_t cells = (r.bytes >> cell_shift(r)) + 1;
    if (session.written[i].empty() || a.count + cells > kFollowed) continue;
    a.begin[i] = a.count;
    a.count += cells;
  }
  if (a.count > 0) a.all = static_cast<Across*>(lazily(a.count * sizeof(Across)));
}

// Looks at all elements when the launch has ended: so the order in which blocks ran says nothing.
void across_end(AcrossBlocks& a, unsigned launch, const Run& run) {
  std::map<std::tuple<uint32_t, uint32_t>, Found> found;
  const auto pc = [](uint64_t packed) { return uint32_t(packed >> 10 & 0x3fffff); };
  const auto who = [&](uint64_t packed) {
    const uint64_t block = (packed >> 32) - 1, thread = packed & 1023;
    const uint32_t *g = run.launch->grid, *b = run.launch->block;
    return "thread " + coordinates(unsigned(thread % b[0]), unsigned(thread / b[0] % b[1]), unsigned(thread / b[0] / b[1]), b) +
           " of block " + coordinates(unsigned(block % g[0]), unsigned(block / g[0] % g[1]), unsigned(block / g[0] / g[1]), g);
  };
  for (size_t i = 0; i < a.begin.size(); ++i) {
    if (a.begin[i] == SIZE_MAX) continue;
    const Region& r = session.regions[i];
    for (size_t at = 0; at <= (r.bytes - 1) >> cell_shift(r); ++at) {
      const Across& e = a.all[a.begin[i] + at];
      if (e.writes.last == 0 || e.parts) continue;
      const uint64_t other = ~e.writes.not_first;
      const auto elsewhere = [&](const Across::Blocks& blocks) {  // what another block has done; 0: nothing
        const auto apart = [&](uint64_t x) { return x >> 32 != other >> 32; };
        return blocks.last == 0 ? 0 : apart(~blocks.not_first) ? ~blocks.not_first : apart(blocks.last) ? blocks.last.load() : 0;
      };
      uint64_t one = e.differ ? elsewhere(e.writes) : 0;
      const char *verb = "writes ", *how = "";
      if (one == 0) one = elsewhere(e.reads), verb = "reads ";
      if (one == 0) one = elsewhere(e.atomics), verb = "changes ", how = " by an atomic";
      if (one == 0) continue;
      Found& f = found[{pc(one), pc(other)}];
      if (f.count++ > 0) continue;
      f.block = (one >> 32) - 1;
      f.text = who(one) + " " + verb + r.name + " + " + std::to_string(at << cell_shift(r)) + " B" + how + ", which " + who(other) +
               " writes on {other}, and nothing orders the two";
    }
  }
  for (const auto& [key, f] : found) {
    const char* text = session.trace.names.emplace(f.text, f.text).first->second.c_str();
    session.trace.found.push_back(
        {kKinds[size_t(Wrong::Race)], text, std::get<0>(key), std::get<1>(key), f.count, f.block, int32_t(launch), 2});
  }
  if (a.all != nullptr) munmap(a.all, a.count * sizeof(Across));
  a.all = nullptr;
}

}  // namespace emu
