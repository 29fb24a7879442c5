// Instructions of a warpgroup, four warps of which the first's number is a multiple of 4. PTX ISA, "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Instructions" (wgmma) and "Miscellaneous Instructions" (setmaxnreg).
//
// wgmma.mma_async only starts a product. What happens here then is the latest that the program allows: the accumulators,
// variables on the kernel's stack, hold NaNs from the instruction on; the operands in shared memory are read when the first
// warp waits for the product; the sum is written when a lane's own wait covers it. Those NaNs are the proof that a variable
// is still there and still its own: where one of them has changed, nothing is written and the wgmma is reported. Whoever
// touches an accumulator in between is reported by touch_accumulator. Not seen: an operand A in registers that changes before
// the wait (it is read when the product starts), and a missing wgmma.fence between what writes A, or accumulators that no
// product has had before, and the product, if the warp has executed an earlier wgmma.fence. A descriptor's base offset is
// taken for the number of the swizzle pattern's first 128-byte line, as the PTX ISA's formula for it says.
//
// Layouts are made from helpers/emulator/fragments.py: kC, kA16, kA8tf32, kOperandChunk, kSwizzleWidth. Sums are those of mma.sync
// here (ptx_matrix.cpp): they start with D and take the products in the order of k, each rounded to fp32.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../include/emulator/rounding.h"
#include "block.h"
#include "memory.h"
#include "ptx_families.h"
#include "ptx_matrix.h"
#include "report.h"
#include "tool.h"
#include "warpgroup.h"
#include "worker.h"

namespace emu {

constexpr unsigned kWarpsOfGroup = 4, kGroups = kMaxWarps / kWarpsOfGroup;

// The variables of a warp's 32 lanes that hold accumulators.
struct Variables {
  unsigned words = 0;                    // 32-bit registers of a lane
  uint32_t* place[kWarp][128];
  uintptr_t low[kWarp], high[kWarp];     // where a lane's lie

