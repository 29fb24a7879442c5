// Every load and store of a kernel calls here first: gcc and clang put the calls in for -fsanitize=thread, and these
// functions stand in for ThreadSanitizer's library. An access out of bounds is reported and never happens; of all others the
// tools are told.
#include "memory.h"

#include <cxxabi.h>
#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "barrier.h"
#include "block.h"
#include "grid.h"
#include "report.h"
#include "tool.h"
#include "warpgroup.h"

namespace emu {

StaticArray shared_array(const Worker* w, size_t offset) {
  if (offset >= w->dynamic_base) return {nullptr, "dynamic shared memory", w->dynamic_base, w->dynamic_bytes, {}};
  unsigned up_to = 0;
  while (up_to < w->arrays && w->array[up_to].offset <= offset) ++up_to;
  return up_to == 0 ? StaticArray{nullptr, "shared memory", 0, 0, {}} : w->array[up_to - 1];
}

namespace {

constexpr size_t kNull = 64 << 10;  // addresses below are taken for null plus an offset

bool in_one_array(const Worker* w, size_t offset, size_t bytes) {
  if (offset >= w->dynamic_base) return offset + bytes <= w->dynamic_base + w->dynamic_bytes;
  for (unsigned i = 0; i < w->arrays && w->array[i].offset <= offset; ++i)
    if (offset + bytes <= w->array[i].offset + w->array[i].bytes) return true;
  return false;
}

void check_shared(const Worker* w, size_t offset, size_t bytes, bool write, uintptr_t pc, const Site& site) {
  if (in_one_array(w, offset, bytes)) return;
  const StaticArray array = shared_array(w, offset);
  const size_t at = offset - array.offset;
  fail("out of bounds", 700, pc, site, "%s %zu bytes at %s + %zu bytes, %zu past its end (it has %zu bytes)",
       verb(write), bytes, array.name, at, at + bytes - array.bytes, array.bytes);
}

// A strided view owns only the rows it strides over; what lies between them is its neighbour's.
bool between_rows(const Region& r, uint64_t offset) {
  for (int d = 0; d < r.dims; ++d) {
    const uint64_t stride = uint64_t(r.stride[d]) * r.item;
    if (stride == 0) continue;
    if (offset / stride >= uint64_t(r.size[d])) return true;
    offset %= stride;
  }
  return offset >= r.item;
}

// The kernel's constants and __device__ variables, and its parameters.
bool known_elsewhere(const Worker* w, uintptr_t address) {
  const Run& run = *w->run;
  return run.module.holds(address) ||
         address - reinterpret_cast<uintptr_t>(run.launch->arguments) < run.launch->argument_bytes;
}

// Is it one of the kernel's __device__ variables? What can't be written is none, nor is a parameter, nor, when it is read, what
// has no symbol: perhaps a static __constant__. Fails if the access writes a __constant__ one, which kernels can't.
__attribute__((noinline)) bool device_variable(Worker* w, uintptr_t address, size_t bytes, bool write, uintptr_t pc,
                                               const Site& site) {
  const bool can_change = w->run->module.can_write(address);
  if (!write && !can_change) return false;
  const Variable v = variable_at(w, address);
  if (v.constant && write) {
    ++w->critical;
    const std::string name = demangled(v.name);
    --w->critical;
    fail("constant memory", 719, pc, site, "writes %zu bytes of the __constant__ variable %s", bytes, name.c_str());
  }
  return can_change && !v.constant && (v.name != nullptr || write);
}

// What the launcher got from cudaMalloc: constant while blocks run.
bool allocated(uintptr_t address, size_t bytes) {
  const auto after = session.allocations.upper_bound(reinterpret_cast<void*>(address));
  if (after == session.allocations.begin()) return false;
  const auto& [base, size] = *std::prev(after);
  const size_t at = address - reinterpret_cast<uintptr_t>(base);
  return at <= size && bytes <= size - at;
}

// In words: an access that no tensor and no allocation holds. does: "writes".
struct Unheld {
  const char* kind;
  char text[512];
};

Unheld unheld(const char* does, uintptr_t address, size_t bytes) {
  Unheld u = {"out of bounds", {}};
  const auto say = [&u](const char* format, auto... words) { snprintf(u.text, sizeof u.text, format, words...); };
  // The one that the address lies in is the one that was meant, else the nearest.
  const char* name = nullptr;
  uintptr_t base = 0;
  size_t size = 0, distance = 64 << 20;
  const auto consider = [&](const char* its_name, const void* begin, size_t its_size) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin), end = first + its_size;
    const size_t d = address < first ? first - address : address < end ? 0 : address - end + 1;
    if (d < distance) name = its_name, base = first, size = its_size, distance = d;
  };
  for (const Region& r : session.regions) consider(r.name, r.base, r.bytes);
  for (const auto& [p, n] : session.allocations) consider("memory from cudaMalloc", p, n);
  const size_t at = address - base;
  if (address < kNull)
    u.kind = "null pointer", say("%s %zu bytes through a null pointer (address 0x%zx)", does, bytes, size_t(address));
  else if (name == nullptr)
    say("%s %zu bytes at address 0x%zx, which belongs to no tensor", does, bytes, size_t(address));
  else if (address < base)
    say("%s %zu bytes, %zu bytes before the start of %s", does, bytes, distance, name);
  else if (at <= size && bytes <= size - at)
    say("%s %zu bytes at %s + %zu bytes, between two rows of that view", does, bytes, name, at);
  else
    say("%s %zu bytes at %s + %zu bytes, %zu past its end (it has %zu bytes)", does, bytes, name, at, at + bytes - size, size);
  return u;
}

