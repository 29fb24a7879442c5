// Inline PTX, parsed: an asm statement becomes a list of instructions, each a function and the registers it works on.
#pragma once
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../include/emulator/ptx.h"
#include "../include/emulator/rounding.h"
#include "runtime.h"

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

// ---- what a statement's text is made of
struct Operand {
  enum Kind : uint8_t { Register, Integer, Float, Address, Vector, Label, Sink } kind = Register;
  Ref ref = kNone;                // Register, and Address: the base
  Ref offset_ref = kNone;         // Address: another register to be added
  int64_t integer = 0;            // Integer; Address: the offset
  double real = 0;                // Float, or
  bool hexadecimal = false;       // its bits, in `integer`
  bool negated = false;           // !p
  std::vector<Operand> elements;  // Vector; Address: coordinates behind it; a pair d|p comes as two operands
  std::string text;
};

// Why a statement can't be run. kind: "unsupported", or "syntax" where ptxas would refuse it too.
struct Refusal {
  const char* kind;
  std::string why;
};

struct Statement;

// One instruction while it is decoded: its qualifiers, taken one by one, and its operands.
struct Decoder {
  Statement& statement;
  Instruction& out;
  std::string base;
  std::vector<std::string> qualifiers;
  std::vector<Operand> operands;
  bool paired = false;            // the first operand was d|p

  bool take(const std::string& qualifier);  // also with ".shared::cta" taken for ".shared"
  bool take_any(std::initializer_list<const char*> qualifiers);
  void drop_prefix(const char* prefix);     // hints without meaning here: .L2::128B
  Type take_type();                         // Refusal if the next qualifier is no type
  unsigned register_bytes(const Operand&) const;
  void expect(size_t operands);             // that many; Refusal otherwise
  void expect(size_t least, size_t most);
  void destination(const Operand&, Type, bool wider = false);  // appended to out.d; wider: larger registers may hold it
  void source(const Operand&, Type, bool wider = false);       // appended to out.s
  void destination(size_t i, Type t, bool wider = false) { destination(operands[i], t, wider); }
  void source(size_t i, Type t, bool wider = false) { source(operands[i], t, wider); }
  void elements(size_t i, Type, bool destination, bool wider = false);  // {a, b}: one after the other; out.count how many
  void immediate(const Operand&);           // a source that is a constant
  void place(const Operand&);               // appended to out.d: the address of an output that is written later
  void predicate(const Operand&);           // a source, !p computed first
  void address(size_t i, bool shared);      // appended to out.s as a 64-bit address; shared: 32 bits are enough
  [[noreturn]] void refuse(const std::string& why) const;       // ptxas would too
  [[noreturn]] void unknown() const;        // the instruction as it is written
};

// The decoders know the instruction by its base name; false: not one of theirs.
bool decode_arithmetic(Decoder&);
bool decode_async(Decoder&);
bool decode_memory(Decoder&);
bool decode_matrix(Decoder&);
bool decode_warpgroup(Decoder&);
bool decode_warp(Decoder&);

}  // namespace emu::ptx

namespace emu {

// async_copy.cpp: of the calling thread
void issue_copy(void* shared, const void* global, size_t bytes, size_t source_bytes, bool past_L1, uintptr_t pc, Site);
void commit_copies();
void wait_copies(uint64_t groups);  // until at most so many committed groups are under way

}  // namespace emu
