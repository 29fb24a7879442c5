// A tool: races. Two accesses of one place by different threads, one of them a write, that nothing orders: in shared memory,
// and in the outputs and workspace in global memory, there between blocks too. What orders threads is in race_order.cpp, what
// blocks do to each other in race_blocks.cpp.
//
// Threads that write the same value to one place are not reported, as by compute-sanitizer's racecheck by default; and atomics
// don't race with atomics.
#include <algorithm>
#include <cstring>
#include <string>

#include "barrier.h"
#include "memory.h"
#include "notes.h"
#include "race_blocks.h"
#include "race_flags.h"
#include "race_order.h"
#include "report.h"
#include "tool.h"
#include "worker.h"

namespace emu {

namespace {

// Does what `other` did at `stamp` come before what `thread` does now?
bool ordered(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  if (thread == other || stamp <= r.everybody.known[other] || stamp <= r.clock[thread].known[other]) return true;
  return thread / kWarp == other / kWarp && stamp <= r.all[thread / kWarp];
}

// Has a fence.proxy.async, by whomever on the way from the one to the other, let the async proxy see it?
bool visible(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  return stamp <= r.everybody.visible[other] || stamp <= r.clock[thread].visible[other];
}

// ---- memory: a cell, two bytes of shared memory or an element of a tensor, remembers who wrote it last, and from which two
// warps it has been read since

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
constexpr size_t kCells = kArena / 2;

// Who of the agents has read 16 bytes of shared memory.
struct AgentReads {
  struct {
    uint32_t stamp, pc;             // stamp 0: none
    uint16_t agent;
  } by[4];
};
constexpr size_t kReads16 = kArena / 16;

struct Overwrite {                  // of what somebody else has written: no race if the value is the same
  uint16_t thread, other, region;
  bool other_block;                 // perhaps; then `other`, `other_pc` and `old` say nothing
  uint32_t pc, other_pc, offset, bytes;
  unsigned char old[16];
  bool by_flags, strong;            // perhaps of another block's, where flags are followed: then with its stamp
  uint32_t stamp;
};

enum class Wrong : uint8_t { Race, InFlight, Overwritten, Unfenced, UnfencedInit };
const char* const kKinds[] = {"race", "in flight", "overwritten", "proxy fence", "proxy fence"};

struct Sighting {
  Wrong wrong;
  uint32_t pc, other_pc, offset, bytes;
  uint16_t thread, other;           // other: perhaps an agent
  bool writes, other_writes;
  uint16_t region;                  // or kShared; `offset` is from its start
};

// What an access is to the rules: of 16 bytes at most.
struct Touch {
  Op op;
  uint32_t pc;
  unsigned me;
  bool write, strong;
  bool between_blocks, first_atomic;  // other blocks are to know of it; as an atomic
};

struct Memory {
  Cell* cell;
  unsigned shift;                   // a cell has 1 << shift bytes
  const char* base;
  uint16_t region;
  size_t element;                   // of the first cell in AcrossBlocks
};

struct RaceWatcher final : Watcher {
  AcrossBlocks& across;
  Races r;
  BlockFlags flags;                 // told of only where Session::follows_flags
  Cell *cell, *element = nullptr;   // of shared memory; of the regions that AcrossBlocks follows
  size_t elements = 0;
  AgentReads* reads;                // of shared memory
  std::vector<Overwrite> overwrites;
  uint16_t far_region = kAllocated; // of the bulk copy that is being issued, if another GPU writes it
  uint32_t flag_pc = 0;             // of the access to a flag that is under way
  // The block is ordered with other blocks: it has executed an atomic, or looked at a flag, in global memory. left_out: where
  // flags are followed, by a volatile one.
  bool synchronised = false, left_out = false;
  uintptr_t only_atomic = 0;        // the one atomic instruction that made it so; 0: there was none, or more than it

  RaceWatcher(Worker* worker, AcrossBlocks& of_launch, FlagOrder& order)
      : Watcher(worker, kMemory | kExecution), across(of_launch), flags(order, r) {
    cell = static_cast<Cell*>(lazily(kCells * sizeof(Cell)));
    reads = static_cast<AgentReads*>(lazily(kReads16 * sizeof(AgentReads)));
  }
  ~RaceWatcher() override {
    give_back(cell, kCells * sizeof(Cell));
    give_back(reads, kReads16 * sizeof(AgentReads));
    if (element != nullptr) give_back(element, elements * sizeof(Cell));
  }