  bool same(const Variables& o) const {
    for (unsigned l = 0; l < kWarp; ++l)
      if (memcmp(place[l], o.place[l], words * sizeof place[l][0]) != 0) return false;
    return words == o.words;
  }
  bool apart(const Variables& o) const {
    for (unsigned l = 0; l < kWarp; ++l)
      if (low[l] < o.high[l] && o.low[l] < high[l])
        for (unsigned k = 0; k < words; ++k)
          if (std::find(o.place[l], o.place[l] + o.words, place[l][k]) != o.place[l] + o.words) return false;
    return true;
  }
};

// A warp's accumulators, 16 rows of D.
struct Accumulators : Variables {
  unsigned columns = 0;
  float sum[16 * 256];                   // by row
  uint32_t mark = 0;                     // tells the NaNs of one product from all others
  unsigned under_way = 0;                // products that this warp has not waited for
  bool touched = false;                  // by anyone but wgmma, since this warp's last wgmma.fence
  uintptr_t pc = 0;                      // of the last product
  Site site = {};
};

struct Product {                         // one wgmma.mma_async of the warpgroup
  const ptx::Instruction* instruction;
  uintptr_t pc;
  uint64_t a, b;                         // descriptors
  int sign;                              // of the product: scale-a times scale-b
  bool added, trans_a, trans_b;          // added: to D
  Accumulators* d[kWarpsOfGroup];        // null: that warp has not come yet
  uint32_t registers[kWarpsOfGroup][kWarp][4];  // A
};

// How far a warp has come in its warpgroup's sequence of products.
struct Progress {
  uint64_t issued = 0, waited = 0;
  std::vector<uint64_t> groups;          // of every committed group not waited for: the products up to here
  bool fenced = false;
  std::vector<std::unique_ptr<Accumulators>> accumulators;
  unsigned waiting = 0;                  // lanes in wait_in_group
  unsigned registers = 0, wanted = 0;    // per thread, by setmaxnreg; wanted 0: not waiting for any
  unsigned changes = 0;                  // how often setmaxnreg has been executed
};

struct Change {                          // one setmaxnreg
  unsigned registers;
  Site site;
};

struct Warpgroup {
  std::deque<Product> products;          // from number `first` on
  uint64_t first = 0, computed = 0;
  Progress warp[kWarpsOfGroup];
  std::vector<Change> changes;           // in order; of each, what the first warp to come has asked for
};

struct Warpgroups {                      // of the running block
  Warpgroup group[kGroups];
  uint32_t marks = 0;
  int64_t registers_free = 0;
};

Warpgroups* new_warpgroups() { return new Warpgroups; }
void delete_warpgroups(Warpgroups* g) { delete g; }

// A kernel that uses setmaxnreg is compiled for what __launch_bounds__(threads, 1) leaves a thread: 65536 registers shared
// out evenly, in eights, and no more than 256.
static unsigned registers_at_launch(unsigned threads) { return std::min(256u, 65536u / ((threads + kWarp - 1) / kWarp * kWarp) / 8 * 8); }

void begin_warpgroups(Worker* w) {
  Warpgroups& all = *w->warpgroups;
  const unsigned warps = (w->threads + kWarp - 1) / kWarp;
  for (unsigned i = 0; i * kWarpsOfGroup < warps; ++i) {
    Warpgroup& g = all.group[i];
    g.products.clear(), g.changes.clear();
    g.first = g.computed = 0;
    for (Progress& p : g.warp) {
      p.issued = p.waited = 0;
      p.groups.clear(), p.accumulators.clear();
      p.fenced = false;
      p.registers = registers_at_launch(w->threads);
      p.waiting = p.wanted = p.changes = 0;
    }
  }
  all.registers_free = 0;
  for (unsigned i = 0; i < w->threads; ++i) w->thread[i].watched = w->thread[i].watched_bytes = 0;
}

// While an allocation may hold a lock; fail() must not be called in it.
struct Critical {
  Critical() { ++worker->critical; }
  ~Critical() { --worker->critical; }
};

static std::string line_of(Site s, uintptr_t pc = 0) {
  if (pc != 0) s.pc = pc;
  return place_of(worker, s);
}

// "warps 1, 2" of those in the mask.
static bool one(unsigned mask) { return (mask & (mask - 1)) == 0; }

static std::string warps_in_words(unsigned group, unsigned mask) {
  std::string s;
  for (unsigned i = 0; i < kWarpsOfGroup; ++i)
    if (mask >> i & 1) s += (s.empty() ? "" : ", ") + std::to_string(group * kWarpsOfGroup + i);
  return (one(mask) ? "warp " : "warps ") + s;
}

static unsigned came(const Product& p) {
  unsigned mask = 0;
  for (unsigned i = 0; i < kWarpsOfGroup; ++i) mask |= unsigned(p.d[i] != nullptr) << i;
  return mask;
}

static Progress& progress_of(Worker* w, unsigned warp) {
  return w->warpgroups->group[warp / kWarpsOfGroup].warp[warp % kWarpsOfGroup];
}

// The current thread waits until someone wakes its warp.
static void wait_in_group(Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  progress_of(w, t->number / kWarp).waiting |= 1u << t->number % kWarp;
  t->state = State::Waiting;
  t->site = site;
  t->mask = ~0u;
  stop(w);
  wait();
}

static void wake(Worker* w, unsigned warp) {
  unsigned& waiting = progress_of(w, warp).waiting;
  for (; waiting != 0; waiting &= waiting - 1) w->ready(&w->thread[warp * kWarp + unsigned(__builtin_ctz(waiting))]);
}

// ---- what others ask: see warpgroup.h

void touch_accumulator(Worker* w, uintptr_t address, size_t bytes, bool write, uintptr_t pc) {
  const unsigned number = w->current->number, warp = number / kWarp, lane = number % kWarp;
  for (const auto& d : w->warpgroups->group[warp / kWarpsOfGroup].warp[warp % kWarpsOfGroup].accumulators) {
    if (address >= d->high[lane] || address + bytes <= d->low[lane]) continue;
    const auto meets = [&](const uint32_t* word) {
      const uintptr_t at = reinterpret_cast<uintptr_t>(word);
      return address < at + 4 && at < address + bytes;
    };
    uint32_t* const* const words = d->place[lane];
    // Most kernels keep them in an array, in order.
    const uintptr_t likely = (std::max(address, d->low[lane]) - d->low[lane]) / 4;
    if (!(likely < d->words && meets(words[likely])) && std::none_of(words, words + d->words, meets)) continue;
    if (d->under_way > 0)
      fail("in flight", 719, pc, {}, "%s an accumulator of the wgmma.mma_async on %s, which is under way: no "
           "wgmma.wait_group has covered it", write ? "writes" : "reads", line_of(d->site, d->pc).c_str());
    d->touched = true;
    return;
  }
}

void warpgroup_returns(Worker* w) {
  const unsigned warp = w->current->number / kWarp;
  const Warpgroup& g = w->warpgroups->group[warp / kWarpsOfGroup];
  const Progress& p = g.warp[warp % kWarpsOfGroup];
  if (p.waited < p.issued) {
    const Product& last = g.products[size_t(p.waited - g.first)];
    fail("in flight", 719, last.pc, last.instruction->site, "returns while the wgmma.mma_async on %s is under way: no "
         "wgmma.wait_group has covered it", line_of(last.instruction->site, last.pc).c_str());
  }
  if (p.issued < g.first + g.products.size()) {
    const Product& next = g.products[size_t(p.issued - g.first)];
    fail("warpgroup", 719, next.pc, next.instruction->site, "returns, and its warp has not executed wgmma.mma_async on %s, which %s "
         "of its warpgroup, warps %u to %u, has", line_of(next.instruction->site, next.pc).c_str(),
         warps_in_words(warp / kWarpsOfGroup, came(next)).c_str(), warp / kWarpsOfGroup * 4, warp / kWarpsOfGroup * 4 + 3);
  }
  if (p.changes < g.changes.size()) {
    const Site& next = g.changes[p.changes].site;
    fail("warpgroup", 719, 0, next, "returns, and its warp has not executed %s on %s, which another warp of its warpgroup has", next.what,
         line_of(next).c_str());
  }
}

// "warps 0-3: 24, warp 4: 240": the registers of each of their threads.
static std::string registers_in_words(Worker* w) {
  const unsigned warps = (w->threads + kWarp - 1) / kWarp;
  std::string s;
  for (unsigned i = 0, last; i < warps; i = last + 1) {
    for (last = i; last + 1 < warps && progress_of(w, last + 1).registers == progress_of(w, i).registers;) ++last;
    s += (s.empty() ? "" : ", ") + (last > i ? "warps " + std::to_string(i) + "-" + std::to_string(last) : "warp " + std::to_string(i)) +
         ": " + std::to_string(progress_of(w, i).registers);
  }
  return s;
}

// Of `group`, the first product that some warps have executed and others have not; null if there is none.
static const Product* unfinished(const Warpgroup& group) {
  for (const Product& p : group.products)
    if (came(p) != 15) return &p;
  return nullptr;
}

// A thread that waits in wait_in_group for registers, or for other warps' products; null if there is none.
static const Thread* waits_in_group(Worker* w, bool for_registers) {
  for (unsigned i = 0; i < w->threads; ++i) {
    const Progress& p = progress_of(w, i / kWarp);
    if (w->thread[i].state == State::Waiting && p.waiting >> i % kWarp & 1 && (p.wanted != 0) == for_registers) return &w->thread[i];
  }
  return nullptr;
}

bool record_warpgroup_deadlock(Worker* w) {
  // Who waits for registers comes first: a product that such a warp doesn't come to waits because of it.
  if (const Thread* t = waits_in_group(w, true)) {
    const unsigned warp = t->number / kWarp, number = warp / kWarpsOfGroup, launched = registers_at_launch(w->threads);
    const int64_t all = int64_t(launched) * w->threads, free = w->warpgroups->registers_free;
    const Progress& p = progress_of(w, warp);
    std::string text = "warp " + std::to_string(warp) + " of " + block_name(w) + " waits at " + line_of(t->site) + " in " + t->site.what +
                       " for " + std::to_string(p.wanted) + " registers per thread: " +
                       std::to_string((p.wanted - p.registers) * kWarp) + " more for its 32 threads, and of the " + std::to_string(all) +
                       " that the block was launched with (" + std::to_string(w->threads) + " threads x " + std::to_string(launched) + ") " +
                       std::to_string(all - free) + " are taken (per thread of " + registers_in_words(w) + ") and " +
                       std::to_string(free) + " are free";
    if (const Product* product = unfinished(w->warpgroups->group[number])) {
      const unsigned here = came(*product);
      text += "; " + warps_in_words(number, here) + (one(here) ? " waits" : " wait") + " for it to execute wgmma.mma_async on " +
              line_of(product->instruction->site, product->pc);
    }
    record(w, "registers", 702, 0, t->site, text);
    return true;
  }
  if (const Thread* t = waits_in_group(w, false)) {
    const unsigned number = t->number / kWarp / kWarpsOfGroup;
    const Product* p = unfinished(w->warpgroups->group[number]);
    if (p == nullptr) return false;
    const unsigned here = came(*p);
    record(w, "warpgroup", 702, p->pc, p->instruction->site,
           warps_in_words(number, here) + " of " + block_name(w) + (one(here) ? " waits at " : " wait at ") + line_of(t->site) +
               " for wgmma.mma_async on " + line_of(p->instruction->site, p->pc) + ", which " + warps_in_words(number, 15 & ~here) +
               " of the same warpgroup " + (one(15 & ~here) ? "doesn't" : "don't") + " execute");
    return true;
  }
  return false;
}

namespace ptx {

namespace {

// All four warps of the warpgroup execute this: has_come(progress) of those that have done so, and may have returned.
template <class HasCome>
void check_whole(const Frame& f, const Instruction& i, HasCome has_come) {
  const Worker* w = worker;
  const unsigned warp = w->current->number / kWarp, number = warp / kWarpsOfGroup;
  unsigned gone = 0;
  for (unsigned k = 0; k < kWarpsOfGroup; ++k)
    if ((number * 4 + k + 1) * kWarp > w->threads ||
        (w->warp[number * 4 + k].alive != ~0u && !has_come(w->warpgroups->group[number].warp[k])))
      gone |= 1u << k;
  if (gone == 0) return;
  fail("warpgroup", 719, f.pc, i.site, "executes %s in warp %u, which needs all four warps of its warpgroup, %u to %u: %s %s", i.site.what,
       warp, number * 4, number * 4 + 3, warps_in_words(number, gone).c_str(),
       number * 128 + 128 > w->threads ? "no such warps are in the block" : "has returned");
}

// ---- wgmma.mma_async. Instruction::count: N; d: the places of D's registers; s: A (a descriptor or four registers), B's
// descriptor, scale-d, scale-a, scale-b, trans-a, trans-b as far as they are there; offset:
constexpr int64_t kBrain = 1, kTf32 = 2, kHalves = 4, kRegisters = 8;  // of 16-bit factors; D in fp16; A in registers

struct Operands {
  uint64_t a, b;
  int64_t scale_d, scale_a, scale_b, trans_a, trans_b;
  bool operator==(const Operands& o) const { return memcmp(this, &o, sizeof o) == 0; }
};

Operands operands_of(const Frame& f, const Instruction& i) {
  const bool registers = i.offset & kRegisters, tf32 = i.offset & kTf32;
  const Ref* s = i.s.data() + (registers ? 4 : 1);
  const auto immediate = [&](Ref r) { return int64_t(get<int32_t>(f, r)); };
  return {registers ? 0 : get(f, i.s[0]), get(f, s[0]), get(f, s[1]) != 0, immediate(s[2]), immediate(s[3]),
          registers || tf32 ? 0 : immediate(s[4]), tf32 ? 0 : immediate(s[registers ? 4 : 5])};
}

struct Descriptor {
  uint32_t start, leading, stride, base, mode;
  explicit Descriptor(uint64_t bits)
      : start(uint32_t(bits & 0x3fff) << 4), leading(uint32_t(bits >> 16 & 0x3fff) << 4),
        stride(uint32_t(bits >> 32 & 0x3fff) << 4), base(uint32_t(bits >> 49 & 7)), mode(uint32_t(bits >> 62)) {}
  static constexpr uint64_t kReserved = uint64_t(3) << 14 | uint64_t(3) << 30 | uint64_t(7) << 46 | uint64_t(0x3ff) << 52;