[[noreturn]] void out_of_bounds(Worker* w, uintptr_t address, size_t bytes, bool write, uintptr_t pc, Site site) {
  for (unsigned i = 0; i < w->threads; ++i)
    if (address - w->thread[i].stack < kStackBytes)
      fail("out of bounds", 700, pc, site, "%s %zu bytes of a local variable of thread %u, which only that thread can see",
           verb(write), bytes, i);
  const Unheld u = unheld(verb(write), address, bytes);
  fail(u.kind, 700, pc, site, "%s", u.text);
}

}  // namespace

__attribute__((noinline)) Variable variable_at(Worker* w, uintptr_t address) {
  for (const Variable& v : w->variables)
    if (address - v.begin < v.bytes) return v;
  Variable v{address, 0, nullptr, false};
#if defined(__GLIBC__)
  ++w->critical;
  Dl_info where = {};
  void* entry = nullptr;
  dladdr1(reinterpret_cast<void*>(address), &where, &entry, RTLD_DL_SYMENT);
  if (const auto* symbol = static_cast<const ElfW(Sym)*>(entry)) {
    v = {reinterpret_cast<uintptr_t>(where.dli_saddr), symbol->st_size, where.dli_sname,
         ELF64_ST_VISIBILITY(symbol->st_other) == STV_PROTECTED};
    w->variables.push_back(v);
  }
  --w->critical;
#endif
  return v;
}

std::string demangled(const char* name) {
  char* const words = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  const std::string copy = words != nullptr ? words : name;
  free(words);
  return copy;
}

uintptr_t begin_of(Worker* w, uint16_t target, uintptr_t address) {
  if (is_tensor(target)) return reinterpret_cast<uintptr_t>(session.regions[target].base);
  if (target == kVariable) return variable_at(w, address).begin;
  return reinterpret_cast<uintptr_t>(std::prev(session.allocations.upper_bound(reinterpret_cast<void*>(address)))->first);
}

// The tensor that these bytes belong to; -1: none.
int region_at(uintptr_t address, size_t bytes) {
  for (size_t i = 0; i < session.regions.size(); ++i) {
    const Region& r = session.regions[i];
    const uint64_t at = address - reinterpret_cast<uintptr_t>(r.base);
    if (at >= r.bytes || bytes > r.bytes - at) continue;
    if (!r.contiguous && (between_rows(r, at) || between_rows(r, at + bytes - 1))) continue;
    return int(i);
  }
  return -1;
}

