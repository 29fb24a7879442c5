// Every load and store of a kernel calls here first: gcc and clang put the calls in for -fsanitize=thread, and these
// functions stand in for ThreadSanitizer's library. An access that would go wrong is reported and never happens.
#include <cstring>

#include "runtime.h"

namespace emu {

namespace {

constexpr size_t kNull = 64 << 10;  // addresses below are taken for null plus an offset

// The shared array that the offset lies in, or behind.
StaticArray shared_array(const Worker* w, size_t offset) {
  if (offset >= kStaticArena) return {nullptr, "dynamic shared memory", kStaticArena, w->dynamic_bytes};
  StaticArray nearest = {nullptr, "shared memory", 0, 0};
  for (unsigned i = 0; i < w->arrays && w->array[i].offset <= offset; ++i) nearest = w->array[i];
  return nearest;
}

const char* verb(bool write) { return write ? "writes" : "reads"; }

void shared_access(Worker* w, size_t offset, size_t bytes, bool write, uintptr_t pc, Site site) {
  const StaticArray array = shared_array(w, offset);
  const size_t at = offset - array.offset;
  if (at + bytes > array.bytes)
    fail("out of bounds", 700, pc, site, "%s %zu bytes at %s + %zu bytes, %zu past its end (it has %zu bytes)",
         verb(write), bytes, array.name, at, at + bytes - array.bytes, array.bytes);
  if (write)
    memset(w->written + offset, 1, bytes);
  else if (memchr(w->written + offset, 0, bytes) != nullptr)
    fail("uninitialised shared memory", 719, pc, site, "reads %zu bytes at %s + %zu bytes, which nobody has written", bytes,
         array.name, at);
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

// The kernel's constants and __device__ variables, its parameters, and what its launcher got from cudaMalloc.
bool known_elsewhere(Worker* w, uintptr_t address, size_t bytes) {
  const Run& run = *w->run;
  if (address - run.module_begin < run.module_end - run.module_begin) return true;
  if (address - reinterpret_cast<uintptr_t>(run.launch->arguments) < run.launch->argument_bytes) return true;
  for (const auto& [base, size] : session.allocations)  // constant while blocks run
    if (address - reinterpret_cast<uintptr_t>(base) + bytes <= size) return true;
  return false;
}

[[noreturn]] void out_of_bounds(Worker* w, uintptr_t address, size_t bytes, bool write, uintptr_t pc, Site site) {
  const char* kind = "out of bounds";
  if (address < kNull)
    fail("null pointer", 700, pc, site, "%s %zu bytes through a null pointer (address 0x%zx)", verb(write), bytes,
         size_t(address));
  for (unsigned i = 0; i < w->threads; ++i)
    if (address - w->thread[i].stack < kStackBytes)
      fail(kind, 700, pc, site, "%s %zu bytes of a local variable of thread %u, which only that thread can see",
           verb(write), bytes, i);
  // The nearest tensor is the one that was meant.
  const Region* nearest = nullptr;
  uint64_t distance = 64 << 20;
  for (const Region& r : session.regions) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(r.base), end = begin + r.bytes;
    const uint64_t d = address < begin ? begin - address : address + bytes > end ? address + bytes - end : 0;
    if (d < distance) nearest = &r, distance = d;
  }
  if (nearest == nullptr)
    fail(kind, 700, pc, site, "%s %zu bytes at address 0x%zx, which belongs to no tensor", verb(write), bytes, size_t(address));
  const uintptr_t base = reinterpret_cast<uintptr_t>(nearest->base);
  if (address < base)
    fail(kind, 700, pc, site, "%s %zu bytes, %zu bytes before the start of %s", verb(write), bytes, size_t(distance),
         nearest->name);
  if (distance == 0)
    fail(kind, 700, pc, site, "%s %zu bytes at %s + %zu bytes, between two rows of that view", verb(write), bytes,
         nearest->name, size_t(address - base));
  fail(kind, 700, pc, site, "%s %zu bytes at %s + %zu bytes, %zu past its end (it has %zu bytes)", verb(write), bytes,
       nearest->name, size_t(address - base), size_t(distance), size_t(nearest->bytes));
}

inline void access(uintptr_t address, size_t bytes, bool write, bool aligned, uintptr_t pc, Site site) {
  Worker* w = worker;
  if (w == nullptr) return;  // host code
  Thread* t = w->current;
  if (t == nullptr || address - t->stack < kStackBytes) return;
  if (aligned && (address & (bytes - 1)) != 0)
    fail("misaligned", 716, pc, site, "%s %zu bytes at address 0x%zx, which is no multiple of %zu", verb(write), bytes,
         size_t(address), bytes);
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(w->arena);
  if (offset < kArena) return shared_access(w, offset, bytes, write, pc, site);
  for (size_t i = 0; i < session.regions.size(); ++i) {
    const Region& r = session.regions[i];
    const uint64_t at = address - reinterpret_cast<uintptr_t>(r.base);
    if (at >= r.bytes || at + bytes > r.bytes) continue;
    if (!r.contiguous && (between_rows(r, at) || between_rows(r, at + bytes - 1))) continue;
    (write ? w->counter[i].written : w->counter[i].read) += bytes;
    return;
  }
  if (!known_elsewhere(w, address, bytes)) out_of_bounds(w, address, bytes, write, pc, site);
}

}  // namespace

void check_access(const void* p, size_t bytes, bool write, bool aligned, uintptr_t pc, Site site) {
  if (bytes > 0) access(reinterpret_cast<uintptr_t>(p), bytes, write, aligned, pc, site);
}

void add_counters(Worker* w) {
  for (size_t i = 0; i < w->counter.size(); ++i) {
    session.counter[i].read += w->counter[i].read;
    session.counter[i].written += w->counter[i].written;
  }
}

// Other threads of the block run after some turns of a loop that does nothing but look at a variable.
static void spin() {
  Worker* w = worker;
  if (w != nullptr && w->current != nullptr && ++w->current->spins % 16 == 0) yield();
}

void before_atomic(const void* p, unsigned bytes, Site site) {
  Worker* w = worker;
  if (w == nullptr || w->current == nullptr) return;
  spin();
  check_access(p, bytes, false, true, 0, site);
  check_access(p, bytes, true, true, 0, site);
  const uintptr_t offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(w->arena);
  if (offset >= kArena && !w->my_turn) wait_for_turn(w);
}

#define EMU_PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))

extern "C" {

#define EMU_CALLBACKS(n)                                                                                            \
  void __tsan_read##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, false, true, EMU_PC, {}); }              \
  void __tsan_write##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, true, true, EMU_PC, {}); }              \
  void __tsan_unaligned_read##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, false, false, EMU_PC, {}); }   \
  void __tsan_unaligned_write##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, true, false, EMU_PC, {}); }   \
  void __tsan_volatile_read##n(void* p) {                                                                           \
    spin();                                                                                                         \
    access(reinterpret_cast<uintptr_t>(p), n, false, true, EMU_PC, {});                                             \
  }                                                                                                                 \
  void __tsan_volatile_write##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, true, true, EMU_PC, {}); }     \
  void __tsan_unaligned_volatile_read##n(void* p) { __tsan_unaligned_read##n(p); }                                  \
  void __tsan_unaligned_volatile_write##n(void* p) { __tsan_unaligned_write##n(p); }
EMU_CALLBACKS(1)
EMU_CALLBACKS(2)
EMU_CALLBACKS(4)
EMU_CALLBACKS(8)
EMU_CALLBACKS(16)

void __tsan_read_range(void* p, unsigned long n) { check_access(p, n, false, false, EMU_PC, {}); }
void __tsan_write_range(void* p, unsigned long n) { check_access(p, n, true, false, EMU_PC, {}); }
// What clang calls for memcpy and its kin, and translate.py for either compiler.
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_access(from, n, false, false, EMU_PC, {});
  check_access(to, n, true, false, EMU_PC, {});
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_access(from, n, false, false, EMU_PC, {});
  check_access(to, n, true, false, EMU_PC, {});
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int byte, size_t n) {
  check_access(to, n, true, false, EMU_PC, {});
  return memset(to, byte, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"

}  // namespace emu

// C++ atomics (host code's static variables use them too). Kernels' own go through before_atomic.
#define EMU_ATOMIC_OP(n, T, op)                                                                      \
  extern "C" T __tsan_atomic##n##_fetch_##op(volatile T* p, T v, int) {                              \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), {"atomic", "", 0});                             \
    return __atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST);                                              \
  }
#define EMU_ATOMICS(n, T)                                                                            \
  extern "C" T __tsan_atomic##n##_load(const volatile T* p, int) {                                   \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), {"atomic", "", 0});                             \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                                  \
  extern "C" void __tsan_atomic##n##_store(volatile T* p, T v, int) {                                \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), {"atomic", "", 0});                             \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                  \
  extern "C" T __tsan_atomic##n##_exchange(volatile T* p, T v, int) {                                \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), {"atomic", "", 0});                             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                              \
  }                                                                                                  \
  extern "C" int __tsan_atomic##n##_compare_exchange_strong(volatile T* p, T* old, T v, int, int) {  \
    emu::before_atomic(const_cast<T*>(p), sizeof(T), {"atomic", "", 0});                             \
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
extern "C" void __tsan_atomic_thread_fence(int) {}
extern "C" void __tsan_atomic_signal_fence(int) {}