  uint32_t chunk(const unsigned short (&place)[3]) const {
    const uint32_t at = start + place[0] + place[1] * leading + place[2] * stride;
    const uint32_t width = kSwizzleWidth[mode];
    return width == 0 ? at : at ^ ((((at >> 7) - base) & (width / 16 - 1)) << 4);
  }
};

// For every 16-byte chunk of an operand with `extent` rows (A) or columns (B): visit(mn, k, address), of the chunk's first
// element. per_chunk: its elements.
template <class Visit>
void each_chunk(const Descriptor& d, bool mn_major, unsigned extent, unsigned per_chunk, Visit visit) {
  if (!mn_major) {
    for (unsigned mn = 0; mn < extent; ++mn)
      for (unsigned k = 0; k < 2; ++k) visit(mn, k * per_chunk, d.chunk(kOperandChunk[0][d.mode][2 * mn + k]));
    return;
  }
  for (unsigned mn = 0; mn < extent / per_chunk; ++mn)
    for (unsigned k = 0; k < 16; ++k) visit(mn * per_chunk, k, d.chunk(kOperandChunk[1][d.mode][16 * mn + k]));
}

void check_descriptor(uint64_t bits, char name, bool mn_major, unsigned extent, unsigned per_chunk, const Frame& f,
                      const Instruction& i) {
  const Descriptor d(bits);
  if (bits & Descriptor::kReserved)
    fail("descriptor", 719, f.pc, i.site, "gives %s a descriptor of %c, 0x%016llx, in which bits are set that mean nothing", i.site.what,
         name, static_cast<unsigned long long>(bits));
  if (d.mode == 0 && d.base != 0)
    fail("descriptor", 719, f.pc, i.site, "gives %s a descriptor of %c with base offset %u and no swizzle, where it must be 0",
         i.site.what, name, d.base);
  Worker* w = worker;
  uint32_t outside = ~0u;
  StaticArray array = {};
  each_chunk(d, mn_major, extent, per_chunk, [&](unsigned, unsigned, uint32_t at) {
    if (at - array.offset < array.bytes && at - array.offset + 16 <= array.bytes) return;
    array = shared_array(w, at);
    if (at - array.offset + 16 > array.bytes && at < outside) outside = at;
  });
  if (outside != ~0u)
    fail("descriptor", 700, f.pc, i.site, "gives %s a descriptor of %c (start 0x%x, leading %u, stride %u, swizzle %u B) by which it "
         "reads 16 bytes at shared address 0x%x, where there is no array", i.site.what, name, d.start, d.leading, d.stride,
         kSwizzleWidth[d.mode], outside);
}

// From here until a wait the operand in shared memory belongs to wgmma.
void begin_reading(uint64_t descriptor, bool mn_major, unsigned extent, unsigned per_chunk, const Actor& agent, const Frame& f,
                   const Instruction& i) {
  uint32_t chunk[512], n = 0;
  each_chunk(Descriptor(descriptor), mn_major, extent, per_chunk, [&](unsigned, unsigned, uint32_t at) { chunk[n++] = at; });
  std::sort(chunk, chunk + n);
  for (uint32_t k = 0, end; k < n; k = end) {
    for (end = k + 1; end < n && chunk[end] - chunk[end - 1] <= 16;) ++end;
    begin_async_read(chunk[k], chunk[end - 1] + 16 - chunk[k], agent, f.pc, i.site);
  }
}

Variables variables_of(void* const operand[32]) {
  Variables v;
  const Instruction& i = *lane_of(operand, 0).instruction;
  v.words = unsigned(i.d.size());
  for (unsigned l = 0; l < kWarp; ++l) {
    v.low[l] = ~uintptr_t(0), v.high[l] = 0;
    for (unsigned k = 0; k < v.words; ++k) {
      const uintptr_t at = get(*lane_of(operand, l).frame, i.d[k]);
      v.place[l][k] = reinterpret_cast<uint32_t*>(at);
      v.low[l] = std::min(v.low[l], at);
      v.high[l] = std::max(v.high[l], at + 4);
    }
  }
  return v;
}

// Those that the warp has in these variables; null: none yet. Others that overlap them are no accumulators any more.
Accumulators* find_accumulators(Progress& p, const Variables& v, const Frame& f, const Instruction& i) {
  Accumulators* found = nullptr;
  for (size_t n = 0; n < p.accumulators.size();) {
    Accumulators& d = *p.accumulators[n];
    const bool same = d.columns == i.count && d.words == v.words && d.same(v);
    if (same) found = &d;
    if (same || v.apart(d)) {
      ++n;
      continue;
    }
    if (d.under_way > 0)
      fail("in flight", 719, f.pc, i.site, "starts wgmma.mma_async on registers of which some are accumulators of the one on %s, "
           "of another shape and still under way: no wgmma.wait_group has covered it", line_of(d.site, d.pc).c_str());
    Critical critical;
    p.accumulators.erase(p.accumulators.begin() + long(n));
  }
  return found;
}

Accumulators* make_accumulators(Progress& p, const Variables& v, unsigned columns) {
  Critical critical;
  p.accumulators.push_back(std::make_unique<Accumulators>());
  Accumulators* d = p.accumulators.back().get();
  static_cast<Variables&>(*d) = v;
  d->columns = columns;
  for (unsigned l = 0; l < kWarp; ++l) {
    Thread& t = worker->thread[worker->current->number / kWarp * kWarp + l];
    const uintptr_t end = t.watched_bytes == 0 ? v.high[l] : std::max(v.high[l], t.watched + t.watched_bytes);
    t.watched = t.watched_bytes == 0 ? v.low[l] : std::min(v.low[l], t.watched);
    t.watched_bytes = end - t.watched;
  }
  return d;
}

// C: what the registers hold now, which are wgmma's from here on.
void read_accumulators(Accumulators& d, bool halves) {
  for (unsigned l = 0; l < kWarp; ++l)
    for (unsigned k = 0; k < d.words; ++k) {
      uint32_t bits;
      memcpy(&bits, d.place[l][k], 4);
      const auto at = [&](unsigned e) -> float& { return d.sum[kC[l][e % 4] / 8 * d.columns + e / 4 * 8 + kC[l][e % 4] % 8]; };
      if (halves)
        at(2 * k) = half_to_float(bits & 0xffff), at(2 * k + 1) = half_to_float(bits >> 16);
      else
        at(k) = as<float>(uint64_t(bits));
    }
}

// The accumulators that these operands name, found or made; C is in them.
Accumulators& take_accumulators(Progress& p, void* const operand[32]) {
  const Frame& first = *lane_of(operand, 0).frame;
  const Instruction& i = *lane_of(operand, 0).instruction;
  const Variables variables = variables_of(operand);
  Accumulators* d = find_accumulators(p, variables, first, i);
  if (!p.fenced)
    fail("fence", 719, first.pc, i.site, "starts wgmma.mma_async before its warp has executed wgmma.fence: what was written to its "
         "registers may not have got there");
  if (d == nullptr)
    d = make_accumulators(p, variables, i.count);
  else if (d->touched)
    fail("fence", 719, first.pc, i.site, "starts wgmma.mma_async on accumulators that the kernel has used since its last wgmma.fence: "
         "without one in between, wgmma may come before that use");
  d->pc = first.pc;
  d->site = i.site;
  if (d->under_way++ > 0) return *d;  // the sum goes on
  d->mark = ++worker->warpgroups->marks;
  read_accumulators(*d, i.offset & kHalves);
  return *d;
}

// A NaN, as fp32 and as two halves, that no other register and no other product has.
uint32_t marked(uint32_t mark, unsigned lane, unsigned word) {
  uint32_t x = mark * 0x9e3779b1u ^ (lane * 128 + word) * 0x85ebca6bu;
  x ^= x >> 15;
  return 0x7fc07e00u | (x & 0x003f0000u) | (x >> 22 & 0x1ff);
}

void combine_product(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  Worker* w = worker;
  const unsigned warp = w->current->number / kWarp, number = warp / kWarpsOfGroup, mine = warp % kWarpsOfGroup;
  const MatrixLane& first = lane_of(operand, 0);
  const Frame& f = *first.frame;
  const Instruction& i = *first.instruction;
  Warpgroup& g = w->warpgroups->group[number];
  Progress& p = g.warp[mine];
  const Operands o = operands_of(f, i);
  for (unsigned l = 1; l < kWarp; ++l)
    if (lane_of(operand, l).instruction != &i || !(operands_of(*lane_of(operand, l).frame, i) == o))
      fail("warpgroup", 719, f.pc, i.site, "executes %s with other operands than lane %u of its warp: descriptors, scale-d and "
           "immediates must be the same in all lanes", i.site.what, l);
  check_whole(f, i, [&](const Progress& o) { return o.issued > p.issued; });
  if (std::abs(o.scale_a) != 1 || std::abs(o.scale_b) != 1 || (o.trans_a | o.trans_b) >> 1 != 0)
    fail("inline PTX", 801, f.pc, i.site, "executes %s with scale-a %d, scale-b %d, trans-a %d, trans-b %d: 1 or -1, and 0 or 1, are allowed",
         i.site.what, int(o.scale_a), int(o.scale_b), int(o.trans_a), int(o.trans_b));
  const size_t at = size_t(p.issued - g.first);
  const bool registers = i.offset & kRegisters;
  const unsigned per_chunk = i.offset & kTf32 ? 4 : 8;
  if (at < g.products.size()) {
    const Product& q = g.products[at];
    if (q.instruction != &i)
      fail("warpgroup", 719, f.pc, i.site, "executes wgmma.mma_async in warp %u where %s of the same warpgroup has executed another, on %s",
           warp, warps_in_words(number, came(q)).c_str(), line_of(q.instruction->site, q.pc).c_str());
    if (q.b != o.b || q.a != o.a || q.added != (o.scale_d != 0))
      fail("warpgroup", 719, f.pc, i.site, "executes %s in warp %u with other descriptors or another scale-d than %s of the same warpgroup",
           i.site.what, warp, warps_in_words(number, came(q)).c_str());
  } else {
    if (!registers) check_descriptor(o.a, 'A', o.trans_a, 64, per_chunk, f, i);
    check_descriptor(o.b, 'B', o.trans_b, i.count, per_chunk, f, i);
    Critical critical;
    g.products.push_back({&i, f.pc, o.a, o.b, int(o.scale_a * o.scale_b), o.scale_d != 0, o.trans_a != 0, o.trans_b != 0, {}, {}});
  }
  Accumulators& d = take_accumulators(p, operand);
  Product& q = g.products[at];
  q.d[mine] = &d;
  if (registers)
    for (unsigned l = 0; l < kWarp; ++l)
      for (unsigned k = 0; k < 4; ++k) q.registers[mine][l][k] = get<uint32_t>(*lane_of(operand, l).frame, i.s[k]);
  for (unsigned l = 0; l < kWarp; ++l)
    for (unsigned k = 0; k < d.words; ++k) *d.place[l][k] = marked(d.mark, l, k);
  ++p.issued;
  if (came(q) != 15) return;
  const Actor agent{ActorKind::Wgmma, number * 128, number * 128};
  if (!registers) begin_reading(o.a, o.trans_a, 64, per_chunk, agent, f, i);
  begin_reading(o.b, o.trans_b, i.count, per_chunk, agent, f, i);
  for (Watcher* t : w->on_execution) t->async_committed(agent);  // the group has the product's number
  for (unsigned k = 0; k < kWarpsOfGroup; ++k) wake(w, number * kWarpsOfGroup + k);
}

void multiply_async(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_product);
}

// ---- fence, commit, wait

Progress& progress_of(Worker* w) { return emu::progress_of(w, w->current->number / kWarp); }

void combine_fence(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  Progress& p = progress_of(worker);
  p.fenced = true;
  for (auto& d : p.accumulators) d->touched = false;
}
void fence_group(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_fence);
}

void combine_commit(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  Critical critical;
  Progress& p = progress_of(worker);
  p.groups.push_back(p.issued);
}
void commit_products(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_commit);
}

