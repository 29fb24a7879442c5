// Loads, stores, atomics and asynchronous copies. PTX ISA, "Data Movement and Conversion Instructions" and "Parallel
// Synchronization and Communication Instructions". Every lane's part goes through check_access, in the lane's own fiber.
#include <atomic>
#include <cstring>
#include <type_traits>

#include "async_copy.h"
#include "memory.h"
#include "ptx_families.h"
#include "report.h"
#include "tool.h"
#include "worker.h"

namespace emu::ptx {

namespace {

enum class Space : uint8_t { Generic, Shared, Global };

// A shared address is an offset into the block's shared memory; of a 64-bit register the lower half counts.
char* shared_pointer(const Frame& f, uint64_t address, size_t bytes, Site site) {
  const uint64_t offset = uint32_t(address);
  if (offset + bytes > kArena)
    fail("out of bounds", 700, f.pc, site, "gives %s the address 0x%zx, which lies outside of shared memory", site.what,
         size_t(offset));
  return worker->arena + offset;
}

char* pointer(const Frame& f, const Instruction& i, size_t source, size_t bytes) {
  const uint64_t address = get(f, i.s[source]);
  if (Space(i.offset & 0xff) == Space::Shared) return shared_pointer(f, address, bytes, i.site);
  char* p = reinterpret_cast<char*>(address);
  if (Space(i.offset & 0xff) == Space::Global && uint64_t(p - worker->arena) < kArena)
    fail("out of bounds", 700, f.pc, i.site, "gives %s the address of something in shared memory", i.opcode.c_str());
  return p;
}

constexpr int64_t kSigned = 1 << 8;                      // with Space in Instruction::offset
constexpr int kOrder = 10;                               // and, from this bit on, an Order

unsigned order_of(const Instruction& i) { return unsigned(i.offset >> kOrder); }

// count elements of `bytes` each; the registers that take them may be larger.
void load(Frame& f, const Instruction& i) {
  const char* p = pointer(f, i, 0, size_t(i.bytes) * i.count);
  if (const unsigned order = order_of(i)) {  // it may wait for another thread's store
    spin(p, 0);
    strong_access(Op::Load, p, size_t(i.bytes) * i.count, order | kStrong | kReads, f.pc, i.site);
  } else {
    check_access(Op::Load, p, size_t(i.bytes) * i.count, f.pc, i.site);
  }
  for (unsigned k = 0; k < i.count; ++k) {
    uint64_t bits = 0;
    memcpy(&bits, p + k * i.bytes, i.bytes);
    if (i.offset & kSigned) bits = uint64_t(int64_t(bits << (64 - 8 * i.bytes)) >> (64 - 8 * i.bytes));
    f.reg[i.d[k]] = bits;
  }
  if (order_of(i) & kAcquires) std::atomic_thread_fence(std::memory_order_acquire);
  if (order_of(i) != kWeak) read_flag(p, order_of(i) | kStrong | kReads);
}

void store(Frame& f, const Instruction& i) {
  char* p = pointer(f, i, 0, size_t(i.bytes) * i.count);
  if (const unsigned order = order_of(i)) {
    if (order & kReleases) std::atomic_thread_fence(std::memory_order_release);
    strong_access(Op::Store, p, size_t(i.bytes) * i.count, (order & kVolatile ? kVolatile : order | kStrong) | kWrites, f.pc, i.site);
  } else {
    check_access(Op::Store, p, size_t(i.bytes) * i.count, f.pc, i.site);
  }
  for (unsigned k = 0; k < i.count; ++k) memcpy(p + k * i.bytes, &f.reg[i.s[1 + k]], i.bytes);
}

Space take_space(Decoder& d) {
  if (d.take("shared")) return Space::Shared;
  if (d.take("global") || d.take("const") || d.take("param::entry")) return Space::Global;
  return Space::Generic;
}

// Orders, as bits of Instruction::offset, and hints: caches are not modelled.
int64_t take_order(Decoder& d, bool& policy) {
  const bool plain_volatile = d.take("volatile"), both = d.take("acq_rel");
  unsigned order = plain_volatile ? kVolatile : d.take("relaxed") ? kStrong : kWeak;
  if (d.take("acquire") || both) order |= kStrong | kAcquires;
  if (d.take("release") || both) order |= kStrong | kReleases;
  if (d.take("cta")) order |= kOfBlock;
  if (d.take("sys") && order != kWeak) order |= kOfSystem;
  d.take_any({"weak", "cluster", "gpu", "mmio"});
  d.take_any({"ca", "cg", "cs", "lu", "cv", "nc", "wb", "wt"});
  policy = d.take("L2::cache_hint");
  d.drop_prefix("L1::");
  d.drop_prefix("L2::");
  return int64_t(order) << kOrder;
}

void decode_access(Decoder& d, bool storing) {
  bool policy;
  const int64_t order = take_order(d, policy);
  const Space space = take_space(d);
  const unsigned vector = d.take("v2") ? 2 : d.take("v4") ? 4 : 1;
  const Type t = d.take_type();
  const unsigned bytes = bytes_of(t);
  if (t == Type::pred || t == Type::b128 || t == Type::f16 || t == Type::f16x2 || t == Type::bf16 || t == Type::bf16x2 ||
      t == Type::tf32 || bytes * vector > 16)
    d.unknown();
  d.expect(policy ? 3 : 2);
  d.out.offset = int64_t(space) | order | (is_signed(t) ? kSigned : 0);
  d.out.bytes = bytes;
  if (storing) {
    d.address(0, space == Space::Shared);
    d.elements(1, t, false, !is_float(t));
    d.out.run = store;
  } else {
    d.elements(0, t, true, !is_float(t));
    d.address(1, space == Space::Shared);
    d.out.run = load;
  }
  if (d.out.count != vector || (vector == 1) != (d.operands[storing ? 1 : 0].kind != Operand::Vector))
    d.refuse(d.out.opcode + " takes " + (vector > 1 ? "a vector of " + std::to_string(vector) : "one element"));
}

// ---- cp.async

constexpr int64_t kIgnore = 1 << 10, kSourceSize = 1 << 11;

void copy_async(Frame& f, const Instruction& i) {
  const uint32_t bytes = get<uint32_t>(f, i.s[2]);
  uint32_t from = bytes;
  if (i.offset & kIgnore) from = get(f, i.s[3]) != 0 ? 0 : bytes;
  if (i.offset & kSourceSize) from = get<uint32_t>(f, i.s[3]);
  if (i.count == 16 && bytes != 16)
    fail("inline PTX", 801, f.pc, i.site, "copies %u bytes with cp.async.cg, which copies 16 at a time", bytes);
  char* to = shared_pointer(f, get(f, i.s[0]), bytes, i.site);
  issue_copy(to, reinterpret_cast<const void*>(get(f, i.s[1])), bytes, from, i.count == 16, f.pc, i.site);
}
void commit_async(Frame&, const Instruction&) { commit_copies(); }
void wait_async(Frame& f, const Instruction& i) { wait_copies(get<uint32_t>(f, i.s[0])); }
void wait_async_all(Frame&, const Instruction&) {
  commit_copies();
  wait_copies(0);
}

bool decode_cp_async(Decoder& d) {
  if (!d.take("async")) return false;
  if (d.take("commit_group")) {
    d.expect(0);
    d.out.run = commit_async;
    return true;
  }
  if (d.take("wait_group")) {
    d.expect(1);
    d.source(0, Type::u32);
    d.out.run = wait_async;
    return true;
  }
  if (d.take("wait_all")) {
    d.expect(0);
    d.out.run = wait_async_all;
    return true;
  }
  if (d.qualifiers.empty() || (d.qualifiers[0] != "ca" && d.qualifiers[0] != "cg")) return false;
  const bool whole = d.take("cg");
  d.take("ca");
  if (!d.take("shared") || !d.take("global")) d.unknown();
  const bool policy = d.take("L2::cache_hint");
  d.drop_prefix("L2::");
  d.expect(policy ? 4 : 3, policy ? 5 : 4);
  d.address(0, true);
  d.address(1, false);
  d.source(2, Type::u32);
  if (d.operands.size() > (policy ? 4u : 3u)) {
    const size_t before = d.out.s.size();
    try {
      d.predicate(d.operands[3]);
      d.out.offset = kIgnore;
    } catch (const Refusal&) {
      d.out.s.resize(before);
      d.source(3, Type::u32);
      d.out.offset = kSourceSize;
    }
  }
  d.out.count = whole ? 16 : 0;
  d.out.run = copy_async;
  return true;
}

// ---- atomics: a block's threads take turns, and global sums are made in the order of the blocks

enum class Atomic : uint8_t { Add, Min, Max, And, Or, Xor, Exch, Cas, Inc, Dec };

template <class T>
T changed(Atomic op, T old, T b, T c) {
  switch (op) {
    case Atomic::Add:
      if constexpr (std::is_floating_point<T>::value) return old + b;
      else return T(uint64_t(old) + uint64_t(b));
    case Atomic::Min: return b < old ? b : old;
    case Atomic::Max: return old < b ? b : old;
    case Atomic::Exch: return b;
    case Atomic::Cas: return memcmp(&old, &b, sizeof(T)) == 0 ? c : old;
    default:
      if constexpr (!std::is_floating_point<T>::value) {
        switch (op) {
          case Atomic::And: return old & b;
          case Atomic::Or: return old | b;
          case Atomic::Xor: return old ^ b;
          case Atomic::Inc: return old >= b ? T(0) : T(old + 1);
          default: return old == 0 || old > b ? b : T(old - 1);
        }
      }
      return old;
  }
}

template <class T>
void atomic(Frame& f, const Instruction& i) {
  char* p = pointer(f, i, 0, sizeof(T));
  before_atomic(p, sizeof(T), f.pc, i.site, order_of(i));
  T old;
  memcpy(&old, p, sizeof old);
  const T now = changed(Atomic(i.bytes), old, get<T>(f, i.s[1]), i.s.size() > 2 ? get<T>(f, i.s[2]) : T());
  memcpy(p, &now, sizeof now);
  if (!i.d.empty()) put(f, i.d[0], old);
}

void decode_atomic(Decoder& d, bool returns) {
  bool policy;
  const int64_t order = take_order(d, policy);
  d.take("noftz");
  const Space space = take_space(d);
  const struct {
    const char* name;
    Atomic op;
  } ops[] = {{"add", Atomic::Add}, {"min", Atomic::Min}, {"max", Atomic::Max}, {"and", Atomic::And}, {"or", Atomic::Or},
             {"xor", Atomic::Xor}, {"exch", Atomic::Exch}, {"cas", Atomic::Cas}, {"inc", Atomic::Inc}, {"dec", Atomic::Dec}};
  bool found = false;
  Atomic op = Atomic::Add;
  for (const auto& o : ops)
    if (d.take(o.name)) op = o.op, found = true;
  const Type t = d.take_type();
  const bool real = t == Type::f32 || t == Type::f64;
  if (!found || policy || (real && op != Atomic::Add) || (!returns && (op == Atomic::Exch || op == Atomic::Cas))) d.unknown();
  switch (t) {
    case Type::b32: case Type::u32: d.out.run = atomic<uint32_t>; break;
    case Type::s32: d.out.run = atomic<int32_t>; break;
    case Type::b64: case Type::u64: d.out.run = atomic<uint64_t>; break;
    case Type::s64: d.out.run = atomic<int64_t>; break;
    case Type::f32: d.out.run = atomic<float>; break;
    case Type::f64: d.out.run = atomic<double>; break;
    default: d.unknown();
  }
  const size_t first = returns ? 1 : 0;
  d.expect(first + 2 + (op == Atomic::Cas));
  if (returns) d.destination(0, t);
  d.address(first, space == Space::Shared);
  d.source(first + 1, t);
  if (op == Atomic::Cas) d.source(first + 2, t);
  d.out.offset = int64_t(space) | order;
  d.out.bytes = unsigned(op);
}

// ---- addresses

void to_shared(Frame& f, const Instruction& i) {
  f.reg[i.d[0]] = get(f, i.s[0]) - reinterpret_cast<uint64_t>(worker->arena);
}
void from_shared(Frame& f, const Instruction& i) {
  f.reg[i.d[0]] = get(f, i.s[0]) + reinterpret_cast<uint64_t>(worker->arena);
}
void copy_register(Frame& f, const Instruction& i) { f.reg[i.d[0]] = get(f, i.s[0]); }
void nothing(Frame&, const Instruction&) {}
void fence(Frame&, const Instruction&) { memory_fence(); }

bool decode_cvta(Decoder& d) {
  const bool to = d.take("to"), shared = d.take("shared");
  if ((!shared && !d.take_any({"global", "const", "local", "param"})) || !d.take("u64")) d.unknown();
  d.expect(2);
  d.destination(0, Type::u64);
  d.source(1, Type::u64);
  d.out.run = !shared ? copy_register : to ? to_shared : from_shared;
  return true;
}

}  // namespace

bool decode_memory(Decoder& d) {
  const std::string& b = d.base;
  if (b == "ld" || b == "ldu") return decode_access(d, false), true;
  if (b == "st") return decode_access(d, true), true;
  if (b == "cp") return decode_cp_async(d);
  if (b == "atom" || b == "red") return !d.take("async") && (decode_atomic(d, b == "atom"), true);
  if (b == "cvta") return decode_cvta(d);
  if (b == "prefetch" || b == "prefetchu" || b == "applypriority" || b == "discard") {  // caches are not modelled
    d.qualifiers.clear();
    d.out.run = nothing;
    return true;
  }
  if (b == "membar" || b == "fence") {
    if (d.take("proxy")) return false;
    d.take_any({"cta", "cluster", "gl", "gpu", "sys", "sc", "acq_rel", "acquire", "release"});
    d.expect(0);
    d.out.run = fence;
    return true;
  }
  if (b == "createpolicy") {
    d.qualifiers.clear();
    if (d.operands.empty()) d.unknown();
    d.destination(0, Type::b64);
    d.out.s.push_back(d.out.d[0]);
    d.out.run = nothing;
    return true;
  }
  return false;
}

}  // namespace emu::ptx