  unsigned me() const { return w->current->number; }

  // ---- launches and blocks

  // Cells of an earlier launch may stay as they are: their stamps are old.
  void begin_launch() override {
    if (across.count <= elements) return;
    if (element != nullptr) give_back(element, elements * sizeof(Cell));
    element = static_cast<Cell*>(lazily(across.count * sizeof(Cell)));
    elements = across.count;
  }
  void begin_block() override {
    r.begin_block(w->threads);
    overwrites.clear();
    synchronised = left_out = false;
    only_atomic = 0;
    far_region = kAllocated;
    if (session.follows_flags) flags.begin_block(w->block);
  }
  void end_block() override { settle(); }

  // ---- stores that have happened: the current thread's, or without one everybody's

  void settle() {
    if (!overwrites.empty()) settle_overwrites();
  }
  void settle_overwrites();
  void remember(const Overwrite& o, const char* base) {
    ++w->critical;
    overwrites.push_back(o);
    if (!o.other_block) memcpy(overwrites.back().old, base + o.offset, o.bytes);
    --w->critical;
  }

  void stopped(unsigned) override { settle(); }
  void yields() override { settle(); }
  void returned() override { settle(); }
  void comes(uint64_t) override { settle(); }

  // ---- accesses

  void access(const Access&) override;
  void check(const Memory&, size_t offset, size_t bytes, Op, uintptr_t pc, bool strong);
  void check_cells(const Memory&, size_t offset, size_t bytes, const Touch&);
  void check_agents(size_t offset, size_t bytes, const Touch&);
  void add_reader(Cell&, uint8_t mask, uint32_t now, const Touch&);
  Memory shared() { return {cell, 1, w->arena, kShared, 0}; }
  void polls(const void*, uintptr_t atomic) override;
  void strong_access(const void*, unsigned order) override;
  void read_flag(const void*, unsigned order) override;
  void between_blocks(const Access&, bool strong);
  void reads_far(const Access&);

  // ---- copies, by threads and agents

  unsigned number(const Actor& actor) {
    ++w->critical;
    const unsigned n = r.number(actor);
    --w->critical;
    return n;
  }
  void copy_issued(const IssuedCopy&) override;
  void copy_landed(size_t offset, size_t bytes, const Actor& actor) override { written(offset, bytes, number(actor), 0, false); }
  void written(size_t offset, size_t bytes, unsigned actor, uint32_t pc, bool in_flight);
  void agent_writes(const IssuedCopy&);
  void async_read(size_t offset, size_t bytes, const Actor&, uintptr_t pc, const Site&) override;
  void check_agent_read(const Agent&, size_t offset, size_t bytes, uint32_t pc);
  void async_committed(const Actor& actor) override {
    ++w->critical;
    r.commit(actor);
    --w->critical;
  }
  void async_waited(const Actor& actor, uint64_t group) override {
    ++w->critical;
    r.waited(me(), actor, group);
    --w->critical;
  }

  // ---- what orders threads

  void lanes_ordered(unsigned warp, unsigned lanes) override { r.order_lanes(warp, lanes, lanes == w->lanes(warp)); }
  void fence(Fence) override;
  void arrives(const BarrierPoint&) override;
  void completed(const BarrierPoint&) override;
  void passes(const BarrierPoint&, unsigned thread) override;
  void mbarrier_init(uint32_t at, uintptr_t pc) override;
  void mbarrier_used(uint32_t at, uintptr_t pc) override;
  BarrierClocks& clocks_of(const BarrierPoint& b) { return b.kind == BarrierPoint::Named ? r.named[b.place] : r.mbarrier[b.place]; }

  // ---- words