float element(const unsigned char* at, int64_t kind) {
  uint32_t bits = 0;
  memcpy(&bits, at, kind & kTf32 ? 4 : 2);
  return kind & kTf32 ? as<float>(uint64_t(bits & 0xffffe000)) : kind & kBrain ? brain_to_float(bits) : half_to_float(bits);
}

// All four warps have started the product: reads its operands and adds it up.
void compute(Worker* w, const Product& q) {
  const Instruction& i = *q.instruction;
  const bool tf32 = i.offset & kTf32;
  const unsigned k_extent = tf32 ? 8 : 16, per_chunk = tf32 ? 4 : 8, item = tf32 ? 4 : 2;
  float a[64][16], b[32][16][8];  // b: of eight columns, k by k
  if (i.offset & kRegisters) {
    for (unsigned warp = 0; warp < kWarpsOfGroup; ++warp)
      for (unsigned l = 0; l < kWarp; ++l)
        for (unsigned e = 0; e < (tf32 ? 4u : 8u); ++e) {
          const unsigned char* from = reinterpret_cast<const unsigned char*>(q.registers[warp][l]) + e * item;
          const unsigned place = tf32 ? kA8tf32[l][e] : kA16[l][e];
          a[16 * warp + place / k_extent][place % k_extent] = element(from, i.offset);
        }
  } else {
    each_chunk(Descriptor(q.a), q.trans_a, 64, per_chunk, [&](unsigned mn, unsigned k, uint32_t at) {
      const unsigned char* from = reinterpret_cast<const unsigned char*>(w->arena) + at;
      for (unsigned e = 0; e < per_chunk; ++e)
        (q.trans_a ? a[mn + e][k] : a[mn][k + e]) = element(from + e * item, i.offset);
    });
  }
  each_chunk(Descriptor(q.b), q.trans_b, i.count, per_chunk, [&](unsigned mn, unsigned k, uint32_t at) {
    const unsigned char* from = reinterpret_cast<const unsigned char*>(w->arena) + at;
    for (unsigned e = 0; e < per_chunk; ++e) {
      const unsigned n = q.trans_b ? mn + e : mn;
      b[n / 8][q.trans_b ? k : k + e][n % 8] = element(from + e * item, i.offset);
    }
  });
  for (unsigned row = 0; row < 64; ++row) {
    float* sum = q.d[row / 16]->sum + row % 16 * i.count;
    for (unsigned n = 0; n < i.count / 8; ++n) {
      float c[8] = {};
      if (q.added) memcpy(c, sum + 8 * n, sizeof c);
      for (unsigned k = 0; k < k_extent; ++k) {
        const float x = q.sign < 0 ? -a[row][k] : a[row][k];
        for (unsigned column = 0; column < 8; ++column) c[column] += x * b[n][k][column];
      }
      memcpy(sum + 8 * n, c, sizeof c);
    }
  }
}

