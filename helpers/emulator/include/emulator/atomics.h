// Atomics (CUDA C++ Programming Guide, "Atomic Functions"). A block's threads take turns, and blocks are ordered by
// before_atomic: so a plain read, change and write is one indivisible step.
#pragma once

namespace emu {
// Not traced: before_atomic has checked and counted the access.
template <class T, class F>
__attribute__((no_sanitize("thread"), noinline)) T atomic_update(T* p, Site site, F change) {
  before_atomic(p, sizeof(T), reinterpret_cast<uintptr_t>(__builtin_return_address(0)), site);
  undisturbed(true);  // `change` is traced
  T old;
  __builtin_memcpy(&old, p, sizeof old);
  const T now = change(old);
  __builtin_memcpy(p, &now, sizeof now);  // no assignment, which a class has as a function that is traced, too
  undisturbed(false);
  return old;
}
}  // namespace emu

#define EMU_ATOMIC(name, T, expression)                                                   \
  inline T name(T* p, T v, EMU_HERE) {                                                    \
    return emu::atomic_update(p, EMU_SITE(#name), [v]([[maybe_unused]] T old) -> T { return expression; }); \
  }                                                                                       \
  inline T name##_block(T* p, T v, EMU_HERE) { return name(p, v, emu_file, emu_line); }    \
  inline T name##_system(T* p, T v, EMU_HERE) { return name(p, v, emu_file, emu_line); }
#define EMU_ATOMIC_INTEGER(T)                      \
  EMU_ATOMIC(atomicAdd, T, static_cast<T>(old + v))             \
  EMU_ATOMIC(atomicExch, T, v)                     \
  EMU_ATOMIC(atomicMin, T, v < old ? v : old)      \
  EMU_ATOMIC(atomicMax, T, v > old ? v : old)      \
  EMU_ATOMIC(atomicAnd, T, old & v)                \
  EMU_ATOMIC(atomicOr, T, old | v)                 \
  EMU_ATOMIC(atomicXor, T, old ^ v)
EMU_ATOMIC_INTEGER(int)
EMU_ATOMIC_INTEGER(unsigned)
EMU_ATOMIC_INTEGER(unsigned long long)
EMU_ATOMIC(atomicAdd, float, old + v)
EMU_ATOMIC(atomicAdd, double, old + v)
EMU_ATOMIC(atomicExch, float, v)
EMU_ATOMIC(atomicMin, long long, v < old ? v : old)
EMU_ATOMIC(atomicMax, long long, v > old ? v : old)
EMU_ATOMIC(atomicSub, int, old - v)
EMU_ATOMIC(atomicSub, unsigned, old - v)
EMU_ATOMIC(atomicInc, unsigned, old >= v ? 0 : old + 1)
EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
#undef EMU_ATOMIC_INTEGER

// Hopper's own, which add each member by itself.
#define EMU_NO_VECTOR __attribute__((unavailable("the emulator has no atomicAdd of a vector: add its members one by one")))
EMU_NO_VECTOR float2 atomicAdd(float2*, float2);
EMU_NO_VECTOR float4 atomicAdd(float4*, float4);
#undef EMU_NO_VECTOR

template <class T>
inline T atomicCAS(T* p, std::decay_t<T> compare, std::decay_t<T> v, EMU_HERE) {  // the pointer says the type
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "atomicCAS takes 2, 4 or 8 bytes");
  return emu::atomic_update(p, EMU_SITE("atomicCAS"), [=](T old) { return old == compare ? v : old; });
}
