// Merges the streams of a warp's lanes into warp requests, and adds these up while the kernel runs.
//
// Lanes run one after the other here and in lock step on a GPU, so which of their accesses would have been one request
// is found out afterwards: of the blocks that the lanes come to next, the one in the deepest call and with the lowest
// program counter goes first, for all lanes that come to it; a rendezvous waits for its members. That is a function of
// the streams alone, so neither the order in which fibers run nor the moment of the merge can change the result.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "block.h"
#include "memory.h"
#include "tensor_map.h"
#include "tool.h"
#include "trace_cost.h"
#include "trace_rows.h"
#include "worker.h"

namespace emu {

namespace {

// ---- a lane's stream: basic blocks with their accesses, and the meetings that lanes wait for each other at
enum class EventKind : uint8_t {
  Block,    // a basic block begins; `address` is its key, `bytes` how many accesses follow
  Sync,     // a rendezvous; `address` is its number
  Access,   // see Access::Kind
  Loose,
  Range,
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

struct WarpTrace {
  unsigned lanes = 0;         // that exist
  unsigned at_barrier = 0;    // lanes at the block's barrier
  uint64_t meetings = 0;
  std::vector<NamedPlace> named;  // the latest name of each place, as far as the merge has come
  std::vector<Meeting> met;   // complete, and not yet passed by the merge
};

constexpr uint32_t kStreamLimit = 512;  // events, after which a lane waits until the merge has caught up

// Deepest first, then lowest pc, then fewest rendezvous passed in this block: the smallest key goes first.
uint64_t block_key(const Stream& s, uintptr_t frame, uint32_t pc) {
  const uint64_t depth = s.top - frame;  // at most the stack's 2^18 bytes
  return ((uint64_t(1) << 18) - 1 - (depth & ((1 << 18) - 1))) << 46 | uint64_t(pc) << 14;
}
uintptr_t frame_of(const Stream& s, uint64_t key) { return s.top - ((uint64_t(1) << 18) - 1 - (key >> 46)); }

struct Tracer final : Watcher {
  std::unique_ptr<Stream[]> stream{new Stream[kMaxThreads]};
  std::unique_ptr<WarpTrace[]> warp{new WarpTrace[kMaxWarps]};
  Rows rows;
  std::map<const char*, uint64_t> instructions; // by Site::what: warps that have executed it
  std::map<uint32_t, Site> sites;               // of the pcs that came with one
  std::set<uint32_t> past_L1;                   // pcs of cp.async.cg

  explicit Tracer(Worker* worker) : Watcher(worker, kMemory | kExecution | kBasicBlocks) {}
  ~Tracer() override {
    for (unsigned i = 0; i < kMaxThreads; ++i) delete[] stream[i].event;
  }

  // ---- events
  void begin_block() override;
  void end_launch() override;
  void basic_block(uintptr_t pc, uintptr_t frame) override;
  void access(const Access&) override;
  void instruction(uintptr_t pc, const Site& site) override {
    push_access(reinterpret_cast<uintptr_t>(site.what), 0, Op::Instruction, EventKind::Access, pc, 0, site);
  }
  void no_address(uintptr_t pc, const Site& site) override {
    push_access(uint64_t(kShared) << 48, 16, Op::NoAddress, EventKind::Access, pc, 0, site);
  }
  void bulk_copy(Op, const Box&, uintptr_t pc, const Site&) override;
  void copy_issued(const IssuedCopy&) override;
  void named(const char* name, uint32_t offset) override;
  void comes(uint64_t rendezvous) override;
  void met(unsigned warp, uint64_t rendezvous, unsigned lanes, const char* what) override;
  void arrives(const BarrierPoint&) override;
  void completed(const BarrierPoint&) override;
  void stopped(unsigned number) override {
    if (w->warp[number].running == 0) merge(number);
  }
  void returned() override { mine().done = true; }