// The wait covers all that was started on these accumulators: the sum goes where the NaNs still are.
void land(Worker* w, const Accumulators& d, void* const operand[32]) {
  const bool halves = d.words == d.columns / 4;
  const Frame& f = *lane_of(operand, 0).frame;
  const Site site = lane_of(operand, 0).instruction->site;
  const unsigned first = w->current->number / kWarp * kWarp;
  for (unsigned l = 0; l < kWarp; ++l) {
    bool there = d.low[l] > lane_of(operand, l).frame->frame && d.high[l] <= stack_top(w->thread[first + l]);
    for (unsigned k = 0; k < d.words && there; ++k) there = *d.place[l][k] == marked(d.mark, l, k);
    if (!there)
      fail("in flight", 719, f.pc, site, "waits for the wgmma.mma_async on %s, whose accumulators have been written to in between, or were "
           "variables that are no longer there (lane %u)", line_of(d.site, d.pc).c_str(), l);
  }
  for (unsigned l = 0; l < kWarp; ++l)
    for (unsigned k = 0; k < d.words; ++k) {
      const auto at = [&](unsigned e) { return d.sum[kC[l][e % 4] / 8 * d.columns + e / 4 * 8 + kC[l][e % 4] % 8]; };
      *d.place[l][k] = halves ? uint32_t(half_bits(at(2 * k)) | uint32_t(half_bits(at(2 * k + 1))) << 16) : uint32_t(to_bits(at(k)));
    }
}