std::string address_in_words(const Worker* w, uintptr_t address) {
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(w->arena);
  if (offset < kArena) return shared_place(w, w->current->number / kWarp, offset);
  if (const int region = region_at(address, 1); region >= 0) {
    const Region& r = session.regions[region];
    return r.name + (" + " + std::to_string(address - reinterpret_cast<uintptr_t>(r.base))) + " bytes";
  }
  char words[32];
  snprintf(words, sizeof words, "address 0x%zx", size_t(address));
  return words;
}

void misaligned(const char* does, uintptr_t address, size_t bytes, uintptr_t pc, Site site) {
  Worker* w = worker;
  ++w->critical;
  const std::string place = address_in_words(w, address);
  std::string base;
  if (const int region = region_at(address, 1); region >= 0) {
    const Region& r = session.regions[region];
    if (const uintptr_t past = reinterpret_cast<uintptr_t>(r.base) % bytes; past != 0)
      base = " (" + std::string(r.name) + " itself begins " + std::to_string(past) + " bytes past one)";
  }
  --w->critical;
  fail("misaligned", 716, pc, site, "%s %zu bytes at %s, which is no multiple of %zu%s", does, bytes, place.c_str(), bytes, base.c_str());
}

namespace {

// An access to anything but the thread's own stack.
__attribute__((noinline)) void access_beyond_stack(Worker* w, uintptr_t address, size_t bytes, Op op, Access::Kind kind, uintptr_t pc,
                                                   const Site& site, uintptr_t frame) {
  const bool write = writes(op);
  if (kind == Access::Element && (address & (bytes - 1)) != 0) misaligned(verb(write), address, bytes, pc, site);
  Access a{kind, op, kShared, w->order, address, address - reinterpret_cast<uintptr_t>(w->arena), bytes, pc, frame, site};
  if (a.offset < kArena) {
    check_shared(w, a.offset, bytes, write, pc, site);
  } else if (op == Op::LoadMatrix || op == Op::StoreMatrix || op == Op::AsyncCopy) {
    fail("out of bounds", 700, pc, site, "%s %zu bytes outside of shared memory, where %s can't go", verb(write), bytes, site.what);
  } else if (const int found = region_at(address, bytes); found >= 0) {
    a.target = uint16_t(found);
    a.offset = address - reinterpret_cast<uintptr_t>(session.regions[a.target].base);
    if (!write) w->counter[a.target].read += bytes;
    if (write || op == Op::Atomic) w->counter[a.target].written += bytes;
  } else if (allocated(address, bytes)) {
    a.target = kAllocated;
    a.offset = 0;
  } else {
    if (!known_elsewhere(w, address)) out_of_bounds(w, address, bytes, write, pc, site);
    const bool writes_it = write || op == Op::Atomic;
    if (!(writes_it || session.tracing) || !device_variable(w, address, bytes, writes_it, pc, site)) return;
    a.target = kVariable;
    a.offset = 0;
  }
  for (Watcher* t : w->on_memory) t->access(a);
}

// Host code touches memory itself: of the GPU's it can touch none.
__attribute__((noinline)) void host_access(uintptr_t address, size_t bytes, bool write, uintptr_t pc) {
  const int found = region_at(address, 1);
  if (found < 0 && !allocated(address, 1)) return;
  char text[256];
  snprintf(text, sizeof text, "%s %zu bytes of %s, which is the GPU's: host code can't touch it", verb(write), bytes,
           found < 0 ? "memory from cudaMalloc" : session.regions[size_t(found)].name);
  fail_launcher("device memory", text, pc - 1);
}

const Site kNoSite = {};

// Most accesses end here: what a GPU keeps in registers lies on a thread's stack.
__attribute__((always_inline)) inline void access(uintptr_t address, size_t bytes, Op op, Access::Kind kind, uintptr_t pc, const Site& site,
                                                  uintptr_t frame) {
  Worker* w = worker;
  if (w == nullptr) return host_access(address, bytes, writes(op), pc);
  Thread* t = w->current;
  if (t == nullptr) return;
  if (address - t->stack >= kStackBytes) return access_beyond_stack(w, address, bytes, op, kind, pc, site, frame);
  if (address - t->watched < t->watched_bytes) touch_accumulator(w, address, bytes, writes(op), pc);
}

}  // namespace

