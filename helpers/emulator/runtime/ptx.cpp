// Inline PTX: the text of an asm statement is parsed when a thread first comes to it, and interpreted from then on.
// Syntax: PTX ISA, "Syntax"; operands: CUDA, "Inline PTX Assembly".
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "ptx_program.h"

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

// What a register may hold: of a .b32 anything of its size, as the manual has it ("Operand Type Checking").
struct Holds {
  enum Class : uint8_t { Bits, Int, Float, Predicate, Constant, Place } kind;  // Place: the address of an output
  unsigned bytes;
};

struct Statement {
  Program& program;
  Site site;
  std::string text;
  size_t at = 0;
  bool in_brackets = false;  // of an address, whose + and - aren't an expression's
  std::vector<Holds> holds;  // by register
  unsigned operands = 0;
  std::vector<std::unordered_map<std::string, Ref>> scopes;
  std::unordered_map<std::string, size_t> labels;
  std::vector<std::pair<size_t, std::string>> jumps;

  Statement(Program& p, const Ptx& source) : program(p), site{"", source.file, source.line} {
    declare_operands(source.kinds);
    text = without_comments(source.text);
    scopes.emplace_back();
  }

  [[noreturn]] static void refuse(const std::string& why) { throw Refusal{"syntax", why}; }

  // ---- registers

  Ref new_register(Holds h) {
    if (holds.size() >= 2048) refuse("more registers than the emulator has for one asm statement");
    holds.push_back(h);
    program.registers = unsigned(holds.size());
    return Ref(holds.size() - 1);
  }

  Ref constant(uint64_t bits) {
    const Ref r = new_register({Holds::Constant, 8});
    program.constants.push_back({r, bits});
    return r;
  }