// Up to which product this wait waits.
uint64_t covered(const Progress& p, uint64_t groups) {
  return p.groups.size() > groups ? p.groups[p.groups.size() - 1 - size_t(groups)] : p.waited;
}

void combine_wait(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  Worker* w = worker;
  const MatrixLane& lane = lane_of(operand, 0);
  const unsigned warp = w->current->number / kWarp, mine = warp % kWarpsOfGroup;
  Warpgroup& g = w->warpgroups->group[warp / kWarpsOfGroup];
  Progress& p = g.warp[mine];
  const uint64_t groups = get<uint32_t>(*lane.frame, lane.instruction->s[0]), until = covered(p, groups);
  for (; g.computed < until; ++g.computed) compute(w, g.products[size_t(g.computed - g.first)]);
  for (; p.waited < until; ++p.waited) {
    const Product& q = g.products[size_t(p.waited - g.first)];
    if (--q.d[mine]->under_way == 0) land(w, *q.d[mine], operand);
  }
  Critical critical;
  if (p.groups.size() > groups) p.groups.erase(p.groups.begin(), p.groups.end() - long(groups));
  while (!g.products.empty() && std::all_of(g.warp, g.warp + kWarpsOfGroup, [&](const Progress& o) { return o.waited > g.first; })) {
    g.products.pop_front();
    ++g.first;
  }
}