  // ---- streams
  Stream& mine() { return stream[w->current->number]; }
  void grow(Stream&);
  void push(Stream&, uint64_t address, uint32_t pc, uint16_t bytes, uint8_t op, EventKind);
  void push_block(Stream&, uint64_t key, uint32_t pc);
  void push_access(uint64_t address, size_t bytes, Op, EventKind, uintptr_t pc, uintptr_t frame, const Site&);
  void push_sync(uint64_t number);
  void add_site(uint32_t pc, const Site&);
  void all_at(unsigned number, uint64_t rendezvous, unsigned lanes);

  // ---- the merge
  void merge(unsigned number);
  bool pass_meeting(WarpTrace&, Stream* lanes, unsigned lane);
  void drop_merged(unsigned number);
  void take_blocks(unsigned number, unsigned lanes);
  void add_accesses(unsigned number, const Event* const* event, unsigned lanes);
  void add_name(unsigned number, const Event* const* event, unsigned lanes);
  void add_request(unsigned number, uint32_t pc, Op, unsigned width, uint16_t target, unsigned lanes, const uint64_t* address,
                   const uint64_t* source);
  void add_copied(const RowKey&, unsigned lane, uint64_t bytes, uint64_t cost, uint64_t ideal, uint64_t address);
  void count(const char* what, uint64_t warps) {
    ++w->critical;
    instructions[what] += warps;
    --w->critical;
  }
};

__attribute__((noinline)) void Tracer::grow(Stream& s) {
  ++w->critical;  // a stop must not throw us out of the allocator
  const uint32_t capacity = s.capacity == 0 ? kStreamLimit + 64 : 2 * s.capacity;
  Event* grown = new Event[capacity];
  if (s.size > 0) memcpy(grown, s.event, s.size * sizeof(Event));
  delete[] s.event;
  s.event = grown;
  s.capacity = capacity;
  --w->critical;
}

// Field by field, in its place: read as a whole right after it was written in parts, an event would keep the CPU waiting.
inline void Tracer::push(Stream& s, uint64_t address, uint32_t pc, uint16_t bytes, uint8_t op, EventKind kind) {
  if (s.size == s.capacity) grow(s);
  Event& e = s.event[s.size++];
  e.address = address;
  e.pc = pc;
  e.bytes = bytes;
  e.op = op;
  e.kind = kind;
}

inline void Tracer::push_block(Stream& s, uint64_t key, uint32_t pc) {
  push(s, key, pc, 0, 0, EventKind::Block);
  s.open = s.size - 1;
}

// ---- requests

// One request of lanes that all touch the same target.
void Tracer::add_request(unsigned number, uint32_t pc, Op op, unsigned width, uint16_t target, unsigned lanes,
                         const uint64_t* address, const uint64_t* source) {
  const uint64_t arena = reinterpret_cast<uintptr_t>(w->arena);
  uint32_t offset[kWarp];
  Cost cost;
  const char* array = nullptr;
  uint64_t base = 0;
  if (target == kShared) {
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      offset[l] = uint32_t(address[l] - arena);
    }
    const uint32_t first = offset[__builtin_ctz(lanes)];
    size_t begin;
    array = shared_name(w, warp[number].named, first, &begin);
    base = arena + (first >= w->dynamic_base ? w->dynamic_base : 0);
    cost = shared_cost(op, offset, lanes, width, source, op == Op::AsyncCopy && past_L1.count(pc) != 0);
  } else {
    uint64_t first = UINT64_MAX;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) first = std::min(first, address[__builtin_ctz(rest)]);
    if (target == kVariable) array = variable_at(w, first).name;
    base = begin_of(w, target, first);
    cost = global_cost(address, lanes, width);
  }
  Row& row = rows.of({pc, target, uint8_t(op), uint8_t(width), array});
  ++row.requests;
  row.bytes += uint64_t(width) * unsigned(__builtin_popcount(lanes));
  row.cost += cost.cost;
  row.ideal += cost.ideal;
  const bool worse = row.requests == 1 || cost.cost > row.worst ||
                     (cost.cost == row.worst && (cost.ideal < row.worst_ideal ||
                      (cost.ideal == row.worst_ideal && (w->block < row.block || (w->block == row.block && number < row.warp)))));
  if (!worse) return;
  row.worst = cost.cost;
  row.worst_ideal = cost.ideal;
  row.warp = number;
  row.block = w->block;
  for (unsigned l = 0; l < kWarp; ++l) row.address[l] = lanes >> l & 1 ? int64_t(address[l] - base) : -1;
}

// What lanes call by one name in different places is no array.
void Tracer::add_name(unsigned number, const Event* const* event, unsigned lanes) {
  const Event& lead = *event[__builtin_ctz(lanes)];
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    if (event[__builtin_ctz(rest)]->pc != lead.pc) return;
  add_named_place(warp[number].named, reinterpret_cast<const char*>(lead.address), lead.pc);
}

// Accesses of several lanes that are one instruction. Those to different targets are counted apart.
void Tracer::add_accesses(unsigned number, const Event* const* event, unsigned lanes) {
  const Event* lead = event[__builtin_ctz(lanes)];
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    if (event[__builtin_ctz(rest)]->op != uint8_t(Op::NoAddress)) {
      lead = event[__builtin_ctz(rest)];
      break;
    }
  const Op op = Op(lead->op);
  if (op == Op::NoAddress) return;
  if (op == Op::Instruction) return count(reinterpret_cast<const char*>(lead->address), 1);
  uint64_t address[kWarp], source[kWarp] = {};
  if (op == Op::AsyncCopy)
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {  // it has been read just before, if it isn't zeros
      const unsigned l = __builtin_ctz(rest);
      const Event& read = event[l][-1];  // or the block's beginning
      if (read.kind == EventKind::Access && read.op == uint8_t(Op::Load) && read.pc == event[l]->pc)
        source[l] = read.address & ((uint64_t(1) << 48) - 1);
    }
  while (lanes != 0) {
    unsigned here = 0, target = 0, alignment = 16;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      const Event& e = *event[l];
      if (e.op == uint8_t(Op::NoAddress)) {
        lanes &= ~(1u << l);
        continue;
      }
      if (here != 0 && e.address >> 48 != target) continue;
      target = unsigned(e.address >> 48);
      here |= 1u << l;
      address[l] = e.address & ((uint64_t(1) << 48) - 1);
      while (address[l] % alignment != 0) alignment /= 2;
    }
    if (here == 0) break;
    lanes &= ~here;
    unsigned width = lead->bytes;
    if (lead->kind != EventKind::Access) {  // in the largest pieces that are aligned for every lane
      width = lead->kind == EventKind::Loose ? lead->bytes / 2u : 16;
      while (width > alignment || lead->bytes % width != 0) width /= 2;
    }
    for (unsigned done = 0; done < lead->bytes; done += width) {
      add_request(number, lead->pc, op, width, uint16_t(target), here, address, source);
      for (unsigned rest = here; rest != 0; rest &= rest - 1) address[__builtin_ctz(rest)] += width;
    }
  }
}

