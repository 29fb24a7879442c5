// Parses an asm statement. Syntax: PTX ISA, "Syntax"; operands: CUDA, "Inline PTX Assembly".
#include "ptx_parser.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

#include "device.h"
#include "ptx_special.h"

namespace emu::ptx {

namespace {

struct Statement {
  Assembly assembly;
  const std::vector<Family>& families;
  Site site;
  std::string text;
  size_t at = 0;
  bool in_brackets = false;  // of an address, whose + and - aren't an expression's
  std::vector<std::unordered_map<std::string, Ref>> scopes;
  std::unordered_map<std::string, size_t> labels;

  Statement(Program& p, const Ptx& source, const std::vector<Family>& f) : assembly{p}, families(f), site{"", source.file, source.line} {
    assembly.declare_operands(source.kinds);
    text = without_comments(source.text);
    scopes.emplace_back();
  }

  [[noreturn]] static void refuse(const std::string& why) { throw Refusal{"syntax", why}; }

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
    if (n >= assembly.operands) refuse("%" + std::to_string(n) + " of " + std::to_string(assembly.operands) + " operands");
    return Ref(n);
  }

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
      o.ref = isdigit(static_cast<unsigned char>(look())) ? numbered() : special_register(assembly, name(true));
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
      o.ref = assembly.constant(uint64_t(o.integer));
      o.integer = 0;
    } else if (o.kind != Operand::Register) {
      refuse("[" + o.text + "] is no address");
    }
    o.kind = Operand::Address;
    while (accept('+')) {  // what is taken away is written +-16
      const Operand more = operand();
      if (more.kind == Operand::Integer)
        o.integer += more.integer;
      else if (more.kind == Operand::Register && o.offset_ref == kNone && assembly.held(more).kind == Holds::Constant)
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
        scopes.back()[many ? variable + std::to_string(i) : variable] = assembly.new_register(packed ? Holds{Holds::Bits, 4} : h);
    } while (accept(','));
    require(';');
  }

  void instruction() {
    Instruction out;
    const size_t begin = at;
    if (accept('@')) {
      out.negated = accept('!');
      const Operand guard = operand();
      if (guard.kind != Operand::Register || assembly.held(guard).kind != Holds::Predicate)
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
      if (!labels.emplace(out.opcode, assembly.program.code.size()).second) refuse("the label " + out.opcode + " twice");
      return;
    }
    Decoder decoder{assembly, out, {}, {}, {}};
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
    assembly.program.name = written;  // what an error is about
    decode(decoder);
    assembly.emit(std::move(out));
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
        assembly.program.name = text.substr(at, text.find(';', at) - at);
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
    for (const auto& [i, label] : assembly.jumps) {
      const auto found = labels.find(label);
      if (found == labels.end()) refuse("bra " + label + ": no such label");
      assembly.program.code[i].offset = int64_t(found->second);
    }
  }
};

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
  const bool known = std::any_of(families.begin(), families.end(), [&](Family family) { return family(d); });
  if (!known || !d.qualifiers.empty()) throw Refusal{"unsupported", ""};
}

}  // namespace

void parse(const Ptx& source, const std::vector<Family>& families, Program& program) {
  Statement(program, source, families).parse();
  program.name.clear();
}

}  // namespace emu::ptx