  void declare_operands(const char* kinds) {
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

  // ---- characters

  static std::string without_comments(const char* c) {
    std::string out;
    while (*c != 0) {
      if (c[0] == '/' && c[1] == '/') {
        while (*c != 0 && *c != '\n') ++c;
      } else if (c[0] == '/' && c[1] == '*') {
        const char* end = strstr(c + 2, "*/");
        if (end == nullptr) refuse("a comment that is never closed");
        c = end + 2;
        out += ' ';
      } else {
        out += *c++;
      }
    }
    return out;
  }

  char look(size_t ahead = 0) const { return at + ahead < text.size() ? text[at + ahead] : '\0'; }
  std::string rest() const { return at < text.size() ? text.substr(at, 24) : ""; }
  char peek() {
    while (isspace(static_cast<unsigned char>(look()))) ++at;
    return look();
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++at;
    return true;
  }
  void require(char c) {
    if (!accept(c)) refuse(std::string("'") + c + "' is missing before \"" + rest() + "\"");
  }
  static bool in_name(char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }
  std::string name(bool dots) {
    peek();
    const size_t begin = at;
    while (in_name(look()) || (dots && look() == '.')) ++at;
    return text.substr(begin, at - begin);
  }

  // ---- operands

  Ref lookup(const std::string& name) {
    for (size_t i = scopes.size(); i-- > 0;) {
      const auto found = scopes[i].find(name);
      if (found != scopes[i].end()) return found->second;
    }
    return kNone;
  }

  Ref numbered() {  // behind a '%'
    const size_t begin = at;
    while (isdigit(static_cast<unsigned char>(look()))) ++at;
    const unsigned long n = strtoul(text.substr(begin, at - begin).c_str(), nullptr, 10);
    if (n >= operands) refuse("%" + std::to_string(n) + " of " + std::to_string(operands) + " operands");
    return Ref(n);
  }

  Ref special(const std::string& name);

  Operand number() {
    Operand o;
    const size_t begin = at;
    const bool minus = look() == '-';
    if (minus) ++at;
    const char* from = text.c_str() + at;
    char* end = nullptr;
    if (from[0] == '0' && (from[1] == 'f' || from[1] == 'F' || from[1] == 'd' || from[1] == 'D')) {
      const bool twice = from[1] == 'd' || from[1] == 'D';
      const uint64_t bits = strtoull(from + 2, &end, 16);
      if (size_t(end - from) != (twice ? 18 : 10)) refuse("a hexadecimal number of the wrong length");
      o.kind = Operand::Float;
      o.real = twice ? as<double>(bits) : double(as<float>(bits));
    } else {
      o.kind = Operand::Integer;
      // Octal, hexadecimal, 0b binary or decimal; a U at the end.
      const bool binary = from[0] == '0' && (from[1] == 'b' || from[1] == 'B');
      o.integer = int64_t(binary ? strtoull(from + 2, &end, 2) : strtoull(from, &end, 0));
      if (*end == 'U') ++end;
      if (*end == '.' || ((*end == 'e' || *end == 'E') && !binary)) {
        o.kind = Operand::Float;
        o.real = strtod(from, &end);
      }
    }
    at = size_t(end - text.c_str());
    if (minus) o.integer = -o.integer, o.real = -o.real;
    o.text = text.substr(begin, at - begin);
    if (end == from || in_name(look())) refuse("\"" + text.substr(begin, at - begin + 1) + "\" is no number");
    return o;
  }

  // Constant expressions: C's operators on 64-bit integers (PTX ISA, "Constant Expressions").
  int64_t unary() {
    const char c = peek();
    if (c == '(') {
      ++at;
      const int64_t v = expression(0);
      require(')');
      return v;
    }
    if (c == '~' || c == '!' || c == '+' || (c == '-' && !isdigit(static_cast<unsigned char>(look(1))))) {
      ++at;
      const int64_t v = unary();
      return c == '~' ? ~v : c == '!' ? int64_t(v == 0) : c == '-' ? -v : v;
    }
    if (!isdigit(static_cast<unsigned char>(c)) && c != '-') refuse("a number is missing before \"" + rest() + "\"");
    const Operand n = number();
    if (n.kind != Operand::Integer) refuse(n.text + " is no integer");
    return n.integer;
  }
  int64_t expression(int strength, const int64_t* first = nullptr) {
    static const struct {
      const char* sign;
      int strength;
    } binary[] = {{"<<", 4}, {">>", 4}, {"|", 1}, {"^", 2}, {"&", 3}, {"+", 5}, {"-", 5}, {"*", 6}, {"/", 6}, {"%", 6}};
    int64_t v = first != nullptr ? *first : unary();
    for (;;) {
      peek();
      const auto* found = std::find_if(std::begin(binary), std::end(binary),
                                       [&](const auto& b) { return text.compare(at, strlen(b.sign), b.sign) == 0; });
      if (found == std::end(binary) || found->strength <= strength) return v;
      at += strlen(found->sign);
      const uint64_t a = uint64_t(v), b = uint64_t(expression(found->strength));
      switch (found->sign[0]) {
        case '<': v = int64_t(a << (b & 63)); break;
        case '>': v = int64_t(a) >> (b & 63); break;
        case '|': v = int64_t(a | b); break;
        case '^': v = int64_t(a ^ b); break;
        case '&': v = int64_t(a & b); break;
        case '+': v = int64_t(a + b); break;
        case '-': v = int64_t(a - b); break;
        case '*': v = int64_t(a * b); break;
        default:
          if (b == 0) refuse("a constant divided by zero");
          v = found->sign[0] == '/' ? int64_t(a) / int64_t(b) : int64_t(a) % int64_t(b);
      }
    }
  }

  Operand operand() {
    Operand o;
    const char c = peek();
    const size_t begin = at;
    if (c == '!') {
      ++at;
      o = operand();
      o.negated = !o.negated;
    } else if (c == '[') {
      ++at;
      in_brackets = true;
      o = address();
      in_brackets = false;
      if (accept(',')) o.elements.push_back(operand());  // of a tensor
      require(']');
    } else if (c == '{') {
      ++at;
      o.kind = Operand::Vector;
      do o.elements.push_back(operand());
      while (accept(','));
      require('}');
    } else if (c == '%') {
      ++at;
      if (look() == '%') ++at;  // %%laneid: how an asm statement writes one '%'
      o.ref = isdigit(static_cast<unsigned char>(look())) ? numbered() : special(name(true));
    } else if (c == '(' || c == '~') {
      o.kind = Operand::Integer;
      o.integer = expression(0);
    } else if (isdigit(static_cast<unsigned char>(c)) || c == '-') {
      o = number();
      if (o.kind == Operand::Integer && !in_brackets) o.integer = expression(0, &o.integer);
    } else {
      const std::string word = name(false);
      if (word == "_") {
        o.kind = Operand::Sink;
      } else if (word == "WARP_SZ") {
        o.kind = Operand::Integer;
        o.integer = kWarp;
      } else if ((o.ref = lookup(word)) == kNone) {
        o.kind = Operand::Label;
      }
      if (word.empty()) refuse("an operand is missing before \"" + rest() + "\"");
    }
    o.text = text.substr(begin, at - begin);
    return o;
  }

  // Inside of [ ]: a register or number, and what is added to it.
  Operand address() {
    Operand o = operand();
    if (o.kind == Operand::Integer) {
      o.kind = Operand::Address;
      o.ref = constant(uint64_t(o.integer));
      o.integer = 0;
    } else if (o.kind != Operand::Register) {
      refuse("[" + o.text + "] is no address");
    }
    o.kind = Operand::Address;
    while (accept('+')) {  // what is taken away is written +-16
      const Operand more = operand();
      if (more.kind == Operand::Integer)
        o.integer += more.integer;
      else if (more.kind == Operand::Register && o.offset_ref == kNone && holds[size_t(more.ref)].kind == Holds::Constant)
        o.offset_ref = more.ref;
      else
        refuse("to an address only constants can be added");
    }
    return o;
  }

  // ---- declarations and instructions

  void declare() {  // behind ".reg"
    std::string word = name(true);
    const Type type = type_named(word.empty() ? word : word.substr(1));
    if (type == Type::none) refuse(".reg " + word + ": no such type");
    const Holds h{type == Type::pred   ? Holds::Predicate
                  : is_float(type)     ? Holds::Float
                  : type >= Type::u8   ? Holds::Int
                                       : Holds::Bits,
                  bytes_of(type)};
    const bool packed = type == Type::f16x2 || type == Type::bf16x2;
    do {
      if (peek() == '%') ++at;
      const std::string variable = name(false);
      if (variable.empty()) refuse("a .reg declaration without a name");
      unsigned count = 1;
      const bool many = accept('<');
      if (many) {
        count = unsigned(strtoul(name(false).c_str(), nullptr, 10));
        require('>');
      }
      for (unsigned i = 0; i < count; ++i)
        scopes.back()[many ? variable + std::to_string(i) : variable] = new_register(packed ? Holds{Holds::Bits, 4} : h);
    } while (accept(','));
    require(';');
  }

  void emit(Instruction&& i) { program.code.push_back(std::move(i)); }

  void instruction() {
    Instruction out;
    const size_t begin = at;
    if (accept('@')) {
      out.negated = accept('!');
      const Operand guard = operand();
      if (guard.kind != Operand::Register || holds[size_t(guard.ref)].kind != Holds::Predicate)
        refuse("@" + guard.text + ": no predicate of that name");
      out.guard = guard.ref;
      peek();
    }
    const size_t first = at;
    for (;;) {
      if (in_name(look()) || look() == '.') ++at;
      else if (look() == ':' && look(1) == ':') at += 2;
      else break;
    }
    out.opcode = text.substr(first, at - first);
    if (out.opcode.empty()) refuse("an instruction is missing before \"" + rest() + "\"");
    if (out.guard == kNone && peek() == ':') {
      ++at;
      if (!labels.emplace(out.opcode, program.code.size()).second) refuse("the label " + out.opcode + " twice");
      return;
    }
    Decoder decoder{*this, out, {}, {}, {}};
    if (peek() != ';') {
      do {
        decoder.operands.push_back(operand());
        if (accept('|')) {
          decoder.paired = decoder.operands.size() == 1;
          if (!decoder.paired) refuse("'|' where there is no second destination");
          decoder.operands.push_back(operand());
        }
      } while (accept(','));
    }
    if (peek() != ';')
      refuse(at < text.size() ? "\"" + rest() + "\" is in the way" : "the last instruction has no ';'");
    ++at;
    std::string written = text.substr(begin, at - begin);
    for (char& c : written)
      if (c == '\n' || c == '\t') c = ' ';
    program.name = written;  // what an error is about
    decode(decoder);
    emit(std::move(out));
  }

  void decode(Decoder& d);

  void parse() {
    while (peek() != '\0') {
      if (accept(';')) continue;
      if (accept('{')) {
        scopes.emplace_back();
      } else if (accept('}')) {
        if (scopes.size() == 1) refuse("'}' without '{'");
        scopes.pop_back();
      } else if (look() == '.') {
        program.name = text.substr(at, text.find(';', at) - at);
        const std::string directive = name(true);
        if (directive == ".reg")
          declare();
        else if (directive == ".pragma")  // a hint to ptxas
          while (at < text.size() && !accept(';')) ++at;
        else
          throw Refusal{"unsupported", ""};
      } else {
        instruction();
      }
    }
    if (scopes.size() != 1) refuse("'{' without '}'");
    for (const auto& [i, label] : jumps) {
      const auto found = labels.find(label);
      if (found == labels.end()) refuse("bra " + label + ": no such label");
      program.code[i].offset = int64_t(found->second);
    }
  }
};

// ---- special registers

namespace {

enum class Special : uint8_t {
  LaneId, WarpId, NWarpId, SmId, NSmId, Clock, TidX, TidY, TidZ, NTidX, NTidY, NTidZ, CtaX, CtaY, CtaZ, NCtaX, NCtaY, NCtaZ,
  MaskEq, MaskLe, MaskLt, MaskGe, MaskGt, DynamicShared
};
const struct {
  const char* name;
  Special special;
  unsigned bytes;
} kSpecials[] = {
    {"laneid", Special::LaneId, 4},        {"warpid", Special::WarpId, 4},        {"nwarpid", Special::NWarpId, 4},
    {"smid", Special::SmId, 4},            {"nsmid", Special::NSmId, 4},          {"clock", Special::Clock, 4},
    {"clock64", Special::Clock, 8},        {"globaltimer", Special::Clock, 8},    {"globaltimer_lo", Special::Clock, 4},
    {"tid.x", Special::TidX, 4},           {"tid.y", Special::TidY, 4},           {"tid.z", Special::TidZ, 4},
    {"ntid.x", Special::NTidX, 4},         {"ntid.y", Special::NTidY, 4},         {"ntid.z", Special::NTidZ, 4},
    {"ctaid.x", Special::CtaX, 4},         {"ctaid.y", Special::CtaY, 4},         {"ctaid.z", Special::CtaZ, 4},
    {"nctaid.x", Special::NCtaX, 4},       {"nctaid.y", Special::NCtaY, 4},       {"nctaid.z", Special::NCtaZ, 4},
    {"lanemask_eq", Special::MaskEq, 4},   {"lanemask_le", Special::MaskLe, 4},   {"lanemask_lt", Special::MaskLt, 4},
    {"lanemask_ge", Special::MaskGe, 4},   {"lanemask_gt", Special::MaskGt, 4},
    {"dynamic_smem_size", Special::DynamicShared, 4},
};

void read_special(Frame& f, const Instruction& i) {
  const Worker* w = worker;
  const uint64_t tid = thread_index(), ntid = block_extent(), cta = block_index(), ncta = grid_extent();
  const unsigned lane = emu::lane();
  uint64_t v = 0;
  switch (Special(i.count)) {
    case Special::LaneId: v = lane; break;
    case Special::WarpId: v = w->current->number / kWarp; break;
    case Special::NWarpId: v = 64; break;
    case Special::SmId: v = w->block % 132; break;  // of an H200's 132
    case Special::NSmId: v = 132; break;
    case Special::Clock: v = emu::clock(); break;
    case Special::TidX: v = tid & 0xffff; break;
    case Special::TidY: v = tid >> 16 & 0xffff; break;
    case Special::TidZ: v = tid >> 32; break;
    case Special::NTidX: v = ntid & 0xffff; break;
    case Special::NTidY: v = ntid >> 16 & 0xffff; break;
    case Special::NTidZ: v = ntid >> 32; break;
    case Special::CtaX: v = cta & 0xffffffff; break;
    case Special::CtaY: v = cta >> 32 & 0xffff; break;
    case Special::CtaZ: v = cta >> 48; break;
    case Special::NCtaX: v = ncta & 0xffffffff; break;
    case Special::NCtaY: v = ncta >> 32 & 0xffff; break;
    case Special::NCtaZ: v = ncta >> 48; break;
    case Special::MaskEq: v = 1u << lane; break;
    case Special::MaskLe: v = ~0u >> (31 - lane); break;
    case Special::MaskLt: v = (1u << lane) - 1; break;
    case Special::MaskGe: v = ~0u << lane; break;
    case Special::MaskGt: v = ~1u << lane; break;
    case Special::DynamicShared: v = w->dynamic_bytes; break;
  }
  f.reg[i.d[0]] = i.bytes == 4 ? v & 0xffffffff : v;
}

void negate_predicate(Frame& f, const Instruction& i) { put(f, i.d[0], get(f, i.s[0]) == 0); }

void branch(Frame& f, const Instruction& i) {
  if (size_t(i.offset) < f.next) yield();  // a loop may wait for another thread
  f.next = size_t(i.offset);
}

}  // namespace

Ref Statement::special(const std::string& name) {
  for (const auto& s : kSpecials) {
    if (name != s.name) continue;
    Instruction i;
    i.run = read_special;
    i.count = unsigned(s.special);
    i.bytes = s.bytes;
    i.d.push_back(new_register({Holds::Bits, s.bytes}));
    const Ref r = i.d[0];
    emit(std::move(i));
    return r;
  }
  throw Refusal{"unsupported", ""};
}

// ---- decoding

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
  return o.kind == Operand::Register ? statement.holds[size_t(o.ref)].bytes : 0;
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
  if (o.kind != Operand::Register || statement.holds[size_t(o.ref)].kind != Holds::Place)
    refuse(o.text + " must be an output operand of the asm statement, whose text has to name " + out.opcode + " in so many words");
  out.d.push_back(o.ref);
}