bool one_instruction(const Event& a, const Event& b) {
  if (a.kind == EventKind::Name || b.kind == EventKind::Name) return a.kind == b.kind && a.address == b.address;
  if (a.pc != b.pc) return false;
  if (a.op == uint8_t(Op::NoAddress) || b.op == uint8_t(Op::NoAddress)) return true;
  if (a.op == uint8_t(Op::Instruction) && a.address != b.address) return false;
  return a.op == b.op && a.bytes == b.bytes && a.kind == b.kind;
}

// The accesses of one basic block by the lanes that execute it together. They all have the same ones, except where an
// instruction or a callee leaves some out: the lowest pc goes first.
void Tracer::take_blocks(unsigned number, unsigned lanes) {
  Stream* const of_lane = &stream[number * kWarp];
  const Event *next[kWarp], *end[kWarp];
  unsigned left = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned l = __builtin_ctz(rest);
    Stream& s = of_lane[l];
    next[l] = s.event + s.at + 1;
    end[l] = next[l] + s.event[s.at].bytes;
    s.at += 1u + s.event[s.at].bytes;
    if (next[l] != end[l]) left |= 1u << l;
  }
  while (left != 0) {
    const Event* lead = next[__builtin_ctz(left)];
    unsigned together = 0;
    for (unsigned rest = left; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      if (one_instruction(*lead, *next[l])) together |= 1u << l;
    }
    if (together != left) {
      for (unsigned rest = left; rest != 0; rest &= rest - 1) {
        const Event* e = next[__builtin_ctz(rest)];
        if (e->kind == EventKind::Name) {  // has no pc, and goes before what follows it
          lead = e;
          break;
        }
        if (e->pc < lead->pc || (e->pc == lead->pc && e->op < lead->op)) lead = e;
      }
      together = 0;
      for (unsigned rest = left; rest != 0; rest &= rest - 1) {
        const unsigned l = __builtin_ctz(rest);
        if (one_instruction(*lead, *next[l])) together |= 1u << l;
      }
    }
    if (lead->kind == EventKind::Name)
      add_name(number, next, together);
    else
      add_accesses(number, next, together);
    for (unsigned rest = together; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      if (++next[l] == end[l]) left &= ~(1u << l);
    }
  }
}

