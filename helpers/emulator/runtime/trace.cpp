// Merges the streams of a warp's lanes into warp requests, and adds these up while the kernel runs.
//
// Lanes run one after the other here and in lock step on a GPU, so which of their accesses would have been one request
// is found out afterwards: of the blocks that the lanes come to next, the one in the deepest call and with the lowest
// program counter goes first, for all lanes that come to it; a rendezvous waits for its members. That is a function of
// the streams alone, so neither the order in which fibers run nor the moment of the merge can change the result.
#include <cstring>
#include <new>

#include "async.h"

namespace emu {

namespace {

constexpr uint32_t kStreamLimit = 512;  // events, after which a lane waits until the merge has caught up

// Deepest first, then lowest pc, then fewest rendezvous passed in this block: the smallest key goes first.
uint64_t block_key(const Stream& s, uintptr_t frame, uint32_t pc) {
  const uint64_t depth = s.top - frame;  // at most the stack's 2^18 bytes
  return ((uint64_t(1) << 18) - 1 - (depth & ((1 << 18) - 1))) << 46 | uint64_t(pc) << 14;
}
uintptr_t frame_of(const Stream& s, uint64_t key) { return s.top - ((uint64_t(1) << 18) - 1 - (key >> 46)); }

__attribute__((noinline)) void grow(Worker* w, Stream& s) {
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
void push(Worker* w, Stream& s, uint64_t address, uint32_t pc, uint16_t bytes, uint8_t op, EventKind kind) {
  if (s.size == s.capacity) grow(w, s);
  Event& e = s.event[s.size++];
  e.address = address;
  e.pc = pc;
  e.bytes = bytes;
  e.op = op;
  e.kind = kind;
}

void push_block(Worker* w, Stream& s, uint64_t key, uint32_t pc) {
  push(w, s, key, pc, 0, 0, EventKind::Block);
  s.open = s.size - 1;
}

// ---- requests

Row& row_of(Tracer& t, const RowKey& key) {
  uint64_t h = key.pc * 0x9e3779b97f4a7c15u ^ uint64_t(key.target) << 32 ^ uint64_t(key.op) << 8 ^ key.width ^
               reinterpret_cast<uintptr_t>(key.array);
  h *= 0x9e3779b97f4a7c15u;
  if (2 * (t.rows.size() + 1) > t.slots.size()) {
    t.slots.assign(t.slots.empty() ? 256 : 2 * t.slots.size(), 0);
    std::vector<Row> rows = std::move(t.rows);
    t.rows.clear();
    for (const Row& r : rows) row_of(t, r.key) = r;
  }
  for (size_t i = h >> 32;; ++i) {
    uint32_t& slot = t.slots[i % t.slots.size()];
    if (slot == 0) {
      t.rows.push_back({key, 0, 0, 0, 0, 0, 0, 0, 0, {}});
      slot = uint32_t(t.rows.size());
    }
    if (t.rows[slot - 1].key == key) return t.rows[slot - 1];
  }
}

// One request of lanes that all touch the same target.
void add_request(Worker* w, unsigned warp, uint32_t pc, Op op, unsigned width, uint16_t target, unsigned lanes,
                 const uint64_t* address, const uint64_t* source) {
  Tracer& t = *w->tracer;
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
    array = shared_name(w, w->tracer->warp[warp].named, first, &begin);
    base = arena + (first >= w->dynamic_base ? w->dynamic_base : 0);
    cost = shared_cost(op, offset, lanes, width, source, op == Op::AsyncCopy && t.past_L1.count(pc) != 0);
  } else {
    base = target == kAllocated ? 0 : reinterpret_cast<uintptr_t>(session.regions[target].base);
    cost = global_cost(address, lanes, width);
  }
  Row& row = row_of(t, {pc, target, uint8_t(op), uint8_t(width), array});
  ++row.requests;
  row.bytes += uint64_t(width) * unsigned(__builtin_popcount(lanes));
  row.cost += cost.cost;
  row.ideal += cost.ideal;
  const bool worse = row.requests == 1 || cost.cost > row.worst ||
                     (cost.cost == row.worst && (cost.ideal < row.worst_ideal ||
                      (cost.ideal == row.worst_ideal && (w->block < row.block || (w->block == row.block && warp < row.warp)))));
  if (!worse) return;
  row.worst = cost.cost;
  row.worst_ideal = cost.ideal;
  row.warp = warp;
  row.block = w->block;
  for (unsigned l = 0; l < kWarp; ++l) row.address[l] = lanes >> l & 1 ? int64_t(address[l] - base) : -1;
}

void set_name(std::vector<NamedPlace>& named, const char* name, uint32_t offset) {
  for (NamedPlace& n : named) {
    if (n.offset != offset) continue;
    n.name = name;
    return;
  }
  if (named.size() < 64) named.push_back({name, offset});
}

// What lanes call by one name in different places is no array.
void add_name(Worker* w, unsigned warp, const Event* const* event, unsigned lanes) {
  const Event& lead = *event[__builtin_ctz(lanes)];
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    if (event[__builtin_ctz(rest)]->pc != lead.pc) return;
  set_name(w->tracer->warp[warp].named, reinterpret_cast<const char*>(lead.address), lead.pc);
}

// Accesses of several lanes that are one instruction. Those to different targets are counted apart.
void add_accesses(Worker* w, unsigned warp, const Event* const* event, unsigned lanes) {
  const Event* lead = event[__builtin_ctz(lanes)];
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    if (event[__builtin_ctz(rest)]->op != uint8_t(Op::NoAddress)) {
      lead = event[__builtin_ctz(rest)];
      break;
    }
  const Op op = Op(lead->op);
  if (op == Op::NoAddress) return;
  if (op == Op::Instruction) return trace_count(w, reinterpret_cast<const char*>(lead->address), 1);
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
      add_request(w, warp, lead->pc, op, width, uint16_t(target), here, address, source);
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
void take_blocks(Worker* w, unsigned warp, unsigned lanes) {
  Stream* const stream = &w->tracer->stream[warp * kWarp];
  const Event *next[kWarp], *end[kWarp];
  unsigned left = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const unsigned l = __builtin_ctz(rest);
    Stream& s = stream[l];
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
      add_name(w, warp, next, together);
    else
      add_accesses(w, warp, next, together);
    for (unsigned rest = together; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      if (++next[l] == end[l]) left &= ~(1u << l);
    }
  }
}

// Takes from the streams all that can be taken: until a lane has come to a block whose accesses aren't all known.
void merge(Worker* w, unsigned warp) {
  WarpTrace& wt = w->tracer->warp[warp];
  Stream* const stream = &w->tracer->stream[warp * kWarp];
  ++w->critical;
  for (bool going = true; going;) {
    unsigned group = 0;
    uint64_t best = ~uint64_t(0);
    bool passed = false;
    for (unsigned rest = wt.lanes; rest != 0; rest &= rest - 1) {
      const unsigned l = __builtin_ctz(rest);
      Stream& s = stream[l];
      if (s.at == s.size) {
        if (s.done) continue;
        going = false;
        break;
      }
      const Event& e = s.event[s.at];
      if (e.kind == EventKind::Sync) {
        for (size_t i = 0; i < wt.met.size(); ++i) {
          Meeting& m = wt.met[i];
          if (m.number != e.address) continue;
          m.reached |= 1u << l;
          if (m.reached != m.members) break;
          for (unsigned all = m.members; all != 0; all &= all - 1) ++stream[__builtin_ctz(all)].at;
          wt.met.erase(wt.met.begin() + long(i));
          passed = true;
          break;
        }
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
    take_blocks(w, warp, group);
  }
  for (unsigned rest = wt.lanes; rest != 0; rest &= rest - 1) {
    const unsigned l = __builtin_ctz(rest);
    Stream& s = stream[l];
    if (s.at > 0) {
      memmove(s.event, s.event + s.at, (s.size - s.at) * sizeof(Event));
      s.open = s.open >= s.at ? s.open - s.at : 0;
      s.size -= s.at;
      s.at = 0;
    }
    Thread& t = w->thread[warp * kWarp + l];
    if (t.state == State::Held && s.size < kStreamLimit) w->ready(&t);
  }
  --w->critical;
}

}  // namespace

Tracer::Tracer() : stream(new Stream[kMaxThreads]), warp(new WarpTrace[kMaxWarps]) {}
Tracer::~Tracer() {
  for (unsigned i = 0; i < kMaxThreads; ++i) delete[] stream[i].event;
}

uint32_t trace_pc(const Worker* w, uintptr_t pc) {
  const Module& module = w->run->module;
  return module.holds(pc) ? uint32_t(pc - module.begin) : 0;
}

void trace_begin(Worker* w) {
  Tracer& t = *w->tracer;
  for (unsigned i = 0; i < w->threads; ++i) {
    Stream& s = t.stream[i];
    s.size = s.at = s.open = 0;
    s.done = false;
    s.top = stack_top(w->thread[i]);
    push_block(w, s, block_key(s, s.top, 0), 0);
  }
  for (unsigned i = 0; i < w->threads; i += kWarp) {
    WarpTrace& wt = t.warp[i / kWarp];
    wt.lanes = w->warp[i / kWarp].alive;
    wt.running = unsigned(__builtin_popcount(wt.lanes));
    wt.at_barrier = 0;
    wt.meetings = 0;
    wt.named.clear();
    wt.named_now.clear();
    wt.met.clear();
  }
}

void trace_access(Worker* w, uint64_t address, uint16_t target, size_t bytes, uint8_t op, EventKind kind, uintptr_t pc,
                  const Site& site, uintptr_t frame) {
  Stream& s = w->tracer->stream[w->current->number];
  const uint32_t at = trace_pc(w, pc);
  if (frame != 0 && frame > frame_of(s, s.event[s.open].address))  // back from a call
    push_block(w, s, block_key(s, frame, at), at);
  if (site.line > 0 && w->tracer->sites.count(at) == 0) {
    ++w->critical;
    w->tracer->sites.emplace(at, site);
    --w->critical;
  }
  do {
    const uint16_t piece = uint16_t(bytes < 0xfff0 ? bytes : 0xfff0);
    push(w, s, address | uint64_t(target) << 48, at, piece, op, kind);
    if (++s.event[s.open].bytes == 0xffff) push_block(w, s, s.event[s.open].address, s.event[s.open].pc);
    address += piece;
    bytes -= piece;
  } while (bytes > 0);
}

void trace_instruction(Worker* w, uintptr_t pc, Site site) {
  if (w->tracer != nullptr)
    trace_access(w, reinterpret_cast<uintptr_t>(site.what), 0, 0, uint8_t(Op::Instruction), EventKind::Access, pc, site, 0);
}

// Both ends of a bulk copy: the sectors of its tensor that it touches, and the bytes in shared memory, whose wavefronts are
// not known: no counter has shown yet in what portions TMA goes there.
void trace_bulk(Worker* w, uintptr_t pc, Op op, const Box& b, Site site) {
  if (w->tracer == nullptr) return;
  const unsigned warp = w->current->number / kWarp, lane = w->current->number % kWarp;
  const uint32_t at = trace_pc(w, pc);
  ++w->critical;
  if (site.line > 0) w->tracer->sites.emplace(at, site);
  uint64_t bytes = 0, sectors = 0, first_byte = 0, last_sector = UINT64_MAX;
  each_row(b, [&](uint32_t, const char* row, unsigned first, unsigned end) {
    if (end == first) return;
    const uint64_t begin = reinterpret_cast<uintptr_t>(row) + first * b.map.item, stop = begin + (end - first) * b.map.item;
    if (bytes == 0) first_byte = begin;
    bytes += stop - begin;
    sectors += (stop - 1) / 32 - begin / 32 + (begin / 32 != last_sector);
    last_sector = (stop - 1) / 32;
  });
  const auto add = [&](const RowKey& key, uint64_t moved, uint64_t cost, uint64_t ideal, uint64_t address) {
    Row& row = row_of(*w->tracer, key);
    const bool worse = row.requests++ == 0 || cost > row.worst ||
                       (cost == row.worst && (w->block < row.block || (w->block == row.block && warp < row.warp)));
    row.bytes += moved;
    row.cost += cost;
    row.ideal += ideal;
    if (!worse) return;
    row.worst = unsigned(cost);
    row.worst_ideal = unsigned(ideal);
    row.warp = warp;
    row.block = w->block;
    for (unsigned l = 0; l < kWarp; ++l) row.address[l] = l == lane ? int64_t(address) : -1;
  };
  const int region = bytes > 0 ? region_at(first_byte, 1) : -1;
  if (bytes > 0) {
    const uint64_t base = region < 0 ? 0 : reinterpret_cast<uintptr_t>(session.regions[size_t(region)].base);
    add({at, region < 0 ? kAllocated : uint16_t(region), uint8_t(op), uint8_t(b.map.item), nullptr}, bytes, sectors, (bytes + 31) / 32,
        first_byte - base);
  }
  size_t begin;
  const char* array = shared_name(w, w->tracer->warp[warp].named_now, b.shared, &begin);
  add({at, kShared, uint8_t(op), uint8_t(b.map.item), array}, b.bytes, 0, 0, b.shared - (b.shared >= w->dynamic_base ? w->dynamic_base : 0));
  --w->critical;
}

void trace_past_L1(Worker* w, uintptr_t pc) {
  ++w->critical;
  w->tracer->past_L1.insert(trace_pc(w, pc));
  --w->critical;
}

void trace_name(Worker* w, const char* name, uint32_t offset) {
  Stream& s = w->tracer->stream[w->current->number];
  ++w->critical;
  set_name(w->tracer->warp[w->current->number / kWarp].named_now, name, offset);
  --w->critical;
  push(w, s, reinterpret_cast<uintptr_t>(name), offset, 0, 0, EventKind::Name);
  if (++s.event[s.open].bytes == 0xffff) push_block(w, s, s.event[s.open].address, s.event[s.open].pc);
}

void trace_sync(Worker* w, uint64_t number) {
  Stream& s = w->tracer->stream[w->current->number];
  const Event open = s.event[s.open];
  push(w, s, number, open.pc, 0, 0, EventKind::Sync);
  push_block(w, s, open.address + ((open.address & 0x3fff) < 0x3fff), open.pc);
}

void trace_met(Worker* w, unsigned warp, uint64_t number, unsigned members) {
  WarpTrace& wt = w->tracer->warp[warp];
  ++w->critical;
  wt.met.push_back({number, members, 0});
  --w->critical;
  if (members == w->warp[warp].alive) merge(w, warp);
}

void trace_barrier(Worker* w) {
  const unsigned warp = w->current->number / kWarp;
  WarpTrace& wt = w->tracer->warp[warp];
  if (wt.at_barrier == 0) wt.meetings += 2;
  trace_sync(w, wt.meetings);  // even numbers are barriers, odd ones rendezvous of lanes
  wt.at_barrier |= 1u << w->current->number % kWarp;
  if (wt.at_barrier != wt.lanes) return;
  wt.at_barrier = 0;
  trace_met(w, warp, wt.meetings, wt.lanes);
}

void trace_stopped(Worker* w, unsigned warp) {
  if (--w->tracer->warp[warp].running == 0) merge(w, warp);
}

void trace_end(Worker* w) { w->tracer->stream[w->current->number].done = true; }

void trace_count(Worker* w, const char* what, uint64_t warps) {
  ++w->critical;
  w->tracer->instructions[what] += warps;
  --w->critical;
}

// The worker's rows and counts, after a launch, into the session's.
void trace_collect(Worker* w, unsigned launch) {
  Tracer& t = *w->tracer;
  Trace& all = session.trace;
  const auto keep = [&](const char* text) {
    const std::string s = text == nullptr ? "" : text;
    return all.names.emplace(s, s).first->second.c_str();
  };
  for (const Row& r : t.rows) {
    TraceRow row = {};
    row.kernel = keep(w->run->launch->name);
    row.target = keep(r.key.target == kShared ? r.key.array : r.key.target == kAllocated ? "cudaMalloc"
                                                                                         : session.regions[r.key.target].name);
    const auto site = t.sites.find(r.key.pc);
    row.file = keep(site == t.sites.end() ? "" : site->second.file);
    row.line = site == t.sites.end() ? 0 : site->second.line;
    row.shared = r.key.target == kShared;
    row.pc = r.key.pc;
    row.op = r.key.op;
    row.width = r.key.width;
    row.requests = r.requests;
    row.bytes = r.bytes;
    row.cost = r.cost;
    row.ideal = r.ideal;
    row.worst = r.worst;
    row.worst_ideal = r.worst_ideal;
    row.warp = r.warp;
    row.launch = launch;
    row.block = r.block;
    memcpy(row.address, r.address, sizeof row.address);
    all.rows.push_back(row);
  }
  for (const auto& [what, count] : t.instructions) all.counts[what] += count;
  t.rows.clear();
  t.slots.clear();
  t.instructions.clear();
  t.sites.clear();
}

// Marks where a basic block begins: gcc and clang put the calls in for -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr || w->tracer == nullptr) return;
  Thread* t = w->current;
  Stream& s = w->tracer->stream[t->number];
  race_settle(w);
  const uint32_t pc = trace_pc(w, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
  push_block(w, s, block_key(s, reinterpret_cast<uintptr_t>(__builtin_frame_address(0)), pc), pc);
  if (s.size < kStreamLimit || t->undisturbed) return;
  t->state = State::Held;
  trace_stopped(w, t->number / kWarp);
  wait();
}

}  // namespace emu
