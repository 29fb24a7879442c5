// What orders two accesses is what the CUDA C++ Programming Guide says does: __syncthreads() for the threads of a block,
// __syncwarp() for the lanes it names. Shuffles, votes and other warp instructions order no memory.
//
// Blocks of a launch are ordered by nothing but atomics. Threads that write the same value to one place are left alone, as compute-sanitizer's racecheck does by default; and
// atomics don't race with atomics.
#include <sys/mman.h>

#include <cstring>
#include <new>

#include "runtime.h"

namespace emu {

namespace {

constexpr size_t kCells = kArena / 2;

bool ordered_lane(const Races& r, unsigned warp, unsigned lane, unsigned other, uint32_t stamp) {
  return lane == other || stamp <= r.all[warp] || stamp <= r.lane[warp][lane][other];
}

// Does what `other` did at `stamp` come before what `thread` does now?
bool ordered(const Races& r, unsigned thread, unsigned other, uint32_t stamp) {
  const unsigned warp = thread / kWarp, other_warp = other / kWarp;
  if (warp == other_warp) return ordered_lane(r, warp, thread % kWarp, other % kWarp, stamp);
  return stamp <= r.seen[warp][other_warp];
}

const char* const kKinds[] = {"race", "in flight", "uninitialised shared memory", "uninitialised memory"};

std::string place_in_words(const Worker* w, const Sighting& s) {
  return s.region == kShared ? shared_place(w, s.thread / kWarp, s.offset)
                             : std::string(session.regions[s.region].name) + " + " + std::to_string(s.offset) + " B";
}

std::string in_words(const Worker* w, const Sighting& s) {
  const std::string who = describe(w, &w->thread[s.thread]), other = thread_name(w, &w->thread[s.other]);
  const std::string does = who + (s.writes ? " writes " : " reads ") + place_in_words(w, s);
  switch (s.wrong) {
    case Wrong::Race:
      return does + ", which " + other + (s.other_writes ? " writes" : " reads") + " on {other}, and nothing orders the two";
    case Wrong::InFlight:
      return does + " while " + (s.other == s.thread ? "its own cp.async" : "the cp.async of " + other) +
             " on {other} may still be writing it";
    case Wrong::Unwritten: return does + ", which nobody has written";
    case Wrong::UnwrittenTensor:
      return who + " reads " + std::to_string(s.bytes) + " bytes at " + session.regions[s.region].name + " + " +
             std::to_string(s.offset) + " bytes, which no kernel has written";
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

void note_across(Worker* w, size_t element, bool write, uint32_t pc, unsigned thread) {
  Across& a = w->run->across.all[element];
  const uint64_t me = across(w->block, pc, thread);
  raise(write ? a.not_first_write : a.not_first_read, ~me);
  raise(write ? a.last_write : a.last_read, me);
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
    note_across(w, element, true, o.pc, o.thread);
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

void check_cells(Worker* w, const Memory& m, size_t offset, size_t bytes, Op op, uint32_t pc) {
  Races& r = *w->races;
  const unsigned me = w->current->number, warp = me / kWarp, lane = me % kWarp;
  const bool atomic = op == Op::Atomic, write = op == Op::Store || op == Op::StoreMatrix || op == Op::AsyncCopy || atomic;
  const bool between_blocks = m.region != kShared && !atomic && !w->synchronised;
  const uint32_t now = r.tick[warp];
  const auto sighting = [&](Wrong wrong, uint32_t other_pc, unsigned other, bool other_writes) {
    return Sighting{wrong,        pc,    other_pc,     uint32_t(offset), uint32_t(bytes), uint16_t(me), uint16_t(other),
                    write,        other_writes, m.region};
  };
  uint32_t told_flight = 0, told_write = 0, told_read = 0;  // pcs that this access has already been found to clash with
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
    if (written && !(atomic && c.atomic) && told_write != c.pc && !ordered(r, me, c.thread, c.stamp)) {
      told_write = c.pc;
      if (write && !atomic && !c.atomic && op != Op::AsyncCopy)
        remember(w, {uint16_t(me), c.thread, m.region, false, pc, c.pc, uint32_t(offset), uint32_t(bytes), {}}, m.base);
      else
        note(w, sighting(Wrong::Race, c.pc, c.thread, true));
    }
    if (!write) {
      Readers* const mine = c.reader[0].warp == warp && c.reader[0].stamp > r.start   ? &c.reader[0]
                            : c.reader[1].warp == warp && c.reader[1].stamp > r.start ? &c.reader[1]
                            : c.reader[0].stamp <= r.start || ordered(r, me, c.reader[0].warp * kWarp, c.reader[0].stamp)
                                ? &c.reader[0]
                                : &c.reader[1];
      if (between_blocks && !written && c.reader[0].stamp <= r.start) note_across(w, m.element + at, false, pc, me);
      if (mine->warp == warp && mine->stamp == now && mine->bytes == mask)
        mine->lanes |= 1u << lane;
      else
        *mine = {now, 1u << lane, pc, uint16_t(warp), mask, uint8_t(lane)};
      mine->pc = pc;
      mine->lane = uint8_t(lane);
      continue;
    }
    for (Readers& reader : c.reader) {
      if (reader.stamp <= r.start || (reader.bytes & mask) == 0) continue;
      unsigned other = kMaxThreads;
      if (reader.warp != warp) {
        if (reader.stamp > r.seen[warp][reader.warp]) other = reader.warp * kWarp + reader.lane;
      } else if (reader.stamp > r.all[warp]) {
        for (unsigned rest = reader.lanes & ~(1u << lane); rest != 0 && other == kMaxThreads; rest &= rest - 1) {
          const unsigned l = __builtin_ctz(rest);
          if (!ordered_lane(r, warp, lane, l, reader.stamp)) other = warp * kWarp + l;
        }
      }
      if (other != kMaxThreads && told_read != reader.pc)
        note(w, sighting(Wrong::Race, told_read = reader.pc, other, false));
      reader.stamp = 0;
    }
    c.stamp = now;
    c.pc = pc;
    c.thread = uint16_t(me);
    c.bytes = mask;
    c.atomic = atomic;
    c.in_flight = false;
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
  for (uint32_t& t : tick) t = 1;
}

Races::~Races() {
  munmap(cell, kCells * sizeof(Cell));
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

void races_begin(Worker* w) {
  Races& r = *w->races;
  for (uint32_t t : r.tick)
    if (t > r.start) r.start = t;
  for (unsigned i = 0; i < kMaxWarps; ++i) {
    r.tick[i] = r.start + 1;
    r.all[i] = r.start;
    for (uint32_t& s : r.seen[i]) s = r.start;
  }
  const unsigned warps = (w->threads + kWarp - 1) / kWarp;
  for (unsigned i = 0; i < warps; ++i)
    for (auto& lane : r.lane[i])
      for (uint32_t& s : lane) s = r.start;
  r.overwrites.clear();
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

void race_issued(Worker* w, size_t offset, size_t bytes, uintptr_t pc) {
  Races& r = *w->races;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    Cell& c = r.cell[at];
    c.stamp = r.tick[w->current->number / kWarp];
    c.pc = trace_pc(w, pc);
    c.thread = uint16_t(w->current->number);
    c.bytes = 3;
    c.atomic = false;
    c.in_flight = true;
  }
}

void race_landed(Worker* w, size_t offset, size_t bytes) {
  Races& r = *w->races;
  for (size_t at = offset / 2; at <= (offset + bytes - 1) / 2; ++at) {
    r.cell[at].stamp = r.tick[w->current->number / kWarp];
    r.cell[at].thread = uint16_t(w->current->number);
    r.cell[at].in_flight = false;
  }
}

void order_lanes(Worker* w, unsigned warp, unsigned lanes) {
  if (w->races == nullptr) return;
  Races& r = *w->races;
  if (lanes == w->tracer->warp[warp].lanes) {
    r.all[warp] = r.tick[warp]++;
    return;
  }
  uint32_t most[kWarp] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    for (unsigned l = 0; l < kWarp; ++l) most[l] = std::max(most[l], r.lane[warp][__builtin_ctz(rest)][l]);
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) most[__builtin_ctz(rest)] = r.tick[warp];
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) memcpy(r.lane[warp][__builtin_ctz(rest)], most, sizeof most);
  ++r.tick[warp];
}

void order_block(Worker* w) {
  if (w->races == nullptr) return;
  Races& r = *w->races;
  const unsigned warps = (w->threads + kWarp - 1) / kWarp;
  for (unsigned i = 0; i < warps; ++i) memcpy(r.seen[i], r.tick, sizeof r.tick);
  for (unsigned i = 0; i < warps; ++i) r.all[i] = r.tick[i]++;
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
      if (e.last_write == 0) continue;
      const uint64_t write = ~e.not_first_write, last = e.last_write;
      const uint64_t reads[] = {e.last_read == 0 ? write : ~e.not_first_read, e.last_read == 0 ? write : e.last_read.load()};
      const auto same = [](uint64_t x, uint64_t y) { return x >> 32 == y >> 32; };
      uint64_t one = last, other = write;
      const char* verb = "writes ";
      if (same(last, write) || !e.differ) {
        one = !same(reads[0], write) ? reads[0] : reads[1];
        verb = "reads ";
        if (same(one, write)) continue;
      }
      Found& f = found[{pc(one), pc(other)}];
      if (f.count++ > 0) continue;
      f.block = (one >> 32) - 1;
      f.text = who(one) + " " + verb + r.name + " + " + std::to_string(at << cell_shift(r)) + " B, which " + who(other) +
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