  std::string place(const Sighting& s) const {
    return s.region == kShared ? shared_or_mbarrier(w, s.thread / kWarp, s.offset)
                               : std::string(session.regions[s.region].name) + " + " + std::to_string(s.offset) + " B";
  }
  std::string name_of(unsigned actor);
  std::string in_words(const Sighting&);
  void tell(Sighting);
};

std::string RaceWatcher::name_of(unsigned actor) {
  if (actor < kThreads) return thread_name(w, &w->thread[actor]);
  const Agent& a = r.agent(actor);
  if (a.kind == ActorKind::Wgmma) return "the wgmma of warps " + std::to_string(a.thread / kWarp) + "-" + std::to_string(a.thread / kWarp + 3);
  return "the bulk copy of " + thread_name(w, &w->thread[a.thread]);
}

std::string RaceWatcher::in_words(const Sighting& s) {
  const std::string who = describe(w, &w->thread[s.thread]), other = name_of(s.other);
  const std::string does = who + (s.writes ? " writes " : " reads ") + place(s);
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
    case Wrong::UnfencedInit:
      return who + " starts a copy that reports to " + place(s) + ", which " + other +
             " initialised on {other} with no fence.mbarrier_init after it";
  }
  return "";
}

// A race has no order of its own: the reader is told of first, of two writers the one that stands further down.
void RaceWatcher::tell(Sighting s) {
  if (s.wrong == Wrong::Race && s.writes && (!s.other_writes || s.other_pc > s.pc)) {
    std::swap(s.pc, s.other_pc);
    std::swap(s.thread, s.other);
    std::swap(s.writes, s.other_writes);
  }
  note(w, kKinds[size_t(s.wrong)], s.pc, s.other_pc, s.thread / kWarp != s.other / kWarp, [&] { return in_words(s); });
}

void RaceWatcher::settle_overwrites() {
  ++w->critical;
  for (size_t i = 0; i < overwrites.size();) {
    const Overwrite o = overwrites[i];
    if (w->current != nullptr && o.thread != w->current->number) {
      ++i;
      continue;
    }
    const char* base = o.region == kShared ? w->arena : session.regions[o.region].base;
    if (o.by_flags)
      flags.writes(across.element(o.region, o.offset), across.element(o.region, o.offset + o.bytes - 1) + 1,
                   {uint32_t(w->block) + 1, o.stamp, o.pc, 0, o.thread, o.thread, o.strong, false}, o.thread, o.region,
                   across.begin[o.region], cell_shift(session.regions[o.region]));
    else if (o.other_block)
      across.write(o.region, o.offset, o.bytes, w->block, o.pc, o.thread);
    else if (memcmp(o.old, base + o.offset, o.bytes) != 0)
      tell({Wrong::Race, o.pc, o.other_pc, o.offset, o.bytes, o.thread, o.other, true, true, o.region});
    overwrites.erase(overwrites.begin() + long(i));
  }
  --w->critical;
}

// ---- accesses

void RaceWatcher::access(const Access& a) {
  settle();
  if (session.follows_flags && a.order != kWeak) flag_pc = w->offset(a.pc);
  if (session.follows_flags && is_tensor(a.target) && session.regions[a.target].given == 3) reads_far(a);
  if (a.target != kShared && !(is_tensor(a.target) && across.follows(a.target))) return;
  const bool strong = (a.order & kStrong) != 0 || ((a.order & kVolatile) != 0 && r.flags.fenced.count(me()) != 0);
  if (a.target == kShared) return check(shared(), a.offset, a.bytes, a.op, a.pc, strong);
  const Region& region = session.regions[a.target];
  const size_t begin = across.begin[a.target];
  if (session.follows_flags && !left_out) between_blocks(a, strong);
  check({element + begin, cell_shift(region), region.base, a.target, begin}, a.offset, a.bytes, a.op, a.pc, strong);
}

void RaceWatcher::check(const Memory& m, size_t offset, size_t bytes, Op op, uintptr_t pc, bool strong) {
  const bool atomic = op == Op::Atomic, in_global = m.region != kShared;
  const Touch t{op, w->offset(pc), me(), writes(op) || atomic, strong || atomic,
                in_global && !strong && !atomic && op != Op::AsyncCopy && !synchronised,
                in_global && atomic && (!synchronised || only_atomic != 0)};
  for (; bytes > 16; bytes -= 16, offset += 16) check_cells(m, offset, 16, t);
  check_cells(m, offset, bytes, t);
}

// A write of what an agent of the async proxy may still be reading.
void RaceWatcher::check_agents(size_t offset, size_t bytes, const Touch& t) {
  if (r.agents.empty()) return;
  uint32_t told = 0;
  for (size_t at = offset / 16; at <= (offset + bytes - 1) / 16; ++at)
    for (auto& read : reads[at].by) {
      if (read.stamp <= r.start) continue;
      if (told != read.pc && !ordered(r, t.me, read.agent, read.stamp)) {
        told = read.pc;
        tell({Wrong::Overwritten, t.pc, read.pc, uint32_t(offset), uint32_t(bytes), uint16_t(t.me), read.agent, true, false, kShared});
      }
    }
}

// A cell has room for the readers of two warps: one that says nothing any more gives way.
__attribute__((always_inline)) inline void RaceWatcher::add_reader(Cell& c, uint8_t mask, uint32_t now, const Touch& t) {
  const unsigned warp = t.me / kWarp, lane = t.me % kWarp;
  const auto is = [&](const Readers& reader) { return reader.warp == warp && reader.stamp == now; };
  const auto over = [&](const Readers& reader) {
    return reader.stamp <= r.start || ordered(r, t.me, reader.warp * kWarp + reader.lane, reader.stamp);
  };
  Readers* const mine = is(c.reader[0])              ? &c.reader[0]
                        : is(c.reader[1])            ? &c.reader[1]
                        : over(c.reader[0])          ? &c.reader[0]
                        : over(c.reader[1])          ? &c.reader[1]
                        : c.reader[0].warp == warp   ? &c.reader[0]
                                                     : &c.reader[1];
  const uint8_t how = t.strong ? mask | kStrongly : mask;
  if (mine->warp == warp && mine->stamp == now && mine->bytes == how)
    mine->lanes |= 1u << lane;
  else if (t.strong && is(*mine))
    return;  // what isn't strong says more
  else
    *mine = {now, 1u << lane, t.pc, uint16_t(warp), how, uint8_t(lane)};
  mine->pc = t.pc;
  mine->lane = uint8_t(lane);
}

void RaceWatcher::check_cells(const Memory& memory, size_t offset, size_t bytes, const Touch& touch) {
  const Memory m = memory;  // copies, which no store to a cell can change
  const Touch t = touch;
  const uint32_t now = r.tick[t.me];
  const unsigned warp = t.me / kWarp;
  const auto sighting = [&](Wrong wrong, uint32_t other_pc, unsigned other, bool other_writes) {
    return Sighting{wrong,        t.pc,    other_pc,     uint32_t(offset), uint32_t(bytes), uint16_t(t.me), uint16_t(other),
                    t.write,      other_writes, m.region};
  };
  uint32_t told_flight = 0, told_write = 0, told_read = 0;  // pcs that this access has already been found to clash with
  if (t.write && m.region == kShared) check_agents(offset, bytes, touch);
  for (size_t at = offset >> m.shift; at <= (offset + bytes - 1) >> m.shift; ++at) {
    Cell& c = m.cell[at];
    const size_t begin = at << m.shift, end = begin + (1u << m.shift);
    const unsigned low = offset > begin ? unsigned(offset - begin) : 0;
    const unsigned high = unsigned((offset + bytes < end ? offset + bytes : end) - begin);
    const uint8_t mask = uint8_t((1u << high) - (1u << low));
    const bool written = c.stamp > r.start && (c.bytes & mask) != 0;
    if (written && c.in_flight) {
      if (told_flight != c.pc) tell(sighting(Wrong::InFlight, told_flight = c.pc, c.thread, true));
      continue;
    }
    const bool clashes = written && !(t.strong && c.strong) && !ordered(r, t.me, c.thread, c.stamp);
    if (clashes && told_write != c.pc) {
      told_write = c.pc;
      if (t.write && !t.strong && !c.strong && t.op != Op::AsyncCopy)
        remember({uint16_t(t.me), c.thread, m.region, false, t.pc, c.pc, uint32_t(offset), uint32_t(bytes), {}}, m.base);
      else
        tell(sighting(Wrong::Race, c.pc, c.thread, true));
    }
    if (!t.write) {
      if (t.between_blocks && !written && c.reader[0].stamp <= r.start) across.all[m.element + at].reads.add(w->block, t.pc, t.me);
      add_reader(c, mask, now, t);
      continue;
    }
    for (Readers& reader : c.reader) {
      if (reader.stamp <= r.start || (reader.bytes & mask) == 0) continue;
      unsigned other = kMaxThreads;
      if (reader.warp != warp || reader.stamp > r.all[warp])
        for (unsigned rest = reader.lanes; rest != 0 && other == kMaxThreads; rest &= rest - 1) {
          const unsigned l = reader.warp * kWarp + unsigned(__builtin_ctz(rest));
          if (!ordered(r, t.me, l, reader.stamp)) other = l;
        }
      if (other != kMaxThreads && told_read != reader.pc && !(t.strong && (reader.bytes & kStrongly)))
        tell(sighting(Wrong::Race, told_read = reader.pc, other, false));
      reader.stamp = 0;
    }
    // What isn't strong says more: an atomic leaves a store that it isn't ordered with, or that its own thread has just made.
    if (!(t.strong && written && !c.strong && (clashes || (c.thread == t.me && c.stamp == now)))) {
      c.stamp = now;
      c.pc = t.pc;
      c.thread = uint16_t(t.me);
      c.strong = t.strong;
      c.in_flight = false;
    }
    c.bytes = mask;
    if (t.first_atomic) across.all[m.element + at].atomics.add(w->block, t.pc, t.me);
  }
  if (t.write && t.between_blocks) remember({uint16_t(t.me), 0, m.region, true, t.pc, 0, uint32_t(offset), uint32_t(bytes), {}}, m.base);
}

// What another GPU writes, when it likes.
void RaceWatcher::reads_far(const Access& a) {
  const bool by_TMA = a.kind == Access::BulkRow;
  if (by_TMA && a.op == Op::Load) far_region = a.target;
  const int may = flags.may_read_far(me());
  if (may == 2 || (may == 1 && !by_TMA)) return;
  note(w, may == 0 ? "race" : "proxy fence", w->offset(a.pc), 0, 3, [&] {
    const std::string does = describe(w, w->current) + " reads " + session.regions[a.target].name + " + " + std::to_string(a.offset) + " B, which another GPU writes";
    return does + (may == 0 ? ", and has read no flag with .acquire.sys before: nothing says that it is written"
                            : ": TMA reads through the async proxy, and no fence.proxy.async stands between the flag and it");
  });
}

// Where blocks are ordered by flags: what this one does to an element that others may touch.
void RaceWatcher::between_blocks(const Access& a, bool strong) {
  ++w->critical;
  const bool by_agent = a.kind == Access::BulkRow && writes(a.op), write = writes(a.op) || a.op == Op::Atomic;
  const unsigned shift = cell_shift(session.regions[a.target]);
  Trail trail{uint32_t(w->block) + 1, r.tick[me()], w->offset(a.pc), 0, uint16_t(me()), uint16_t(me()), strong || a.op == Op::Atomic, true};
  const size_t first = across.element(a.target, a.offset), end = across.element(a.target, a.offset + a.bytes - 1) + 1;
  if (by_agent && a.op != Op::Atomic) {
    const unsigned agent = r.number({ActorKind::BulkWrite, me(), me()});
    trail.actor = uint16_t(agent), trail.stamp = r.agent(agent).tick;
  }
  if (!write) {  // but for what this block has written itself: other blocks may have written the same there
    for (size_t i = first, next; i < end; i = next) {
      const bool own = element[i].stamp > r.start;
      for (next = i + 1; next < end && (element[next].stamp > r.start) == own;) ++next;
      if (!own) flags.reads(i, next, trail, me(), a.kind == Access::BulkRow, a.target, across.begin[a.target], shift);
    }
  } else if (by_agent || a.op == Op::Atomic || a.bytes > 16) {
    flags.writes(first, end, trail, me(), a.target, across.begin[a.target], shift);
  } else {  // when it has happened, its value is known
    Overwrite o{uint16_t(me()), 0, a.target, true, trail.pc, 0, uint32_t(a.offset), uint32_t(a.bytes), {}, true, trail.strong, trail.stamp};
    overwrites.push_back(o);
  }
  --w->critical;
}

void RaceWatcher::polls(const void* flag, uintptr_t atomic) {
  if (!in_global(w, flag)) return;
  if (atomic == kVolatileFlag) left_out = true, atomic = 0;
  only_atomic = !synchronised || only_atomic == atomic ? atomic : 0;
  synchronised = true;
}

void RaceWatcher::strong_access(const void* flag, unsigned order) {
  if ((order & kReleases) != 0) settle();
  ++w->critical;
  if ((order & kReleases) != 0) r.memory_fence(me());
  r.strong_access(me(), reinterpret_cast<uintptr_t>(flag), order);
  if (session.follows_flags && (order & kReleases) != 0 && (order & kOfSystem) != 0) {
    if (const BlockFlags::FarRead* read = flags.still_reads_far(me()))
      note(w, "overwritten", flag_pc, read->pc, 3, [&] {
        return describe(w, w->current) + " sets " + flag_name(reinterpret_cast<uintptr_t>(flag)) + " for another GPU while its bulk copy on {other} may still be reading " +
               session.regions[read->region].name + ": no mbarrier has been waited for that it reports to";
      });
  }
  if (session.follows_flags && (order & kWrites) != 0 && (order & kOfBlock) == 0)
    flags.sets(me(), reinterpret_cast<uintptr_t>(flag), (order & kReleases) != 0);
  --w->critical;
}

void RaceWatcher::read_flag(const void* flag, unsigned order) {
  if ((order & kOfBlock) != 0 || !in_global(w, flag)) return;
  ++w->critical;
  flags.has_read(me(), reinterpret_cast<uintptr_t>(flag), (order & kAcquires) != 0, (order & kOfSystem) != 0);
  --w->critical;
}

// ---- copies

void RaceWatcher::written(size_t offset, size_t bytes, unsigned actor, uint32_t pc, bool in_flight) {
  const uint32_t stamp = actor < kThreads ? r.tick[actor] : r.agent(actor).tick;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    Cell& c = cell[at];
    c.stamp = stamp;
    if (pc != 0) c.pc = pc;
    c.thread = uint16_t(actor);
    c.bytes = 3;
    c.strong = false;
    c.in_flight = in_flight;
  }
}