void Decoder::immediate(const Operand& o) {
  if (o.kind == Operand::Register ? statement.holds[size_t(o.ref)].kind != Holds::Constant : o.kind != Operand::Integer)
    refuse(o.text + " must be a constant");
  source(o, Type::s32);
}

void Decoder::destination(const Operand& o, Type type, bool wider) {
  if (o.kind == Operand::Sink) {  // into a register that nobody reads
    out.d.push_back(statement.new_register({Holds::Bits, 8}));
    return;
  }
  if (o.kind != Operand::Register || o.negated) refuse(o.text + " can't be written to");
  const Holds& h = statement.holds[size_t(o.ref)];
  if (h.kind == Holds::Constant || (size_t(o.ref) < statement.operands && size_t(o.ref) >= statement.program.outputs.size()))
    refuse(o.text + " is an input and can't be written to");
  check(*this, o, h, type, wider);
  out.d.push_back(o.ref);
}

void Decoder::source(const Operand& o, Type type, bool wider) {
  if (type == Type::pred && o.kind == Operand::Register) return predicate(o);
  switch (o.kind) {
    case Operand::Register: {
      const Holds& h = statement.holds[size_t(o.ref)];
      if (o.negated) refuse(o.text + ": '!' is for predicates");
      if (h.kind != Holds::Constant) check(*this, o, h, type, wider);
      out.s.push_back(o.ref);
      return;
    }
    case Operand::Integer:
      if (type == Type::f32 || type == Type::f64 || type == Type::f16 || type == Type::bf16)
        refuse(o.text + ": a constant of type f32 or f64 is written 0f3f800000, 0d3ff0000000000000 or 1.0");
      out.s.push_back(statement.constant(uint64_t(o.integer)));
      return;
    case Operand::Float:
      if (type == Type::f64 || type == Type::b64)
        out.s.push_back(statement.constant(to_bits(o.real)));
      else if (type == Type::f32 || type == Type::b32)
        out.s.push_back(statement.constant(to_bits(float(o.real))));
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

void Decoder::predicate(const Operand& o) {
  if (o.kind != Operand::Register || statement.holds[size_t(o.ref)].kind != Holds::Predicate)
    refuse(o.text + " is no predicate");
  if (!o.negated) {
    out.s.push_back(o.ref);
    return;
  }
  Instruction i;
  i.run = negate_predicate;
  i.s.push_back(o.ref);
  i.d.push_back(statement.new_register({Holds::Predicate, 1}));
  out.s.push_back(i.d[0]);
  statement.emit(std::move(i));
}

static void sum_address(Frame& f, const Instruction& i) {
  uint64_t at = get(f, i.s[0]) + uint64_t(i.offset);
  if (i.s.size() > 1) at += get(f, i.s[1]);
  f.reg[i.d[0]] = i.bytes == 4 ? at & 0xffffffff : at;
}

void Decoder::address(size_t n, bool shared) {
  const Operand& o = operands[n];
  if (o.kind != Operand::Address || !o.elements.empty()) refuse(o.text + " must be an address in [ ]");
  const Holds& h = statement.holds[size_t(o.ref)];
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
  i.d.push_back(statement.new_register({Holds::Bits, h.bytes}));
  out.s.push_back(i.d[0]);
  statement.emit(std::move(i));
}

void Decoder::refuse(const std::string& why) const { throw Refusal{"syntax", why}; }
void Decoder::unknown() const { throw Refusal{"unsupported", ""}; }

static bool decode_control(Decoder& d) {
  if (d.base == "bra") {
    d.take("uni");
    d.expect(1);
    if (d.operands[0].kind != Operand::Label) d.refuse("bra takes a label");
    d.out.run = branch;
    d.statement.jumps.push_back({d.statement.program.code.size(), d.operands[0].text});
    return true;
  }
  return false;
}

void Statement::decode(Decoder& d) {
  const std::string& opcode = d.out.opcode;
  for (size_t begin = 0; begin <= opcode.size();) {
    const size_t end = std::min(opcode.find('.', begin), opcode.size());
    d.qualifiers.push_back(opcode.substr(begin, end - begin));
    begin = end + 1;
  }
  d.base = d.qualifiers[0];
  d.qualifiers.erase(d.qualifiers.begin());
  // What reports and counts call it: mma.sync, ldmatrix, cp.async, bar.sync.
  std::string name = d.base;
  const bool matrix = name.size() > 6 && name.compare(name.size() - 6, 6, "matrix") == 0;
  if (!d.qualifiers.empty() && !matrix && (d.qualifiers[0] == "sync" || d.qualifiers[0] == "async" || d.qualifiers[0] == "warp"))
    name += "." + d.qualifiers[0];
  if ((name == "wgmma" || name == "setmaxnreg") && !d.qualifiers.empty()) name += "." + d.qualifiers[0];
  if (name == "cp.async" && d.qualifiers.size() == 2) name += "." + d.qualifiers[1];  // .commit_group and its kin
  if (name == "bar.warp") name += ".sync";
  d.out.site = {strdup(name.c_str()), site.file, site.line};  // kept as long as the statement, which is for good
  if (!(decode_control(d) || decode_async(d) || decode_matrix(d) || decode_warpgroup(d) || decode_memory(d) || decode_warp(d) || decode_arithmetic(d)))
    throw Refusal{"unsupported", ""};
  if (!d.qualifiers.empty()) throw Refusal{"unsupported", ""};
}

// ---- running

namespace {

std::mutex parsing;

const Program& program_of(Ptx* statement) {
  void* known = __atomic_load_n(&statement->program, __ATOMIC_ACQUIRE);
  if (known != nullptr) return *static_cast<Program*>(known);
  Worker* w = worker;
  ++w->critical;
  Program* program = new Program;
  {
    std::lock_guard<std::mutex> hold(parsing);
    if (statement->program == nullptr) {
      try {
        Statement s(*program, *statement);
        s.parse();
        program->name.clear();
      } catch (const Refusal& r) {
        program->kind = r.kind;
        program->error = r.why;
        if (program->name.empty()) program->name = statement->text;
      }
      __atomic_store_n(&statement->program, program, __ATOMIC_RELEASE);
    } else {
      delete program;
    }
    program = static_cast<Program*>(statement->program);
  }
  --w->critical;
  return *program;
}

[[noreturn]] void refused(const Program& p, uintptr_t pc, Site site) {
  if (strcmp(p.kind, "syntax") == 0)
    fail("inline PTX", 801, pc, site, "executes inline PTX: %s, which is no PTX: %s", p.name.c_str(), p.error.c_str());
  fail("unsupported", 801, pc, site, "executes inline PTX: %s, which the emulator doesn't know", p.name.c_str());
}

}  // namespace

}  // namespace emu::ptx

namespace emu {

template <int n>
__attribute__((noinline)) Outputs<n> interpret(Ptx* statement, ...) {
  using namespace ptx;
  const uintptr_t pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (worker == nullptr || worker->current == nullptr) {
    fprintf(stderr, "%s:%d: host code executes inline PTX\n", statement->file, statement->line);
    abort();
  }
  const Program& p = program_of(statement);
  if (p.kind[0] != 0) refused(p, pc, {"inline PTX", statement->file, statement->line});
  uint64_t* reg = static_cast<uint64_t*>(__builtin_alloca((p.registers + 1) * sizeof(uint64_t)));
  memset(reg, 0xff, p.registers * sizeof(uint64_t));  // NaN of every format: no program is right by the luck of zeros
  va_list values;
  va_start(values, statement);
  for (const Ref r : p.inputs) reg[r] = va_arg(values, uint64_t);
  va_end(values);
  for (const auto& [r, bits] : p.constants) reg[r] = bits;
  Frame f{reg, pc, 0, &p, reinterpret_cast<uintptr_t>(__builtin_frame_address(0))};
  for (const size_t end = p.code.size(); f.next < end;) {
    const Instruction& i = p.code[f.next++];
    if (i.guard != kNone && (reg[i.guard] != 0) == i.negated) continue;
    i.run(f, i);
  }
  Outputs<n> out;
  out.bits[0] = 0;
  for (size_t i = 0; i < p.outputs.size(); ++i) out.bits[i] = reg[p.outputs[i]];
  return out;
}
template Outputs<1> interpret(Ptx*, ...);
template Outputs<4> interpret(Ptx*, ...);
template Outputs<16> interpret(Ptx*, ...);
template Outputs<64> interpret(Ptx*, ...);
template Outputs<256> interpret(Ptx*, ...);

}  // namespace emu