// Takes from the streams all that can be taken: until a lane has come to a block whose accesses aren't all known.
void Tracer::merge(unsigned number) {
  WarpTrace& wt = warp[number];
  Stream* const of_lane = &stream[number * kWarp];
  ++w->critical;
  for (bool going = true; going;) {
    unsigned group = 0;
    uint64_t best = ~uint64_t(0);
    bool passed = false;
    for (unsigned rest = wt.lanes; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      Stream& s = of_lane[l];
      if (s.at == s.size) {
        if (s.done) continue;
        going = false;
        break;
      }
      const Event& e = s.event[s.at];
      if (e.kind == EventKind::Sync) {
        passed = pass_meeting(wt, of_lane, l);
        if (passed) break;
        continue;
      }
      if (s.open == s.at && !s.done) {
        going = false;
        break;
      }
      if (e.address < best) best = e.address, group = 0;
      if (e.address == best) group |= 1u << l;
    }
    if (passed || !going) continue;
    if (group == 0) break;
    take_blocks(number, group);
  }
  drop_merged(number);
  --w->critical;
}

// The lane's stream has come to a rendezvous. True: so have those of all its members, and all go on.
bool Tracer::pass_meeting(WarpTrace& wt, Stream* of_lane, unsigned l) {
  const uint64_t number = of_lane[l].event[of_lane[l].at].address;
  const auto m = std::find_if(wt.met.begin(), wt.met.end(), [&](const Meeting& meeting) { return meeting.number == number; });
  if (m == wt.met.end()) return false;
  m->reached |= 1u << l;
  if (m->reached != m->members) return false;
  for (unsigned all = m->members; all != 0; all &= all - 1) ++of_lane[__builtin_ctz(all)].at;
  wt.met.erase(m);
  return true;
}

// Makes room for what comes, and lets the lanes go on that were held for want of it.
void Tracer::drop_merged(unsigned number) {
  for (unsigned rest = warp[number].lanes; rest != 0; rest &= rest - 1) {
    const unsigned thread = number * kWarp + unsigned(__builtin_ctz(rest));
    Stream& s = stream[thread];
    if (s.at > 0) {
      memmove(s.event, s.event + s.at, (s.size - s.at) * sizeof(Event));
      s.open = s.open >= s.at ? s.open - s.at : 0;
      s.size -= s.at;
      s.at = 0;
    }
    Thread& t = w->thread[thread];
    if (t.state == State::Held && s.size < kStreamLimit) w->ready(&t);
  }
}