void check_bounds(size_t offset, size_t bytes, bool write, uintptr_t pc, Site site) {
  const StaticArray array = shared_array(worker, offset);
  const size_t at = offset - array.offset;
  if (at + bytes > array.bytes)
    fail("out of bounds", 700, pc, site, "lets %s %s %zu bytes at %s + %zu bytes, %zu past its end (it has %zu bytes)", site.what,
         write ? "write" : "read", bytes, array.name, at, at + bytes - array.bytes, array.bytes);
}

void begin_async_read(size_t offset, size_t bytes, const Actor& actor, uintptr_t pc, Site site) {
  check_bounds(offset, bytes, false, pc, site);
  for (Watcher* t : worker->on_memory) t->async_read(offset, bytes, actor, pc, site);
}

std::string shared_place(const Worker* w, unsigned warp, size_t offset) {
  size_t begin;
  const std::string name = shared_name(w, w->named[warp], offset, &begin);
  const StaticArray array = shared_array(w, offset);
  size_t at = offset - begin;
  if (offset >= w->dynamic_base || array.shape.dims == 0 || array.shape.item == 0 || at % array.shape.item != 0)
    return at == 0 && array.shape.item == array.bytes ? name : name + " + " + std::to_string(at) + " B";
  size_t element = at / array.shape.item, span = 1;
  std::string indices;
  for (unsigned d = array.shape.dims; d-- > 0; span *= array.shape.extent[d])
    indices = "[" + std::to_string(element / span % array.shape.extent[d]) + "]" + indices;
  return name + indices;
}

static void access_range(const void* p, size_t bytes, Op op, uintptr_t pc, uintptr_t frame) {
  if (bytes == 0) return;
  access(reinterpret_cast<uintptr_t>(p), bytes, op, Access::Range, pc, kNoSite, frame);
}

void check_access(Op op, const void* p, size_t bytes, uintptr_t pc, Site site) {
  if (op == Op::NoAddress)
    for (Watcher* t : worker->on_execution) t->no_address(pc, site);
  else if (bytes > 0)
    access(reinterpret_cast<uintptr_t>(p), bytes, op, Access::Element, pc, site, 0);
}

void count_instruction(Worker* w, uintptr_t pc, const Site& site) {
  for (Watcher* t : w->on_execution) t->instruction(pc, site);
}

void bulk_access(Op op, bool write, const void* p, size_t bytes, uintptr_t pc, Site site) {
  Worker* w = worker;
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const bool sum = op == Op::ReduceTensor || op == Op::ReduceBulk;
  const int found = region_at(address, bytes);
  if (found < 0) {
    if (!allocated(address, bytes)) out_of_bounds(w, address, bytes, write, pc, site);
    return;
  }
  const size_t i = size_t(found);
  if (!write || sum) w->counter[i].read += bytes;
  if (write) w->counter[i].written += bytes;
  const Access a{Access::BulkRow, sum ? Op::Atomic : write ? Op::AsyncCopy : Op::Load, uint16_t(i), kWeak, address,
                 address - reinterpret_cast<uintptr_t>(session.regions[i].base), bytes, pc, 0, site};
  for (Watcher* t : w->on_memory) t->access(a);
}

const char* shared_name(const Worker* w, const std::vector<NamedPlace>& named, size_t offset, size_t* begin) {
  const StaticArray array = shared_array(w, offset);
  *begin = array.offset;
  if (offset < w->dynamic_base) return array.name;
  const char* name = w->dynamic_name != nullptr ? w->dynamic_name : array.name;
  for (const NamedPlace& n : named)
    if (n.offset <= offset && n.offset >= *begin) name = n.name, *begin = n.offset;
  return name;
}