void RaceWatcher::copy_issued(const IssuedCopy& copy) {
  if (copy.actor.kind != ActorKind::Thread) agent_writes(copy);
  if (far_region != kAllocated) {
    const unsigned agent = number(copy.actor);
    ++w->critical;
    flags.far_reads.push_back({agent, r.agent(agent).tick, w->offset(copy.pc), far_region});
    --w->critical;
    far_region = kAllocated;
  }
  written(copy.offset, copy.bytes, number(copy.actor), w->offset(copy.pc), true);
}

// A bulk copy that the current thread starts: what threads have written there has to be fenced. What readers have left needs
// no fence: it is enough that they are done.
void RaceWatcher::agent_writes(const IssuedCopy& copy) {
  const uint32_t pc = w->offset(copy.pc);
  const MbarrierClocks& b = r.mbarrier[copy.actor.owner];
  if (!b.fenced)
    tell({Wrong::UnfencedInit, pc, b.init_pc, copy.actor.owner, 8, uint16_t(me()), uint16_t(b.initialised_by), false, true, kShared});
  settle();
  uint32_t told = 0;
  for (size_t at = copy.offset / 2; at <= (copy.offset + copy.bytes - 1) / 2; ++at) {
    const Cell& c = cell[at];
    if (c.stamp <= r.start || c.in_flight || c.thread >= kThreads || c.pc == told) continue;
    if (!ordered(r, me(), c.thread, c.stamp) || visible(r, me(), c.thread, c.stamp)) continue;
    told = c.pc;
    tell({Wrong::Unfenced, pc, told, uint32_t(2 * at), uint32_t(copy.bytes), uint16_t(me()), c.thread, true, true, kShared});
  }
  check(shared(), copy.offset, copy.bytes, Op::AsyncCopy, copy.pc, false);
}

