// Decodes operands: registers, constants, addresses and predicates of the types that an instruction takes. PTX ISA, "Operand
// Type Checking".
#include "ptx_decoder.h"

#include <cstring>

namespace emu::ptx {

namespace {

const struct {
  const char* name;
  Type type;
  unsigned bytes;
} kTypes[] = {
    {"b8", Type::b8, 1},     {"b16", Type::b16, 2},   {"b32", Type::b32, 4},       {"b64", Type::b64, 8},
    {"b128", Type::b128, 16}, {"u8", Type::u8, 1},     {"u16", Type::u16, 2},       {"u32", Type::u32, 4},
    {"u64", Type::u64, 8},   {"s8", Type::s8, 1},     {"s16", Type::s16, 2},       {"s32", Type::s32, 4},
    {"s64", Type::s64, 8},   {"f16", Type::f16, 2},   {"f16x2", Type::f16x2, 4},   {"bf16", Type::bf16, 2},
    {"bf16x2", Type::bf16x2, 4}, {"tf32", Type::tf32, 4}, {"f32", Type::f32, 4},   {"f64", Type::f64, 8},
    {"pred", Type::pred, 1},
};

}  // namespace

Type type_named(const std::string& name) {
  for (const auto& t : kTypes)
    if (name == t.name) return t.type;
  return Type::none;
}

unsigned bytes_of(Type type) {
  for (const auto& t : kTypes)
    if (type == t.type) return t.bytes;
  return 0;
}

Ref Assembly::new_register(Holds h) {
  if (holds.size() >= 2048) throw Refusal{"syntax", "more registers than the emulator has for one asm statement"};
  holds.push_back(h);
  program.registers = unsigned(holds.size());
  return Ref(holds.size() - 1);
}

Ref Assembly::constant(uint64_t bits) {
  const Ref r = new_register({Holds::Constant, 8});
  program.constants.push_back({r, bits});
  return r;
}

void Assembly::declare_operands(const char* kinds) {
  std::vector<Ref> also_read;
  for (const char* k = kinds; *k != 0; ++k) {
    const bool output = *k == '=' || *k == '+', read = *k == '+', late = *k == '@';
    if (output || late) ++k;
    const Holds h = late        ? Holds{Holds::Place, 4}
                    : *k == 'f'   ? Holds{Holds::Float, 4}
                    : *k == 'd' ? Holds{Holds::Float, 8}
                    : *k == 'n' ? Holds{Holds::Constant, 8}
                                : Holds{Holds::Bits, *k == 'h' ? 2u : *k == 'r' ? 4u : 8u};
    const Ref r = new_register(h);
    if (output) program.outputs.push_back(r);
    if (read || !output) program.inputs.push_back(r);
    ++operands;
  }
}

// ---- qualifiers and operands

bool Decoder::take(const std::string& qualifier) {
  for (size_t i = 0; i < qualifiers.size(); ++i) {
    if (qualifiers[i] != qualifier) continue;
    qualifiers.erase(qualifiers.begin() + long(i));
    return true;
  }
  return qualifier == "shared" && take("shared::cta");
}

bool Decoder::take_any(std::initializer_list<const char*> names) {
  bool any = false;
  for (const char* n : names) any = take(n) || any;
  return any;
}

void Decoder::drop_prefix(const char* prefix) {
  for (size_t i = 0; i < qualifiers.size();)
    if (qualifiers[i].compare(0, strlen(prefix), prefix) == 0)
      qualifiers.erase(qualifiers.begin() + long(i));
    else
      ++i;
}

Type Decoder::take_type() {
  for (size_t i = 0; i < qualifiers.size(); ++i) {
    const Type t = type_named(qualifiers[i]);
    if (t == Type::none) continue;
    qualifiers.erase(qualifiers.begin() + long(i));
    return t;
  }
  refuse(out.opcode + " names no type");
}

unsigned Decoder::register_bytes(const Operand& o) const {
  return o.kind == Operand::Register ? assembly.held(o).bytes : 0;
}

void Decoder::expect(size_t n) { expect(n, n); }

void Decoder::expect(size_t least, size_t most) {
  if (operands.size() < least || operands.size() > most)
    refuse(out.opcode + " takes " + std::to_string(least) + (most > least ? " to " + std::to_string(most) : "") +
           " operands, not " + std::to_string(operands.size()));
}

static void check(const Decoder& d, const Operand& o, const Holds& h, Type type, bool wider) {
  const unsigned bytes = bytes_of(type);
  const bool predicate = type == Type::pred;
  if (h.kind == Holds::Place) d.unknown();  // wgmma's alone
  bool right = predicate == (h.kind == Holds::Predicate) && (wider ? h.bytes >= bytes : h.bytes == bytes);
  if (!wider && h.kind == Holds::Float)
    right = right && (type == Type::b16 || type == Type::b32 || type == Type::b64 || (is_float(type) && type != Type::f16x2 && type != Type::bf16x2));
  if (!wider && h.kind == Holds::Int) right = right && (type < Type::f16);
  if (!right)
    d.refuse(o.text + " has not the type that " + d.out.opcode + " takes there");
}

void Decoder::place(const Operand& o) {
  if (o.kind != Operand::Register || assembly.held(o).kind != Holds::Place)
    refuse(o.text + " must be an output operand of the asm statement, whose text has to name " + out.opcode + " in so many words");
  out.d.push_back(o.ref);
}

void Decoder::immediate(const Operand& o) {
  if (o.kind == Operand::Register ? assembly.held(o).kind != Holds::Constant : o.kind != Operand::Integer)
    refuse(o.text + " must be a constant");
  source(o, Type::s32);
}

void Decoder::destination(const Operand& o, Type type, bool wider) {
  if (o.kind == Operand::Sink) {  // into a register that nobody reads
    out.d.push_back(assembly.new_register({Holds::Bits, 8}));
    return;
  }
  if (o.kind != Operand::Register || o.negated) refuse(o.text + " can't be written to");
  const Holds& h = assembly.held(o);
  if (h.kind == Holds::Constant || (size_t(o.ref) < assembly.operands && size_t(o.ref) >= assembly.program.outputs.size()))
    refuse(o.text + " is an input and can't be written to");
  check(*this, o, h, type, wider);
  out.d.push_back(o.ref);
}

void Decoder::source(const Operand& o, Type type, bool wider) {
  if (type == Type::pred && o.kind == Operand::Register) return predicate(o);
  switch (o.kind) {
    case Operand::Register: {
      const Holds& h = assembly.held(o);
      if (o.negated) refuse(o.text + ": '!' is for predicates");
      if (h.kind != Holds::Constant) check(*this, o, h, type, wider);
      out.s.push_back(o.ref);
      return;
    }
    case Operand::Integer:
      if (type == Type::f32 || type == Type::f64 || type == Type::f16 || type == Type::bf16)
        refuse(o.text + ": a constant of type f32 or f64 is written 0f3f800000, 0d3ff0000000000000 or 1.0");
      out.s.push_back(assembly.constant(uint64_t(o.integer)));
      return;
    case Operand::Float:
      if (type == Type::f64 || type == Type::b64)
        out.s.push_back(assembly.constant(to_bits(o.real)));
      else if (type == Type::f32 || type == Type::b32)
        out.s.push_back(assembly.constant(to_bits(float(o.real))));
      else
        refuse(o.text + " is no constant of the type that " + out.opcode + " takes there");
      return;
    default: refuse(o.text + " can't be read there");
  }
}

void Decoder::elements(size_t i, Type type, bool destinations, bool wider) {
  const Operand& o = operands[i];
  const auto one = [&](const Operand& e) { destinations ? destination(e, type, wider) : source(e, type, wider); };
  out.count = 1;
  if (o.kind != Operand::Vector) return one(o);
  out.count = unsigned(o.elements.size());
  for (const Operand& e : o.elements) one(e);
}

static void negate_predicate(Frame& f, const Instruction& i) { put(f, i.d[0], get(f, i.s[0]) == 0); }

void Decoder::predicate(const Operand& o) {
  if (o.kind != Operand::Register || assembly.held(o).kind != Holds::Predicate)
    refuse(o.text + " is no predicate");
  if (!o.negated) {
    out.s.push_back(o.ref);
    return;
  }
  Instruction i;
  i.run = negate_predicate;
  i.s.push_back(o.ref);
  i.d.push_back(assembly.new_register({Holds::Predicate, 1}));
  out.s.push_back(i.d[0]);
  assembly.emit(std::move(i));
}

static void sum_address(Frame& f, const Instruction& i) {
  uint64_t at = get(f, i.s[0]) + uint64_t(i.offset);
  if (i.s.size() > 1) at += get(f, i.s[1]);
  f.reg[i.d[0]] = i.bytes == 4 ? at & 0xffffffff : at;
}

void Decoder::address(size_t n, bool shared) {
  const Operand& o = operands[n];
  if (o.kind != Operand::Address || !o.elements.empty()) refuse(o.text + " must be an address in [ ]");
  const Holds& h = assembly.held(o);
  if (h.kind == Holds::Float || h.kind == Holds::Predicate || (h.bytes != 8 && !(shared && h.bytes == 4)))
    refuse(o.text + (shared ? ": an address in shared memory has 32 or 64 bits" : ": an address has 64 bits here"));
  if (o.integer == 0 && o.offset_ref == kNone) {
    out.s.push_back(o.ref);
    return;
  }
  Instruction i;
  i.run = sum_address;
  i.bytes = h.bytes;
  i.offset = o.integer;
  i.s.push_back(o.ref);
  if (o.offset_ref != kNone) i.s.push_back(o.offset_ref);
  i.d.push_back(assembly.new_register({Holds::Bits, h.bytes}));
  out.s.push_back(i.d[0]);
  assembly.emit(std::move(i));
}

void Decoder::refuse(const std::string& why) const { throw Refusal{qualifiers.empty() ? "syntax" : "unsupported", why}; }
void Decoder::unknown() const { throw Refusal{"unsupported", ""}; }

}  // namespace emu::ptx