// ---- events

void Tracer::begin_block() {
  for (unsigned i = 0; i < w->threads; ++i) {
    Stream& s = stream[i];
    s.size = s.at = s.open = 0;
    s.done = false;
    s.top = stack_top(w->thread[i]);
    push_block(s, block_key(s, s.top, 0), 0);
  }
  for (unsigned i = 0; i * kWarp < w->threads; ++i) {
    WarpTrace& wt = warp[i];
    wt.lanes = w->lanes(i);
    wt.at_barrier = 0;
    wt.meetings = 0;
    wt.named.clear();
    wt.met.clear();
  }
}

void Tracer::basic_block(uintptr_t pc, uintptr_t frame) {
  Stream& s = mine();
  const uint32_t at = w->offset(pc);
  push_block(s, block_key(s, frame, at), at);
  if (s.size >= kStreamLimit) w->hold = true;
}

void Tracer::add_site(uint32_t pc, const Site& site) {
  if (site.line == 0 || sites.count(pc) != 0) return;
  ++w->critical;
  sites.emplace(pc, site);
  --w->critical;
}

void Tracer::access(const Access& a) {
  if (a.kind == Access::BulkRow) return;
  const EventKind kind = a.kind == Access::Element ? EventKind::Access : a.kind == Access::Loose ? EventKind::Loose : EventKind::Range;
  push_access(a.address | uint64_t(a.target) << 48, a.bytes, a.op, kind, a.pc, a.frame, a.site);
}

inline void Tracer::push_access(uint64_t address, size_t bytes, Op op, EventKind kind, uintptr_t pc, uintptr_t frame, const Site& site) {
  Stream& s = mine();
  const uint32_t at = w->offset(pc);
  if (frame != 0 && frame > frame_of(s, s.event[s.open].address))  // back from a call
    push_block(s, block_key(s, frame, at), at);
  if (site.line > 0) add_site(at, site);
  do {
    const uint16_t piece = uint16_t(bytes < 0xfff0 ? bytes : 0xfff0);
    push(s, address, at, piece, uint8_t(op), kind);
    if (++s.event[s.open].bytes == 0xffff) push_block(s, s.event[s.open].address, s.event[s.open].pc);
    address += piece;
    bytes -= piece;
  } while (bytes > 0);
}

// Both ends of a bulk copy: the sectors of its tensor that it touches, and the bytes in shared memory, whose wavefronts are
// not known: no counter has shown yet in what portions TMA goes there.
void Tracer::bulk_copy(Op op, const Box& b, uintptr_t pc, const Site& site) {
  const unsigned number = w->current->number / kWarp, lane = w->current->number % kWarp;
  const uint32_t at = w->offset(pc);
  add_site(at, site);
  uint64_t bytes = 0, sectors = 0, first_byte = 0, last_sector = UINT64_MAX;
  each_row(b, [&](uint32_t, const char* row, unsigned first, unsigned end) {
    if (end == first) return;
    const uint64_t begin = reinterpret_cast<uintptr_t>(row) + first * b.map.item, stop = begin + (end - first) * b.map.item;
    if (bytes == 0) first_byte = begin;
    bytes += stop - begin;
    sectors += (stop - 1) / 32 - begin / 32 + (begin / 32 != last_sector);
    last_sector = (stop - 1) / 32;
  });
  const int region = bytes > 0 ? region_at(first_byte, 1) : -1;
  if (bytes > 0) {
    const uint16_t target = region < 0 ? kAllocated : uint16_t(region);
    add_copied({at, target, uint8_t(op), uint8_t(b.map.item), nullptr}, lane, bytes, sectors, (bytes + 31) / 32,
               first_byte - begin_of(w, target, first_byte));
  }
  size_t begin;
  const char* array = shared_name(w, w->named[number], b.shared, &begin);
  add_copied({at, kShared, uint8_t(op), uint8_t(b.map.item), array}, lane, b.bytes, 0, 0,
             b.shared - (b.shared >= w->dynamic_base ? w->dynamic_base : 0));
}