// What an agent reads has to be written, in order, and fenced if by ordinary stores (of a warpgroup: for each of its warps).
void RaceWatcher::async_read(size_t offset, size_t bytes, const Actor& actor, uintptr_t pc, const Site&) {
  const unsigned who = number(actor);
  const Agent& a = r.agent(who);
  const uint32_t at_pc = w->offset(pc);
  check_agent_read(a, offset, bytes, at_pc);
  for (size_t at = offset / 16; at <= (offset + bytes - 1) / 16; ++at) {
    auto& by = reads[at].by;
    auto* slot = std::find_if(by, std::end(by), [&](const auto& read) { return read.stamp > r.start && read.agent == who; });
    if (slot == std::end(by))
      slot = std::find_if(by, std::end(by), [&](const auto& read) {
        return read.stamp <= r.start || ordered(r, a.thread, read.agent, read.stamp);
      });
    if (slot == std::end(by)) slot = by;
    *slot = {a.tick, at_pc, uint16_t(who)};
  }
}

void RaceWatcher::check_agent_read(const Agent& a, size_t offset, size_t bytes, uint32_t pc) {
  const unsigned readers = a.kind == ActorKind::Wgmma ? 4 : 1;  // the first lanes of the warps that execute it
  uint32_t told_flight = 0, told_write = 0, told_fence = 0;
  const Cell* before = nullptr;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    const Cell& c = cell[at];
    if (c.stamp <= r.start) continue;
    if (before != nullptr && before->stamp == c.stamp && before->thread == c.thread && before->pc == c.pc) continue;
    before = &c;
    for (unsigned i = 0; i < readers; ++i) {
      const unsigned reader = a.thread + i * kWarp;
      const auto tell_once = [&](Wrong wrong, uint32_t& told) {
        if (told == c.pc) return;
        told = c.pc;
        tell({wrong, pc, c.pc, uint32_t(2 * at), uint32_t(bytes), uint16_t(reader), c.thread, false, true, kShared});
      };
      if (c.in_flight) tell_once(Wrong::InFlight, told_flight);
      else if (!ordered(r, reader, c.thread, c.stamp)) tell_once(Wrong::Race, told_write);
      else if (c.thread < kThreads && !visible(r, reader, c.thread, c.stamp)) tell_once(Wrong::Unfenced, told_fence);
    }
  }
}