void add_named_place(std::vector<NamedPlace>& named, const char* name, uint32_t offset) {
  for (NamedPlace& n : named) {
    if (n.offset != offset) continue;
    n.name = name;
    return;
  }
  if (named.size() < 64) named.push_back({name, offset});
}

void add_counters(Worker* w) {
  for (size_t i = 0; i < w->counter.size(); ++i) {
    session.counter[i].read += w->counter[i].read;
    session.counter[i].written += w->counter[i].written;
  }
}

bool in_global(const Worker* w, const void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  return address - reinterpret_cast<uintptr_t>(w->arena) >= kArena && address - w->current->stack >= kStackBytes;
}

// Other threads of the block run after some turns of a loop that does nothing but look at a flag.
void spin(const void* flag, uintptr_t atomic) {
  Worker* w = worker;
  for (Watcher* t : w->on_execution) t->polls(flag, atomic);
  w->current->flag = flag;
  if (++w->current->spins % 16 == 0) yield();
}

void strong_access(Op op, const void* p, size_t bytes, unsigned order, uintptr_t pc, Site site) {
  Worker* w = worker;
  w->order = order;
  check_access(op, p, bytes, pc, site);
  w->order = kWeak;
  for (Watcher* t : w->on_execution) t->strong_access(p, order);
}

void read_flag(const void* p, unsigned order) {
  if (session.follows_flags)
    for (Watcher* t : worker->on_execution) t->read_flag(p, order);
}

void before_atomic(const void* p, unsigned bytes, uintptr_t pc, Site site, unsigned order) {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) return;
  spin(p, pc);
  strong_access(Op::Atomic, p, bytes, order | kStrong | kReads | kWrites, pc, site);
  if (!in_global(w, p)) return;
  if (!w->my_turn) wait_for_turn(w);
  read_flag(p, order | kStrong | kReads);
  if (order & kReleases) std::atomic_thread_fence(std::memory_order_release);  // what it acquires, earlier turns have brought
}

void undisturbed(bool on) {
  if (worker != nullptr && worker->current != nullptr) worker->current->undisturbed = on;
}

// Of a volatile variable. What lies on the thread's own stack is nobody's flag.
static bool is_flag(const void* p) {
  Worker* w = worker;
  return w != nullptr && w->current != nullptr && reinterpret_cast<uintptr_t>(p) - w->current->stack >= kStackBytes;
}
static void begin_volatile(const void* p, bool write) {
  if (!write) spin(p, kVolatileFlag);
  worker->order = write ? kVolatile | kWrites : kStrong | kReads;
}
static void end_volatile(const void* p, bool write) {
  Worker* w = worker;
  w->order = kWeak;
  for (Watcher* t : w->on_execution) t->strong_access(p, write ? kWrites : kReads);
}

#define EMU_PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define EMU_ACCESS(n, op, kind) access(reinterpret_cast<uintptr_t>(p), n, Op::op, Access::kind, EMU_PC, kNoSite, EMU_FRAME)

#define EMU_VOLATILE(n, op, write)    \
  const bool flag = is_flag(p);       \
  if (flag) begin_volatile(p, write); \
  EMU_ACCESS(n, op, Element);          \
  if (flag) end_volatile(p, write)