void wait_products(Frame& f, const Instruction& i) {
  Worker* w = worker;
  const Warpgroup& g = w->warpgroups->group[w->current->number / kWarp / kWarpsOfGroup];
  const uint64_t until = covered(progress_of(w), get<uint32_t>(f, i.s[0]));
  while (until > g.first && came(g.products[size_t(until - 1 - g.first)]) != 15) wait_in_group(here(f, i));
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_wait);
  const unsigned first = w->current->number / 128 * 128;
  if (const uint64_t waited = progress_of(w).waited; waited > 0)
    for (Watcher* t : w->on_execution) t->async_waited({ActorKind::Wgmma, first, first}, waited - 1);
}

bool decode_wgmma(Decoder& d) {
  if (d.take("fence") || d.take("commit_group")) {
    const bool fence = d.out.opcode.find("fence") != std::string::npos;
    if (!d.take("sync") || !d.take("aligned")) return false;
    d.expect(0);
    d.out.run = fence ? fence_group : commit_products;
    return true;
  }
  if (d.take("wait_group")) {
    if (!d.take("sync") || !d.take("aligned")) return false;
    d.expect(1);
    d.immediate(d.operands[0]);
    d.out.run = wait_products;
    return true;
  }
  if (!d.take("mma_async") || !d.take("sync") || !d.take("aligned") || d.qualifiers.empty()) return false;
  unsigned n = 0, k = 0;
  if (sscanf(d.qualifiers[0].c_str(), "m64n%uk%u", &n, &k) != 2 ||
      d.qualifiers[0] != "m64n" + std::to_string(n) + "k" + std::to_string(k) || n < 8 || n > 256 || n % 8 != 0)
    return false;
  d.qualifiers.erase(d.qualifiers.begin());
  const Type to = d.take_type(), a = d.take_type(), b = d.take_type();
  const bool halves = to == Type::f16, tf32 = a == Type::tf32;
  if (a != b || k != (tf32 ? 8 : 16) || (to != Type::f32 && !(halves && a == Type::f16)) ||
      (a != Type::f16 && a != Type::bf16 && !tf32))
    return false;
  const bool registers = d.operands.size() > 1 && d.operands[1].kind == Operand::Vector;
  d.expect(tf32 ? 6 : registers ? 7 : 8);
  const auto count = [&](size_t i, size_t registers) {
    if (d.operands[i].kind != Operand::Vector || d.operands[i].elements.size() != registers)
      d.refuse(d.out.opcode + " takes a vector of " + std::to_string(registers) + " registers as operand " + std::to_string(i + 1));
  };
  count(0, halves ? n / 4 : n / 2);
  for (const Operand& o : d.operands[0].elements) d.place(o);
  if (registers) {
    count(1, 4);
    d.elements(1, Type::b32, false);
  } else {
    d.source(1, Type::b64);
  }
  d.source(2, Type::b64);
  d.source(3, Type::pred);
  for (size_t i = 4; i < d.operands.size(); ++i) d.immediate(d.operands[i]);
  d.out.count = n;
  d.out.offset = (a == Type::bf16 ? kBrain : tf32 ? kTf32 : 0) | (halves ? kHalves : 0) | (registers ? kRegisters : 0);
  d.out.run = multiply_async;
  return true;
}