// ---- what orders threads

void RaceWatcher::fence(Fence kind) {
  if (kind != Fence::MbarrierInit) settle();
  ++w->critical;
  if (session.follows_flags && (kind == Fence::Proxy || kind == Fence::ProxyGlobal)) flags.proxy_fence(me());
  if (kind == Fence::Memory) {
    r.memory_fence(me());
    if (session.follows_flags) flags.memory_fence(me());
  } else if (kind != Fence::ProxyGlobal)
    for (auto& [at, b] : r.mbarrier) b.fenced = b.fenced || b.initialised_by == me();
  if (kind == Fence::Proxy) r.proxy_fence(me());
  --w->critical;
}

void RaceWatcher::arrives(const BarrierPoint& b) {
  settle();
  if (b.kind == BarrierPoint::Block) return;
  ++w->critical;
  r.release(me(), r.made(clocks_of(b).arrived));
  --w->critical;
}

void RaceWatcher::completed(const BarrierPoint& b) {
  ++w->critical;
  switch (b.kind) {
    case BarrierPoint::Block: r.order_block(); break;
    case BarrierPoint::Named: r.complete(r.named[b.place]); break;
    case BarrierPoint::Mbarrier: r.complete_mbarrier(b.place); break;
  }
  --w->critical;
}

void RaceWatcher::passes(const BarrierPoint& b, unsigned thread) {
  if (b.kind == BarrierPoint::Block) return;
  const BarrierClocks& clocks = clocks_of(b);
  if (clocks.completed != nullptr) r.acquire(thread, *clocks.completed);
}