void Tracer::add_copied(const RowKey& key, unsigned lane, uint64_t bytes, uint64_t cost, uint64_t ideal, uint64_t address) {
  const unsigned number = w->current->number / kWarp;
  ++w->critical;
  Row& row = rows.of(key);
  const bool worse = row.requests++ == 0 || cost > row.worst ||
                     (cost == row.worst && (w->block < row.block || (w->block == row.block && number < row.warp)));
  row.bytes += bytes;
  row.cost += cost;
  row.ideal += ideal;
  if (worse) {
    row.worst = unsigned(cost);
    row.worst_ideal = unsigned(ideal);
    row.warp = number;
    row.block = w->block;
    for (unsigned l = 0; l < kWarp; ++l) row.address[l] = l == lane ? int64_t(address) : -1;
  }
  --w->critical;
}

void Tracer::copy_issued(const IssuedCopy& copy) {
  if (!copy.past_L1) return;
  ++w->critical;
  past_L1.insert(w->offset(copy.pc));
  --w->critical;
}

void Tracer::named(const char* name, uint32_t offset) {
  Stream& s = mine();
  push(s, reinterpret_cast<uintptr_t>(name), offset, 0, 0, EventKind::Name);
  if (++s.event[s.open].bytes == 0xffff) push_block(s, s.event[s.open].address, s.event[s.open].pc);
}

void Tracer::comes(uint64_t rendezvous) { push_sync(2 * rendezvous + 1); }

void Tracer::push_sync(uint64_t number) {
  Stream& s = mine();
  const Event open = s.event[s.open];
  push(s, number, open.pc, 0, 0, EventKind::Sync);
  push_block(s, open.address + ((open.address & 0x3fff) < 0x3fff), open.pc);
}

void Tracer::met(unsigned number, uint64_t rendezvous, unsigned lanes, const char* what) {
  count(what, 1);
  all_at(number, 2 * rendezvous + 1, lanes);
}

void Tracer::all_at(unsigned number, uint64_t rendezvous, unsigned lanes) {
  ++w->critical;
  warp[number].met.push_back({rendezvous, lanes, 0});
  --w->critical;
  if (lanes == w->warp[number].alive) merge(number);
}

void Tracer::arrives(const BarrierPoint& b) {
  if (b.kind == BarrierPoint::Mbarrier || !b.aligned) return;
  const unsigned number = w->current->number / kWarp;
  WarpTrace& wt = warp[number];
  if (wt.at_barrier == 0) wt.meetings += 2;
  push_sync(wt.meetings);  // even numbers are barriers, odd ones rendezvous of lanes
  wt.at_barrier |= 1u << w->current->number % kWarp;
  if (wt.at_barrier != wt.lanes) return;
  wt.at_barrier = 0;
  all_at(number, wt.meetings, wt.lanes);
}

void Tracer::completed(const BarrierPoint& b) {
  if (b.kind == BarrierPoint::Block) count(b.what, (w->threads + kWarp - 1) / kWarp);
}

void Tracer::end_launch() {
  add_rows(rows, sites, *w->run);
  add_instructions(instructions);
  rows.clear();
  instructions.clear();
  sites.clear();
  past_L1.clear();
}

// The tool: see tool.h.
struct TraceTool final : Tool {
  std::unique_ptr<Watcher> watch(Worker* w) override { return std::make_unique<Tracer>(w); }
  void begin_session() override { clear_rows(); }
};

TraceTool trace_tool;
const Listed trace_listed(&trace_tool);

}  // namespace

}  // namespace emu