// ---- setmaxnreg. Instruction::offset: 1 for .inc

// Warps that wait for registers get them, if there are enough.
void share_registers(Worker* w) {
  int64_t& free = w->warpgroups->registers_free;
  for (unsigned warp = 0; warp * kWarp < w->threads; ++warp) {
    Progress& p = emu::progress_of(w, warp);
    const int64_t more = (int64_t(p.wanted) - p.registers) * kWarp;
    if (p.wanted == 0 || more > free) continue;
    free -= more;
    p.registers = p.wanted;
    p.wanted = 0;
    wake(w, warp);
  }
}

void combine_registers(void* const operand[32]) {
  if (!complete_warp(operand)) return;
  Worker* w = worker;
  const Frame& f = *lane_of(operand, 0).frame;
  const Instruction& i = *lane_of(operand, 0).instruction;
  const unsigned warp = w->current->number / kWarp, wanted = get<uint32_t>(f, i.s[0]);
  Warpgroup& g = w->warpgroups->group[warp / kWarpsOfGroup];
  Progress& p = progress_of(w);
  if (wanted < 24 || wanted > 256 || wanted % 8 != 0)
    fail("registers", 801, f.pc, i.site, "executes %s with %u registers: a multiple of 8 from 24 to 256 is allowed", i.site.what, wanted);
  check_whole(f, i, [&](const Progress& o) { return o.changes > p.changes; });
  if (p.changes > 0 && (i.offset ? wanted < p.registers : wanted > p.registers))
    fail("registers", 801, f.pc, i.site, "executes %s with %u registers per thread and has %u", i.site.what, wanted, p.registers);
  if (p.changes == g.changes.size()) {
    Critical critical;
    g.changes.push_back({wanted, here(f, i)});
  }
  const Change& first = g.changes[p.changes++];
  if (first.registers != wanted || strcmp(first.site.what, i.site.what) != 0)
    fail("warpgroup", 719, f.pc, i.site, "executes %s with %u registers where another warp of its warpgroup has executed %s with %u, on %s",
         i.site.what, wanted, first.site.what, first.registers, line_of(first.site).c_str());
  if (wanted <= p.registers) {
    w->warpgroups->registers_free += (p.registers - wanted) * kWarp;
    p.registers = wanted;
  } else {
    p.wanted = wanted;
  }
  share_registers(w);
}

void change_registers(Frame& f, const Instruction& i) {
  MatrixLane me{&f, &i, nullptr};
  meet(me, combine_registers);
  while (progress_of(worker).wanted != 0) wait_in_group(here(f, i));
}

bool decode_setmaxnreg(Decoder& d) {
  const bool more = d.take("inc");
  if ((!more && !d.take("dec")) || !d.take("sync") || !d.take("aligned") || !d.take("u32")) return false;
  d.expect(1);
  d.immediate(d.operands[0]);
  d.out.offset = more;
  d.out.run = change_registers;
  return true;
}

}  // namespace

bool decode_warpgroup(Decoder& d) {
  if (d.base == "wgmma") return decode_wgmma(d);
  if (d.base == "setmaxnreg") return decode_setmaxnreg(d);
  return false;
}

}  // namespace ptx

}  // namespace emu
