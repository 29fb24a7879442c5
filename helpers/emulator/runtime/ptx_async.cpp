// Barriers of part of a block, mbarriers and bulk copies. PTX ISA, "Parallel Synchronization and Communication Instructions"
// and "Data Movement and Conversion Instructions" (cp.async.bulk and its kin).
#include <algorithm>
#include <cstring>
#include <string>

#include "async_copy.h"
#include "barrier.h"
#include "bulk_copy.h"
#include "memory.h"
#include "ptx_families.h"
#include "report.h"
#include "tensor_map.h"
#include "worker.h"

namespace emu::ptx {

namespace {

void hint(Frame&, const Instruction&) {}

// Shared memory by the address of a register: 32 bits of its window, or a generic pointer.
uint32_t shared_offset(const Frame& f, const Instruction& i, Ref r, bool generic) {
  const uint64_t address = get(f, r);
  const uint64_t at = generic ? address - reinterpret_cast<uint64_t>(worker->arena) : uint32_t(address);
  if (at >= kArena)
    fail("out of bounds", 700, f.pc, i.site, "gives %s the address 0x%llx, which lies outside of shared memory", i.site.what,
         static_cast<unsigned long long>(address));
  return uint32_t(at);
}

bool has(const Decoder& d, const char* qualifier) {
  return std::find(d.qualifiers.begin(), d.qualifiers.end(), qualifier) != d.qualifiers.end();
}

void call_it(Decoder& d, const std::string& name) { d.out.site.what = strdup(name.c_str()); }

// ---- bar, barrier

constexpr int64_t kWaits = 1, kAligned = 2, kAnd = 4, kOr = 8, kCount = 16;

void come_to_barrier(Frame& f, const Instruction& i) {
  const uint32_t id = get<uint32_t>(f, i.s[0]);
  const uint32_t count = i.count > 1 ? get<uint32_t>(f, i.s[1]) : worker->whole_warps();
  const BarrierVote vote = i.offset & kAnd ? BarrierVote::And : i.offset & kOr ? BarrierVote::Or : i.offset & kCount ? BarrierVote::Count : BarrierVote::None;
  const bool yes = vote != BarrierVote::None && get(f, i.s.back()) != 0;
  count_instruction(worker, f.pc, i.site);
  const int answer = named_barrier(id, count, i.offset & kWaits, vote, yes, i.offset & kAligned, f.pc, i.site);
  if (!i.d.empty()) put(f, i.d[0], uint32_t(answer));
}

bool decode_barrier(Decoder& d) {
  if (has(d, "warp")) return false;
  d.take("cta");
  d.out.offset = d.base == "bar" || d.take("aligned") ? kAligned : 0;
  const size_t operands = d.operands.size();
  if (d.take("arrive")) {
    d.expect(2);
    call_it(d, "bar.arrive");
  } else if (d.take("sync")) {
    d.expect(1, 2);
    d.out.offset |= kWaits;
  } else if (d.take("red")) {
    d.out.offset |= kWaits | (d.take("and") ? kAnd : d.take("or") ? kOr : kCount);
    if ((d.out.offset & kCount) && !d.take("popc")) return false;
    if (!d.take(d.out.offset & kCount ? "u32" : "pred")) return false;
    d.expect(3, 4);
    d.destination(0, d.out.offset & kCount ? Type::u32 : Type::pred);
    call_it(d, "bar.red");
    d.source(1, Type::u32);
    if (operands == 4) d.source(2, Type::u32);
    d.predicate(d.operands.back());
    d.out.count = unsigned(operands - 2);
    d.out.run = come_to_barrier;
    return true;
  } else {
    return false;
  }
  for (size_t k = 0; k < operands; ++k) d.source(k, Type::u32);
  d.out.count = unsigned(operands);
  d.out.run = come_to_barrier;
  return true;
}

// ---- mbarrier

constexpr int64_t kGeneric = 1, kExpect = 2, kDrop = 4, kRelaxed = 8, kParity = 16, kComes = 32, kNoComplete = 64;

uint32_t mbarrier_of(const Frame& f, const Instruction& i, size_t source = 0) {
  const uint32_t at = shared_offset(f, i, i.s[source], i.offset & kGeneric);
  if (at % 8 != 0)
    fail("misaligned", 716, f.pc, i.site, "gives %s the address 0x%x; an mbarrier lies at a multiple of 8", i.site.what, at);
  return at;
}

void init(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  mbarrier_init(mbarrier_of(f, i), get<uint32_t>(f, i.s[1]), f.pc, i.site);
}
void inval(Frame& f, const Instruction& i) { mbarrier_inval(mbarrier_of(f, i), f.pc, i.site); }

void expect_tx(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  const int64_t bytes = get<uint32_t>(f, i.s[1]);
  mbarrier_expect(mbarrier_of(f, i), i.offset & kComes ? -bytes : bytes, f.pc, i.site);
}

void arrive(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  const uint32_t operand = i.s.size() > 1 ? get<uint32_t>(f, i.s[1]) : 1;
  const bool expects = i.offset & kExpect;
  const uint64_t state = mbarrier_arrive(mbarrier_of(f, i), expects ? 1 : operand, expects ? operand : 0, i.offset & kDrop,
                                         !(i.offset & kRelaxed), f.pc, i.site);
  if (!i.d.empty()) put(f, i.d[0], state);
}

void wait_for_phase(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  const bool parity = i.offset & kParity;
  const uint64_t phase = parity ? get<uint32_t>(f, i.s[1]) : get(f, i.s[1]);
  if (parity && phase > 1)
    fail("mbarrier", 719, f.pc, i.site, "waits with %s for a phase of parity %u; it is 0 or 1", i.site.what, unsigned(phase));
  put(f, i.d[0], mbarrier_wait(mbarrier_of(f, i), parity ? Awaited::Parity : Awaited::State, phase, !(i.offset & kRelaxed), f.pc, i.site));
}

void pending_count(Frame& f, const Instruction& i) { put(f, i.d[0], get<uint32_t>(f, i.s[0])); }

void land_with_copies(Frame& f, const Instruction& i) {
  Worker* w = worker;
  count_instruction(w, f.pc, i.site);
  const uint32_t at = mbarrier_of(f, i);
  mbarrier_land(at, {{}, copies_issued(w, w->current->number), true, w->current->number, f.pc, i.site}, f.pc, i.site);
  if (i.count == 0) ++w->barriers->mbarrier[at].pending;  // without .noinc
}

void take_sem(Decoder& d) {
  if (d.take("relaxed")) d.out.offset |= kRelaxed;
  d.take_any({"release", "acquire"});
  d.take_any({"cta", "cluster"});
  if (!d.take("shared") && !d.take("shared::cluster")) d.out.offset |= kGeneric;
}

void mbarrier_address(Decoder& d, size_t n) { d.address(n, !(d.out.offset & kGeneric)); }

bool decode_init(Decoder& d, bool inval) {
  take_sem(d);
  d.take("b64");
  d.expect(inval ? 1 : 2);
  mbarrier_address(d, 0);
  if (!inval) d.source(1, Type::u32);
  d.out.run = inval ? ptx::inval : init;
  call_it(d, inval ? "mbarrier.inval" : "mbarrier.init");
  return true;
}

bool decode_pending_count(Decoder& d) {
  d.take("b64");
  d.expect(2);
  d.destination(0, Type::u32);
  d.source(1, Type::b64);
  d.out.run = pending_count;
  return true;
}

bool decode_wait(Decoder& d, bool tries) {
  if (d.take("parity")) d.out.offset |= kParity;
  take_sem(d);
  d.take("b64");
  d.expect(3, tries ? 4 : 3);
  d.destination(0, Type::pred);
  mbarrier_address(d, 1);
  d.source(2, d.out.offset & kParity ? Type::u32 : Type::b64);
  d.out.run = wait_for_phase;
  call_it(d, tries ? "mbarrier.try_wait" : "mbarrier.test_wait");
  return true;
}

bool decode_arrive(Decoder& d, bool drop) {
  if (drop) d.out.offset |= kDrop;
  d.take("arrive");
  if (d.take("expect_tx")) d.out.offset |= kExpect;
  if (d.take("noComplete")) d.out.offset |= kNoComplete;
  take_sem(d);
  d.take("b64");
  const bool expects = d.out.offset & kExpect, counts = d.out.offset & kNoComplete;
  // The state may be left out where it would mean nothing: [addr], or _, [addr].
  const size_t first = d.operands[0].kind == Operand::Address ? 0 : 1;
  d.expect(first + (expects || counts ? 2 : 1), first + 2);
  if (first == 1 && d.operands[0].kind != Operand::Sink) d.destination(0, Type::b64);
  mbarrier_address(d, first);
  if (d.operands.size() > first + 1) d.source(first + 1, Type::u32);
  d.out.run = arrive;
  call_it(d, std::string("mbarrier.arrive") + (drop ? "_drop" : "") + (expects ? ".expect_tx" : ""));
  return true;
}

bool decode_tx(Decoder& d, bool comes) {
  if (comes) d.out.offset |= kComes;
  take_sem(d);
  d.take("b64");
  d.expect(2);
  mbarrier_address(d, 0);
  d.source(1, Type::u32);
  d.out.run = expect_tx;
  call_it(d, comes ? "mbarrier.complete_tx" : "mbarrier.expect_tx");
  return true;
}

bool decode_mbarrier(Decoder& d) {
  if (d.take("init")) return decode_init(d, false);
  if (d.take("inval")) return decode_init(d, true);
  if (d.take("pending_count")) return decode_pending_count(d);
  if (d.take("test_wait")) return decode_wait(d, false);
  if (d.take("try_wait")) return decode_wait(d, true);
  if (d.take("arrive_drop")) return decode_arrive(d, true);
  if (d.take("arrive")) return decode_arrive(d, false);
  if (d.take("complete_tx")) return decode_tx(d, true);
  if (d.take("expect_tx")) return decode_tx(d, false);
  return false;
}

// ---- fences

void fence_init(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  fence_mbarrier_init();
}
void fence_async(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  fence_proxy_async();
}

void fence_async_global(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  fence_proxy_async_global();
}

bool decode_fence(Decoder& d) {
  if (d.take("mbarrier_init")) {
    if (!d.take("release") || !d.take("cluster")) return false;
    d.expect(0);
    d.out.run = fence_init;
    call_it(d, "fence.mbarrier_init");
    return true;
  }
  if (!has(d, "proxy")) return false;
  d.take("proxy");
  if (d.take("alias") || has(d, "tensormap::generic")) {  // neither can matter here: one address per variable, maps are read at once
    d.qualifiers.clear();
    d.out.run = hint;
    return true;
  }
  if (!d.take("async")) return false;
  d.expect(0);
  d.out.run = d.take("global") ? fence_async_global : fence_async;
  d.take("shared");
  d.take("shared::cluster");
  call_it(d, "fence.proxy.async");
  return true;
}

// ---- cp.async.bulk, cp.reduce.async.bulk. Instruction::s: shared, [global or map, coordinates], [size], mbarrier;
// count: coordinates; offset: the BulkOp, and

constexpr int64_t kToShared = 1 << 8, kTensor = 1 << 9;

Box box_of(const Frame& f, const Instruction& i) {
  Box b = {};
  b.shared = shared_offset(f, i, i.s[0], false);
  if (!(i.offset & kTensor)) {
    const uint32_t bytes = get<uint32_t>(f, i.s[2]);
    const uint64_t global = get(f, i.s[1]);
    if (bytes % 16 != 0 || global % 16 != 0 || bytes == 0)
      fail("misaligned", 716, f.pc, i.site, "copies %u bytes with %s, from or to %s; both must be multiples of 16", bytes, i.site.what,
           address_in_words(worker, global).c_str());
    const unsigned item = i.bytes;
    b.map = {kTensorMap, reinterpret_cast<char*>(global), {bytes / item, 1, 1, 1, 1}, {}, bytes / item, {1, 1, 1, 1}, {1, 1, 1, 1}, 1,
             uint8_t(item), uint8_t(i.offset >> 16), 0};
    b.bytes = bytes;
    return b;
  }
  if (get(f, i.s[1]) - worker->current->stack < kStackBytes)  // as is a parameter without __grid_constant__
    fail("tensor map", 719, f.pc, i.site, "gives %s the address of a map in a local variable, which TMA can't read", i.site.what);
  memcpy(&b.map, reinterpret_cast<const void*>(get(f, i.s[1])), sizeof b.map);
  if (get(f, i.s[1]) % 64 != 0 || b.map.magic != kTensorMap)
    fail("tensor map", 719, f.pc, i.site, "gives %s the address 0x%llx, where no tensor map is that cuTensorMapEncodeTiled has written",
         i.site.what, static_cast<unsigned long long>(get(f, i.s[1])));
  if (b.map.rank != i.count)
    fail("tensor map", 719, f.pc, i.site, "gives %s, which takes %u coordinates, the map of a tensor with %u dimensions", i.opcode.c_str(), i.count,
         b.map.rank);
  for (unsigned k = 0; k < i.count; ++k) b.at[k] = get<int32_t>(f, i.s[2 + k]);
  b.bytes = b.map.box * b.map.item;
  for (const uint16_t rows : b.map.rows) b.bytes *= rows;
  return b;
}

void copy_bulk(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  const Box b = box_of(f, i);
  const BulkOp what = BulkOp(i.offset & 0xff);
  const bool tensor = i.offset & kTensor;
  if (i.offset & kToShared) return bulk_load(b, mbarrier_of(f, i, i.s.size() - 1), tensor ? Op::BulkTensor : Op::Bulk, f.pc, i.site);
  const Op op = what == BulkOp::Copy ? tensor ? Op::BulkTensor : Op::Bulk : tensor ? Op::ReduceTensor : Op::ReduceBulk;
  bulk_store(b, what, op, f.pc, i.site);
}

void commit_bulk(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  bulk_commit();
}
void wait_bulk(Frame& f, const Instruction& i) {
  count_instruction(worker, f.pc, i.site);
  bulk_wait(get<uint32_t>(f, i.s[0]), i.offset != 0);
}

// The type of what a reduction that names no tensor adds up, as a tensor map's.
int map_type(Type t) {
  switch (t) {
    case Type::u32: case Type::b32: return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    case Type::s32: return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case Type::u64: case Type::b64: return CU_TENSOR_MAP_DATA_TYPE_UINT64;
    case Type::s64: return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case Type::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Type::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Type::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Type::f64: return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    default: return -1;
  }
}

// [map, {c0, c1}] at operand n: the map's address and the coordinates.
void tensor_operand(Decoder& d, size_t n, unsigned rank) {
  Operand& o = d.operands[n];
  if (o.elements.size() != 1) d.refuse(o.text + " must be [map, {coordinates}]");
  const Operand coordinates = o.elements[0];
  o.elements.clear();
  d.address(n, false);
  const size_t count = coordinates.kind == Operand::Vector ? coordinates.elements.size() : 1;
  if (count != rank) d.refuse(d.out.opcode + " takes " + std::to_string(rank) + " coordinates, not " + std::to_string(count));
  if (coordinates.kind != Operand::Vector) return d.source(coordinates, Type::s32);
  for (const Operand& c : coordinates.elements) d.source(c, Type::s32);
}

bool decode_bulk_group(Decoder& d, bool waits) {
  d.out.offset = waits && d.take("read");
  d.expect(waits ? 1 : 0);
  if (waits) d.source(0, Type::u32);
  d.out.run = waits ? wait_bulk : commit_bulk;
  call_it(d, waits ? "cp.async.bulk.wait_group" : "cp.async.bulk.commit_group");
  return true;
}

BulkOp take_bulk_op(Decoder& d) {
  const struct {
    const char* name;
    BulkOp op;
  } ops[] = {{"add", BulkOp::Add}, {"min", BulkOp::Min}, {"max", BulkOp::Max}, {"inc", BulkOp::Inc},
             {"dec", BulkOp::Dec}, {"and", BulkOp::And}, {"or", BulkOp::Or}, {"xor", BulkOp::Xor}};
  BulkOp op = BulkOp::Copy;
  for (const auto& o : ops)
    if (d.take(o.name)) op = o.op;
  return op;
}

// To shared memory? .global stands where the source is.
bool goes_to_shared(const Decoder& d) {
  const auto at = [&](const char* q) { return std::find(d.qualifiers.begin(), d.qualifiers.end(), q); };
  const auto cluster = at("shared::cluster");
  return (cluster != d.qualifiers.end() ? cluster : at("shared::cta")) < at("global");
}

// The operands of a copy or a reduction: the shared end, the other one, the size if no tensor map says it, the mbarrier.
void bulk_operands(Decoder& d, bool to_shared, unsigned rank, bool policy) {
  const bool tensor = rank > 0;
  d.expect((tensor ? 2 : 3) + to_shared + policy);
  d.address(to_shared ? 0 : 1, true);
  const size_t other = to_shared ? 1 : 0;
  if (tensor) {
    tensor_operand(d, other, rank);
    d.out.count = rank;
  } else {
    d.address(other, false);
    d.source(2, Type::u32);
  }
  if (to_shared) d.address(tensor ? 2 : 3, true);
}

bool decode_bulk(Decoder& d) {
  if (!has(d, "bulk")) return false;
  const bool reduces = d.take("reduce");
  if (!d.take("async") || !d.take("bulk")) return false;
  if (d.take("commit_group")) return decode_bulk_group(d, false);
  if (d.take("wait_group")) return decode_bulk_group(d, true);
  if (d.take("prefetch")) {  // caches are not modelled
    d.qualifiers.clear();
    d.out.run = hint;
    return true;
  }
  if (!has(d, "global")) return false;
  const bool to_shared = goes_to_shared(d);
  if (to_shared && reduces) return false;
  d.take("global");
  if (!d.take("shared::cta") && !(to_shared && d.take("shared::cluster"))) return false;
  const bool tensor = d.take("tensor"), policy = d.take("L2::cache_hint");
  unsigned rank = 0;
  for (unsigned n = 1; tensor && n <= 5; ++n)
    if (d.take(std::to_string(n) + "d")) rank = n;
  if (tensor) d.take("tile");
  if (tensor != (rank > 0)) return false;
  if (!d.take(to_shared ? "mbarrier::complete_tx::bytes" : "bulk_group")) return false;
  const BulkOp op = reduces ? take_bulk_op(d) : BulkOp::Copy;
  if (reduces != (op != BulkOp::Copy)) return false;
  d.out.offset = int64_t(op) | (to_shared ? kToShared : 0) | (tensor ? kTensor : 0);
  d.out.bytes = 1;
  if (reduces && !tensor) {
    const bool halves_rounded = d.take("noftz");
    const Type t = d.take_type();
    const bool halves = t == Type::f16 || t == Type::bf16;
    if (map_type(t) < 0 || (halves && op == BulkOp::Add) != halves_rounded) return false;
    d.out.offset |= int64_t(map_type(t)) << 16;
    d.out.bytes = bytes_of(t);
  }
  bulk_operands(d, to_shared, rank, policy);
  d.out.run = copy_bulk;
  call_it(d, std::string(reduces ? "cp.reduce.async.bulk" : "cp.async.bulk") + (tensor ? ".tensor" : ""));
  return true;
}

// cp.async.mbarrier.arrive: when the copies of this thread have landed
bool decode_copies_arrive(Decoder& d) {
  if (!d.take("async") || !d.take("arrive")) return false;
  d.out.count = d.take("noinc");
  take_sem(d);
  d.take("b64");
  d.expect(1);
  d.address(0, !(d.out.offset & kGeneric));
  d.out.run = land_with_copies;
  call_it(d, "cp.async.mbarrier.arrive");
  return true;
}

}  // namespace

bool decode_async(Decoder& d) {
  const std::string& b = d.base;
  if (b == "mbarrier") return decode_mbarrier(d);
  if (b == "bar" || b == "barrier") return decode_barrier(d);
  if (b == "fence") return decode_fence(d);
  if (b != "cp") return false;
  if (has(d, "mbarrier")) return d.take("mbarrier") && decode_copies_arrive(d);
  return decode_bulk(d);
}

}  // namespace emu::ptx