void RaceWatcher::mbarrier_init(uint32_t at, uintptr_t pc) {
  settle();
  check(shared(), at, 8, Op::AsyncCopy, pc, false);  // a write that nothing excuses, as no two write the same
  ++w->critical;
  MbarrierClocks& b = r.mbarrier[at] = {};
  --w->critical;
  b.initialised_by = me();
  b.init_pc = w->offset(pc);
  b.init_stamp = r.tick[me()];
}

void RaceWatcher::mbarrier_used(uint32_t at, uintptr_t pc) {
  settle();
  const MbarrierClocks& b = r.mbarrier[at];
  if (!ordered(r, me(), b.initialised_by, b.init_stamp))
    tell({Wrong::Race, w->offset(pc), b.init_pc, at, 8, uint16_t(me()), uint16_t(b.initialised_by), false, true, kShared});
}

struct RaceTool final : Tool {
  AcrossBlocks across;
  FlagOrder order;
  std::unique_ptr<Watcher> watch(Worker* w) override { return std::make_unique<RaceWatcher>(w, across, order); }
  void begin_launch(const Run&) override {
    across.begin_launch();
    order.begin_launch(session.follows_flags ? across.count : 0);
  }
  void end_launch(const Run& run) override {
    across.end_launch(run, !order.used);
    if (session.follows_flags) order.end_launch(run);
  }
};

RaceTool race_tool;
const Listed race_listed(&race_tool);

}  // namespace

}  // namespace emu
