// Inline PTX, parsed: an asm statement becomes a list of instructions, each a function and the registers it works on.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../include/emulator/runtime.h"

namespace emu::ptx {

struct Frame;
struct Instruction;
using Run = void (*)(Frame&, const Instruction&);
using Ref = int16_t;         // a register of the frame
constexpr Ref kNone = -1;    // no guard

struct Instruction {
  Run run = nullptr;
  Ref guard = kNone;         // of @p: executed if the predicate is true, or
  bool negated = false;      // with @!p, false
  std::vector<Ref> d, s;     // destinations and sources, element by element
  int64_t offset = 0;        // of an address, or what else the instruction has to remember
  unsigned bytes = 0, count = 0;
  Site site = {};            // what: the instruction's name
  std::string opcode;        // as written
};

// Registers: the statement's operands, then what it declares and needs in between, then constants.
struct Program {
  std::vector<Instruction> code;
  std::vector<std::pair<Ref, uint64_t>> constants;
  std::vector<Ref> inputs, outputs;
  unsigned registers = 0;
  std::string error;         // why it can't be run
  const char* kind = "";     // of that finding
  std::string name;          // what `error` is about
};

// One thread's way through a program.
struct Frame {
  uint64_t* reg;
  uintptr_t pc;              // the return address in the kernel
  size_t next;               // the instruction to be executed next
  const Program* program;
  uintptr_t frame;           // of the interpreter: what lies above on the thread's stack is the kernel's
};

inline Site here(const Frame& f, const Instruction& i) { return {i.site.what, i.site.file, i.site.line, f.pc}; }

// ---- values in registers: the low bytes, zeros above
template <class T>
inline T as(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
inline uint64_t to_bits(T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
inline uint64_t get(const Frame& f, Ref r) { return f.reg[r]; }
template <class T>
inline T get(const Frame& f, Ref r) {
  return as<T>(f.reg[r]);
}
template <class T>
inline void put(Frame& f, Ref r, T value) {
  f.reg[r] = to_bits(value);
}

// ---- types
enum class Type : uint8_t { b8, b16, b32, b64, b128, u8, u16, u32, u64, s8, s16, s32, s64, f16, f16x2, bf16, bf16x2, tf32, f32, f64, pred, none };
Type type_named(const std::string&);  // none if there is no such type
unsigned bytes_of(Type);
inline bool is_float(Type t) { return t >= Type::f16 && t <= Type::f64; }
inline bool is_signed(Type t) { return t >= Type::s8 && t <= Type::s64; }

}  // namespace emu::ptx