extern "C" {

#define EMU_CALLBACKS(n)                                                             \
  void __tsan_read##n(void* p) { EMU_ACCESS(n, Load, Element); }                     \
  void __tsan_write##n(void* p) { EMU_ACCESS(n, Store, Element); }                   \
  void __tsan_unaligned_read##n(void* p) { EMU_ACCESS(n, Load, Loose); }             \
  void __tsan_unaligned_write##n(void* p) { EMU_ACCESS(n, Store, Loose); }           \
  void __tsan_volatile_read##n(void* p) { EMU_VOLATILE(n, Load, false); }            \
  void __tsan_volatile_write##n(void* p) { EMU_VOLATILE(n, Store, true); }           \
  void __tsan_unaligned_volatile_read##n(void* p) { EMU_ACCESS(n, Load, Loose); }    \
  void __tsan_unaligned_volatile_write##n(void* p) { EMU_ACCESS(n, Store, Loose); }
EMU_CALLBACKS(1)
EMU_CALLBACKS(2)
EMU_CALLBACKS(4)
EMU_CALLBACKS(8)
EMU_CALLBACKS(16)

void __tsan_read_range(void* p, unsigned long n) { access_range(p, n, Op::Load, EMU_PC, EMU_FRAME); }
void __tsan_write_range(void* p, unsigned long n) { access_range(p, n, Op::Store, EMU_PC, EMU_FRAME); }
// What clang calls for memcpy and its kin, and translate.py for either compiler.
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access_range(from, n, Op::Load, EMU_PC, EMU_FRAME);
  access_range(to, n, Op::Store, EMU_PC, EMU_FRAME);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  access_range(from, n, Op::Load, EMU_PC, EMU_FRAME);
  access_range(to, n, Op::Store, EMU_PC, EMU_FRAME);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int byte, size_t n) {
  access_range(to, n, Op::Store, EMU_PC, EMU_FRAME);
  return memset(to, byte, n);
}

}  // extern "C"

// A launcher's cudaMemset or cudaMemcpy has to stay in the tensor or the allocation that it begins in. device: and to begin in one.
static int check_host_access(const char* name, bool write, const void* p, size_t bytes, bool device, uintptr_t pc) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const auto held = [address](size_t n) { return region_at(address, n) >= 0 || allocated(address, n); };
  if (worker != nullptr || bytes == 0 || held(bytes) || (!device && !held(1))) return 0;
  char does[64];
  snprintf(does, sizeof does, "lets %s %s", name, write ? "write" : "read");
  const Unheld u = unheld(does, address, bytes);
  fail_launcher(u.kind, u.text, pc);
  return set_error(1, u.text);  // on another thread than the launcher's
}

// What cudaMemset and cudaMemcpy do for a launcher, or for the thread that calls them.
static void api_access(const void* p, size_t bytes, Op op, uintptr_t pc) {
  if (worker != nullptr) return access_range(p, bytes, op, pc, 0);
  if (op != Op::Store || bytes == 0) return;
  const int found = region_at(reinterpret_cast<uintptr_t>(p), bytes);
  if (found >= 0) session.counter[size_t(found)].by_host = 1;
  for (Tool* t : tools()) t->host_wrote(p, bytes);
}

int set_bytes(const char* name, void* to, int byte, size_t bytes) {
  if (const int error = check_host_access(name, true, to, bytes, true, EMU_PC - 1)) return error;
  api_access(to, bytes, Op::Store, EMU_PC);
  memset(to, byte, bytes);
  return 0;
}

int copy_bytes(const char* name, void* to, const void* from, size_t bytes, int kind) {
  const bool to_device = kind == 1 || kind == 3, from_device = kind == 2 || kind == 3;
  if (const int error = check_host_access(name, false, from, bytes, from_device, EMU_PC - 1)) return error;
  if (const int error = check_host_access(name, true, to, bytes, to_device, EMU_PC - 1)) return error;
  api_access(from, bytes, Op::Load, EMU_PC);
  api_access(to, bytes, Op::Store, EMU_PC);
  memcpy(to, from, bytes);
  return 0;
}

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// ---- -fsanitize=integer-divide-by-zero, for machines on which the division itself raises no signal
void __ubsan_handle_divrem_overflow(const void*, uint64_t, uint64_t) { raise(SIGFPE); }

// ---- -fsanitize=bounds: an index that leaves its array, above all one of a thread's own, whose place on the stack none of
// the callbacks above would hold against anything. What the compilers hand over is laid out as in compiler-rt's
// ubsan_handlers.h, "OutOfBoundsData".

struct ArrayType {
  uint16_t kind, info;              // of an index: its width is 1 << (info >> 1) bits, its lowest bit says signed
  char name[];                      // 'float [8][4]'
};
struct IndexedArray {
  const char* file;
  uint32_t line, column;
  const ArrayType *type, *index;
};

