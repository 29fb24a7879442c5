// Instructions being decoded: what the parser hands to the families of instructions, and they fill.
#pragma once
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "ptx_program.h"

namespace emu::ptx {

// What a statement's text is made of.
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

// What a register may hold: of a .b32 anything of its size, as the manual has it ("Operand Type Checking").
struct Holds {
  enum Class : uint8_t { Bits, Int, Float, Predicate, Constant, Place } kind;  // Place: the address of an output
  unsigned bytes;
};

// A program while its statement is being parsed.
struct Assembly {
  Program& program;
  std::vector<Holds> holds = {};      // by register
  unsigned operands = 0;              // of the statement: the first registers
  std::vector<std::pair<size_t, std::string>> jumps = {};  // instructions that branch, and the labels they branch to

  void declare_operands(const char* kinds);  // Ptx::kinds
  Ref new_register(Holds);
  Ref constant(uint64_t bits);
  void emit(Instruction&& i) { program.code.push_back(std::move(i)); }
  const Holds& held(const Operand& o) const { return holds[size_t(o.ref)]; }
};

// One instruction while it is decoded: its qualifiers, taken one by one, and its operands. What a family of instructions
// works with; the parser knows a family only as a Family.
struct Decoder {
  Assembly& assembly;
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
  [[noreturn]] void refuse(const std::string& why) const;       // ptxas would too, unless a qualifier is left that nobody knows
  [[noreturn]] void unknown() const;        // the instruction as it is written
};

// A family knows its instructions by their base names; false: it is not one of them.
using Family = bool (*)(Decoder&);

}  // namespace emu::ptx
