// What translate.py writes in place of an asm statement:
//   asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
// becomes
//   do {
//     static ::emu::Ptx emu_ptx = {"ex2.approx.ftz.f32 %0, %1;", "=ff", __FILE__, __LINE__, nullptr};
//     auto& emu_0 = y;
//     const auto emu_out = ::emu::interpret<::emu::room(1)>(&emu_ptx, ::emu::input<'f'>(x));
//     ::emu::output<'f'>(emu_0, emu_out.bits[0]);
//   } while (0)
// Operands go by value, so that the variables of the kernel stay where the compiler keeps them. Only the outputs of
// wgmma.mma_async go by address, as place<'f'>(emu_0): the products are written when the kernel waits for them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "runtime.h"

namespace emu {

// An asm statement; the runtime parses it when a thread first comes to it.
struct Ptx {
  const char* text;   // its operands are %0, %1, ...
  const char* kinds;  // their constraints, in order: "=f" of an output, "+f" of one that is read too, "f" of an input,
                      // "@f" of an output given by its address
  const char* file;
  int line;
  void* program;      // what the runtime made of it
};

template <int n>
struct Outputs {
  uint64_t bits[n];
};
// The inputs ("+" outputs among them) follow as uint64_t, in the order of `kinds`. Defined for the sizes of room().
template <int n>
Outputs<n> interpret(Ptx* statement, ...);
constexpr int room(int outputs) {
  int n = 1;
  while (n < outputs) n *= 4;
  return n;
}

template <char constraint, class T>
constexpr void check_operand() {
  constexpr bool integer = std::is_integral<T>::value || std::is_enum<T>::value;
  static_assert(constraint != 'h' || (integer && sizeof(T) == 2), "the asm constraint 'h' takes a 16-bit integer");
  static_assert(constraint != 'r' || (integer && sizeof(T) == 4), "the asm constraint 'r' takes a 32-bit integer");
  static_assert(constraint != 'l' || ((integer || std::is_pointer<T>::value) && sizeof(T) == 8),
                "the asm constraint 'l' takes a 64-bit integer or a pointer");
  static_assert(constraint != 'f' || std::is_same<T, float>::value, "the asm constraint 'f' takes a float");
  static_assert(constraint != 'd' || std::is_same<T, double>::value, "the asm constraint 'd' takes a double");
  static_assert(constraint != 'n' || integer, "the asm constraint 'n' takes an integer constant");
}

template <char constraint, class T>
inline __attribute__((always_inline)) uint64_t input(T value) {
  check_operand<constraint, T>();
  if constexpr (constraint == 'n') return static_cast<uint64_t>(value);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}

template <char constraint, class T>
inline __attribute__((always_inline)) uint64_t place(T& variable) {
  check_operand<constraint, T>();
  return reinterpret_cast<uint64_t>(&variable);
}

template <char constraint, class T>
inline __attribute__((always_inline)) void output(T& variable, uint64_t bits) {
  using Value = typename std::remove_volatile<T>::type;
  check_operand<constraint, Value>();
  Value value;
  __builtin_memcpy(&value, &bits, sizeof value);
  variable = value;
}

// ---- the same copies as cp.async makes, for <cuda_pipeline.h>
void async_copy(void* shared, const void* global, size_t bytes, size_t source_bytes, Site);
void async_commit();
void async_wait(unsigned groups);  // until at most so many groups of this thread are under way

}  // namespace emu