// Is it of the type of a row of some shared array? Beyond such a row lies the next one: that is held against the whole array
// when it is accessed.
static bool may_be_shared_row(const Worker* w, const char* type) {
  for (unsigned i = 0; i < w->arrays; ++i) {
    const ArrayShape& shape = w->array[i].shape;
    std::string row;
    for (unsigned d = shape.dims; d-- > 1;) {
      row = "[" + std::to_string(shape.extent[d]) + "]" + row;
      const char* extents = strchr(type, '[');
      if (extents != nullptr && extents == row + "'") return true;
    }
  }
  return false;
}

void __ubsan_handle_out_of_bounds(const IndexedArray* array, uint64_t index) {
  Worker* w = worker;
  const bool in_kernel = w != nullptr && w->current != nullptr;
  if (in_kernel && may_be_shared_row(w, array->type->name)) return;
  const unsigned unused = 64 - std::min(64u, 1u << (array->index->info >> 1));
  const bool negative = array->index->info & 1;
  const long long signed_index = static_cast<long long>(index << unused) >> unused;
  std::string type(array->type->name + 1, strlen(array->type->name) - 2);
  if (const size_t extent = type.find('['); extent != std::string::npos && extent > 0 && type[extent - 1] != ' ')
    type.insert(extent, " ");  // clang 16 and later say 'float[4]'
  const std::string element = negative ? std::to_string(signed_index) : std::to_string(index);
  const std::string text = "takes element " + element + " of an array of type " + type;
  if (!in_kernel) return fail_launcher("out of bounds", text, EMU_PC);
  fail("out of bounds", 700, EMU_PC, {"", array->file, int(array->line)}, "%s", text.c_str());
}

}  // extern "C"

// What goes by a pointer into a local array is no index, and seen late: when its function returns.
void local_array_overrun(uintptr_t pc) {
  static const char* const kind = "local array overrun";
  static const char* const text = "has written past the end of a local array of the function that ends here";
  if (worker != nullptr && worker->current != nullptr) fail(kind, 700, pc, {}, "%s", text);
  fail_launcher(kind, text, pc);
  abort();
}

}  // namespace emu

// C++ atomics (host code's static variables use them too). Kernels' own go through before_atomic.
#define EMU_ATOMIC_OP(n, T, op)                                                                      \
  extern "C" T __tsan_atomic##n##_fetch_##op(volatile T* p, T v, int) {                              \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), EMU_PC, {"atomic", "", 0}, 0);                          \
    return __atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST);                                              \
  }
#define EMU_ATOMICS(n, T)                                                                            \
  extern "C" T __tsan_atomic##n##_load(const volatile T* p, int) {                                   \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), EMU_PC, {"atomic", "", 0}, 0);                          \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                  \
  extern "C" void __tsan_atomic##n##_store(volatile T* p, T v, int) {                                \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), EMU_PC, {"atomic", "", 0}, 0);                          \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                  \
  extern "C" T __tsan_atomic##n##_exchange(volatile T* p, T v, int) {                                \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), EMU_PC, {"atomic", "", 0}, 0);                          \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                              \
  }                                                                                                  \
  extern "C" int __tsan_atomic##n##_compare_exchange_strong(volatile T* p, T* old, T v, int, int) {  \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), EMU_PC, {"atomic", "", 0}, 0);                          \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                  \
  extern "C" int __tsan_atomic##n##_compare_exchange_weak(volatile T* p, T* old, T v, int a, int b) { \
    return __tsan_atomic##n##_compare_exchange_strong(p, old, v, a, b);                              \
  }                                                                                                  \
  EMU_ATOMIC_OP(n, T, add) EMU_ATOMIC_OP(n, T, sub) EMU_ATOMIC_OP(n, T, and)                         \
  EMU_ATOMIC_OP(n, T, or) EMU_ATOMIC_OP(n, T, xor)
EMU_ATOMICS(8, unsigned char)
EMU_ATOMICS(16, unsigned short)
EMU_ATOMICS(32, unsigned)
EMU_ATOMICS(64, unsigned long)
extern "C" void __tsan_atomic_thread_fence(int) { emu::memory_fence(); }
extern "C" void __tsan_atomic_signal_fence(int) {}
