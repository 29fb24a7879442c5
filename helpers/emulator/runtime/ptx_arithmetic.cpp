// Arithmetic, logic, comparison and conversion. PTX ISA, "Integer Arithmetic", "Floating Point", "Half Precision
// Floating Point", "Comparison and Selection", "Logic and Shift" and "Data Movement and Conversion Instructions".
// The approximations (ex2.approx and its kin) are computed in double and rounded once: a GPU's differ in the last bits.
#include <cmath>
#include <type_traits>

#include "../include/emulator/rounding.h"
#include "ptx_families.h"

namespace emu::ptx {

namespace {

// ---- 16-bit floats and pairs of them, as registers hold them

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float x) : bits(half_bits(x)) {}
  operator float() const { return half_value(bits); }
};
struct Brain {
  uint16_t bits;
  Brain() = default;
  explicit Brain(float x) : bits(bfloat16_bits(x)) {}
  operator float() const { return bfloat16_value(bits); }
};
template <class T>
struct Pair {
  T x, y;
};

template <class T>
constexpr bool is_real = std::is_floating_point<T>::value || std::is_same<T, Half>::value || std::is_same<T, Brain>::value;
template <class T>
using Wrapping = typename std::make_unsigned<T>::type;  // C++ leaves signed overflow open, PTX wraps around

// .ftz: subnormal numbers become zeros of their sign.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline Half flush(Half x) { return x.bits &= (x.bits & 0x7c00) == 0 ? 0x8000 : 0xffff, x; }
inline Brain flush(Brain x) { return x.bits &= (x.bits & 0x7f80) == 0 ? 0x8000 : 0xffff, x; }
template <class T>
T flush(T x) { return x; }

// ---- operations on one element

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point<T>::value) return a + b;
    else if constexpr (is_real<T>) return T(float(a) + float(b));
    else return T(Wrapping<T>(a) + Wrapping<T>(b));
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point<T>::value) return a - b;
    else if constexpr (is_real<T>) return T(float(a) - float(b));
    else return T(Wrapping<T>(a) - Wrapping<T>(b));
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point<T>::value) return a * b;
    else if constexpr (is_real<T>) return T(float(a) * float(b));
    else return T(uint64_t(a) * uint64_t(b));
  }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) return a;
    else if constexpr (std::is_signed<T>::value) return T(static_cast<__int128>(a) * b >> 8 * sizeof(T));
    else return T(static_cast<unsigned __int128>(a) * b >> 8 * sizeof(T));
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) return T(a / b);
    else return b == 0 ? T(-1) : std::is_signed<T>::value && b == T(-1) ? T(Wrapping<T>(0) - Wrapping<T>(a)) : T(a / b);
  }
};
// div.approx and __fdividef: there is no reciprocal of what is larger than 2^126.
struct DivApprox {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_same<T, float>::value) return std::fabs(b) > 0x1p126f ? a * std::copysign(0.0f, b) : a / b;
    else return Div()(a, b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) return a;
    else return b == 0 ? T(-1) : std::is_signed<T>::value && b == T(-1) ? T(0) : T(a % b);  // by 0: as an H200 has it
  }
};
// Of a number and a NaN the number; -0 is less than +0.
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) {
      if (a != a || b != b) return a != a ? b : a;
      if (a == b) return std::signbit(float(a)) ? a : b;
    }
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (is_real<T>) {
      if (a != a || b != b) return a != a ? b : a;
      if (a == b) return std::signbit(float(a)) ? b : a;
    }
    return a < b ? b : a;
  }
};
struct MinNan {
  template <class T>
  T operator()(T a, T b) const { return a != a ? a : b != b ? b : Min()(a, b); }
};
struct MaxNan {
  template <class T>
  T operator()(T a, T b) const { return a != a ? a : b != b ? b : Max()(a, b); }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    if constexpr (std::is_floating_point<T>::value) return std::fma(a, b, c);
    else if constexpr (is_real<T>) return T(fma_to_odd(a, b, c));
    else return T(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point<T>::value) return -a;
    else if constexpr (is_real<T>) return a.bits ^= 0x8000, a;
    else return T(Wrapping<T>(0) - Wrapping<T>(a));
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point<T>::value) return std::fabs(a);
    else if constexpr (is_real<T>) return a.bits &= 0x7fff, a;
    else return a < T(0) ? Neg()(a) : a;
  }
};

template <class T>
T round_to(double x) {
  if constexpr (std::is_same<T, Half>::value || std::is_same<T, Brain>::value) return T(to_odd(x));
  else return T(x);
}
#define EMU_REAL(Name, expression)          \
  struct Name {                             \
    template <class T>                      \
    T operator()(T a) const {               \
      const double x = double(float(a));    \
      return round_to<T>(expression);       \
    }                                       \
  };
EMU_REAL(Ex2, std::exp2(x))
EMU_REAL(Lg2, std::log2(x))
EMU_REAL(Rcp, 1.0 / x)
EMU_REAL(Sqrt, std::sqrt(x))
EMU_REAL(Rsqrt, 1.0 / std::sqrt(x))
EMU_REAL(Sin, std::sin(x))
EMU_REAL(Cos, std::cos(x))
EMU_REAL(Tanh, std::tanh(x))
#undef EMU_REAL

struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };
struct Not {
  template <class T>
  T operator()(T a) const {
    if constexpr (is_real<T>) return a;
    else return T(~a);
  }
};
// Shifts by more than the size give what shifting one by one would.
struct Shl {
  template <class T>
  T operator()(T a, uint32_t n) const { return n < 8 * sizeof(T) ? T(Wrapping<T>(a) << n) : T(0); }
};
struct Shr {
  template <class T>
  T operator()(T a, uint32_t n) const { return T(a >> (n < 8 * sizeof(T) ? n : 8 * sizeof(T) - 1) >> (n < 8 * sizeof(T) ? 0 : 1)); }
};

// ---- instructions of one, two and three operands, elements of pairs each by itself

// Smaller than 2^-126 once it is rounded to 24 digits: .ftz flushes that, where float would round it to 2^-126.
bool tiny(double x) { return std::fabs(x) < 0x1p-126 - 0x1p-151; }

template <bool ftz, class Op, class T, class... Rest>
T apply(T a, Rest... rest) {
  if constexpr (!ftz) return Op()(a, rest...);
  const T result = flush(Op()(flush(a), flush(rest)...));
  if constexpr (std::is_same<T, float>::value)
    if (std::fabs(result) == 0x1p-126f && tiny(Op()(double(flush(a)), double(flush(rest))...)))
      return std::copysign(0.0f, result);
  return result;
}
template <bool ftz, class Op, class T, class... Rest>
Pair<T> apply(Pair<T> a, Rest... rest) {
  return {apply<ftz, Op>(a.x, rest.x...), apply<ftz, Op>(a.y, rest.y...)};
}

template <class T>
T clamp01(T v) {
  if constexpr (std::is_same<T, float>::value) return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f;  // NaN gives 0
  else return v;
}
template <class T, class Op, bool ftz>
void unary(Frame& f, const Instruction& i) {
  put(f, i.d[0], apply<ftz, Op>(get<T>(f, i.s[0])));
}
template <class T, class Op, bool ftz>
void binary(Frame& f, const Instruction& i) {
  put(f, i.d[0], apply<ftz, Op>(get<T>(f, i.s[0]), get<T>(f, i.s[1])));
}
template <class T, class Op, bool ftz>
void ternary(Frame& f, const Instruction& i) {
  put(f, i.d[0], apply<ftz, Op>(get<T>(f, i.s[0]), get<T>(f, i.s[1]), get<T>(f, i.s[2])));
}
template <class T>
void saturate(Frame& f, const Instruction& i) {
  put(f, i.d[0], clamp01(get<T>(f, i.d[0])));
}
template <class T, class Op>
void shift(Frame& f, const Instruction& i) {
  put(f, i.d[0], Op()(get<T>(f, i.s[0]), get<uint32_t>(f, i.s[1])));
}

#define EMU_BY_TYPE(kind)                                                           \
  template <class Op>                                                               \
  Run kind##_of(Type t, bool ftz, bool integers, bool reals) {                      \
    if (integers) switch (t) {                                                      \
        case Type::b16: case Type::u16: return kind<uint16_t, Op, false>;           \
        case Type::b32: case Type::u32: return kind<uint32_t, Op, false>;           \
        case Type::b64: case Type::u64: return kind<uint64_t, Op, false>;           \
        case Type::s16: return kind<int16_t, Op, false>;                            \
        case Type::s32: return kind<int32_t, Op, false>;                            \
        case Type::s64: return kind<int64_t, Op, false>;                            \
        default: break;                                                             \
      }                                                                             \
    if (reals) switch (t) {                                                         \
        case Type::f16: return ftz ? kind<Half, Op, true> : kind<Half, Op, false>;  \
        case Type::bf16: return ftz ? kind<Brain, Op, true> : kind<Brain, Op, false>; \
        case Type::f16x2: return ftz ? kind<Pair<Half>, Op, true> : kind<Pair<Half>, Op, false>; \
        case Type::bf16x2: return ftz ? kind<Pair<Brain>, Op, true> : kind<Pair<Brain>, Op, false>; \
        case Type::f32: return ftz ? kind<float, Op, true> : kind<float, Op, false>; \
        case Type::f64: return kind<double, Op, false>;                             \
        default: break;                                                             \
      }                                                                             \
    return nullptr;                                                                 \
  }
EMU_BY_TYPE(unary)
EMU_BY_TYPE(binary)
EMU_BY_TYPE(ternary)
#undef EMU_BY_TYPE

bool any_float(Type t) { return is_float(t); }

// Bits only: and, or, xor, not.
template <class Op>
Run bits2(Type t) {
  switch (t) {
    case Type::pred: return binary<uint8_t, Op, false>;
    case Type::b16: return binary<uint16_t, Op, false>;
    case Type::b32: return binary<uint32_t, Op, false>;
    case Type::b64: return binary<uint64_t, Op, false>;
    default: return nullptr;
  }
}

void decode_simple(Decoder& d, Run (*choose)(Type, bool, bool, bool), size_t sources, bool integers, bool reals) {
  const bool ftz = d.take("ftz"), saturated = d.take("sat");
  d.take("rn");
  const Type t = d.take_type();
  d.out.run = choose(t, ftz, integers, reals);
  if (d.out.run == nullptr || (saturated && t != Type::f32) || (ftz && (!is_float(t) || t == Type::f64))) d.unknown();
  d.expect(1 + sources);
  d.destination(0, t);
  for (size_t i = 1; i <= sources; ++i) d.source(i, t);
  if (!saturated) return;
  Instruction then = d.out;  // computed here, saturated by what follows
  d.assembly.emit(std::move(d.out));
  d.out = std::move(then);
  d.out.run = saturate<float>;
}

template <class T>
void multiply_wide(Frame& f, const Instruction& i) {
  using Wide = std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>;
  const uint64_t product = uint64_t(Wide(get<T>(f, i.s[0])) * Wide(get<T>(f, i.s[1])));
  const uint64_t sum = product + (i.s.size() > 2 ? get(f, i.s[2]) : 0);
  f.reg[i.d[0]] = sizeof(T) == 2 ? sum & 0xffffffff : sum;
}
template <class T>
void multiply_high_add(Frame& f, const Instruction& i) {
  put(f, i.d[0], Add()(MulHigh()(get<T>(f, i.s[0]), get<T>(f, i.s[1])), get<T>(f, i.s[2])));
}

// mul and mad of integers: .lo, .hi or .wide.
void decode_product(Decoder& d, bool add) {
  const bool low = d.take("lo"), high = d.take("hi"), wide = d.take("wide");
  if (!low && !high && !wide) return decode_simple(d, add ? ternary_of<Fma> : binary_of<Mul>, add ? 3 : 2, false, true);
  const Type t = d.take_type();
  if (any_float(t)) d.unknown();
  if (low) d.out.run = add ? ternary_of<Fma>(t, false, true, false) : binary_of<Mul>(t, false, true, false);
  else if (high && !add) d.out.run = binary_of<MulHigh>(t, false, true, false);
  Type to = t;
  switch (t) {
    case Type::u16: if (wide) d.out.run = multiply_wide<uint16_t>, to = Type::u32; break;
    case Type::s16: if (wide) d.out.run = multiply_wide<int16_t>, to = Type::s32; break;
    case Type::u32:
      if (wide) d.out.run = multiply_wide<uint32_t>, to = Type::u64;
      if (high && add) d.out.run = multiply_high_add<uint32_t>;
      break;
    case Type::s32:
      if (wide) d.out.run = multiply_wide<int32_t>, to = Type::s64;
      if (high && add) d.out.run = multiply_high_add<int32_t>;
      break;
    default: break;
  }
  if (d.out.run == nullptr || (wide && to == t)) d.unknown();
  d.expect(add ? 4 : 3);
  d.destination(0, to);
  d.source(1, t);
  d.source(2, t);
  if (add) d.source(3, to);
}

// ---- bits

void permute(Frame& f, const Instruction& i) {
  const uint64_t bytes = uint64_t(get<uint32_t>(f, i.s[1])) << 32 | get<uint32_t>(f, i.s[0]);
  const uint32_t selector = get<uint32_t>(f, i.s[2]);
  uint32_t r = 0;
  for (int b = 0; b < 4; ++b) {
    const uint32_t s = selector >> 4 * b & 0xf;
    uint32_t byte = uint32_t(bytes >> 8 * (s & 7)) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, copied
    r |= byte << 8 * b;
  }
  put(f, i.d[0], r);
}

void any_logic(Frame& f, const Instruction& i) {
  const uint32_t a = get<uint32_t>(f, i.s[0]), b = get<uint32_t>(f, i.s[1]), c = get<uint32_t>(f, i.s[2]);
  const uint32_t table = get<uint32_t>(f, i.s[3]);
  uint32_t r = 0;
  for (unsigned k = 0; k < 8; ++k)
    if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  put(f, i.d[0], r);
}

template <bool left, bool wrap>
void funnel(Frame& f, const Instruction& i) {
  const uint64_t both = uint64_t(get<uint32_t>(f, i.s[1])) << 32 | get<uint32_t>(f, i.s[0]);
  const uint32_t n = get<uint32_t>(f, i.s[2]), by = wrap ? n & 31 : n > 32 ? 32 : n;
  put(f, i.d[0], uint32_t(left ? both << by >> 32 : both >> by));
}

template <class T>
void extract(Frame& f, const Instruction& i) {
  constexpr unsigned size = 8 * sizeof(T);
  const uint64_t a = uint64_t(int64_t(get<T>(f, i.s[0])));
  const unsigned position = get<uint32_t>(f, i.s[1]) & 0xff, length = get<uint32_t>(f, i.s[2]) & 0xff;
  const bool negative = std::is_signed<T>::value && length > 0 && a >> std::min(position + length - 1, size - 1) & 1;
  uint64_t r = negative ? ~uint64_t(0) : 0;
  for (unsigned k = 0; k < length && k < size && position + k < size; ++k)
    r = (r & ~(uint64_t(1) << k)) | (a >> (position + k) & 1) << k;
  put(f, i.d[0], T(r));
}
template <class T>
void insert(Frame& f, const Instruction& i) {
  constexpr unsigned size = 8 * sizeof(T);
  const uint64_t a = get(f, i.s[0]);
  uint64_t r = get(f, i.s[1]);
  const unsigned position = get<uint32_t>(f, i.s[2]) & 0xff, length = get<uint32_t>(f, i.s[3]) & 0xff;
  for (unsigned k = 0; k < length && position + k < size; ++k)
    r = (r & ~(uint64_t(1) << (position + k))) | (a >> k & 1) << (position + k);
  put(f, i.d[0], T(r));
}

template <class T>
void count_ones(Frame& f, const Instruction& i) { put(f, i.d[0], uint32_t(__builtin_popcountll(get<T>(f, i.s[0])))); }
template <class T>
void leading_zeros(Frame& f, const Instruction& i) {
  const T a = get<T>(f, i.s[0]);
  put(f, i.d[0], uint32_t(a == 0 ? 8 * sizeof(T) : __builtin_clzll(a) - (64 - 8 * sizeof(T))));
}
template <class T>
void reverse_bits(Frame& f, const Instruction& i) {
  const T a = get<T>(f, i.s[0]);
  T r = 0;
  for (unsigned k = 0; k < 8 * sizeof(T); ++k) r = T(r << 1 | (a >> k & 1));
  put(f, i.d[0], r);
}

// ---- moves: a value, or the parts of one: mov.b32 %0, {lo, hi}

void move(Frame& f, const Instruction& i) {
  uint64_t bits = 0;
  const size_t part = i.bytes / i.s.size(), to = i.bytes / i.d.size();
  for (size_t k = 0; k < i.s.size(); ++k)
    bits |= (part == 8 ? get(f, i.s[k]) : get(f, i.s[k]) & ((uint64_t(1) << 8 * part) - 1)) << 8 * part * k;
  for (size_t k = 0; k < i.d.size(); ++k)
    f.reg[i.d[k]] = to == 8 ? bits : bits >> 8 * to * k & ((uint64_t(1) << 8 * to) - 1);
}

void decode_move(Decoder& d) {
  const Type t = d.take_type();
  d.expect(2);
  d.out.run = move;
  d.out.bytes = bytes_of(t);
  if (t == Type::b128 || t == Type::b8 || t == Type::u8 || t == Type::s8) d.unknown();
  const auto part = [&](const Operand& o) {
    if (o.kind != Operand::Vector) return t;
    const size_t n = o.elements.size();
    if (n == 2) return t == Type::b32 ? Type::b16 : t == Type::b64 ? Type::b32 : Type::none;
    return n == 4 && t == Type::b64 ? Type::b16 : Type::none;
  };
  const Type to = part(d.operands[0]), from = part(d.operands[1]);
  if (to == Type::none || from == Type::none) d.refuse("the parts don't make up a " + d.out.opcode);
  d.elements(0, to, true);
  d.elements(1, from, false);
}

// ---- conversions

enum class Rounding : uint8_t { None, Nearest, Zero, Down, Up, NearestAway };

struct Conversion {  // packed into Instruction::offset
  Type to, from;
  Rounding rounding;
  bool integral, saturated, ftz, relu;
};

double real_value(uint64_t bits, Type t) {
  switch (t) {
    case Type::f16: return half_value(as<uint16_t>(bits));
    case Type::bf16: return bfloat16_value(as<uint16_t>(bits));
    case Type::f32: return as<float>(bits);
    default: return as<double>(bits);
  }
}

double round_integral(double x, Rounding r) {
  switch (r) {
    case Rounding::Nearest: return std::nearbyint(x);
    case Rounding::Zero: return std::trunc(x);
    case Rounding::Down: return std::floor(x);
    case Rounding::Up: return std::ceil(x);
    default: return x;
  }
}

// `exact` rounded in any direction: `nearest` is what it is to nearest, `back` that in the type of `exact`.
template <class Real, class Exact>
Real directed(Real nearest, Exact back, Exact exact, Rounding r) {
  if (back == exact || exact != exact || r == Rounding::Nearest || r == Rounding::None) return nearest;
  const bool up = r == Rounding::Up || (r == Rounding::Zero && exact < 0);
  if (up) return back < exact ? std::nextafter(nearest, Real(INFINITY)) : nearest;
  return back > exact ? std::nextafter(nearest, -Real(INFINITY)) : nearest;
}

template <class Real>
Real from_integer(__int128 v, Rounding r) {
  return directed(Real(v), __int128(Real(v)), v, r);
}
float to_float(double x, Rounding r) { return directed(float(x), double(float(x)), x, r); }

// To the 16-bit formats: to nearest, or towards zero.
uint16_t to_half(double x, Rounding r) {
  const uint16_t h = half_bits(to_odd(x));
  if (r == Rounding::Zero && x == x && std::fabs(double(half_value(h))) > std::fabs(x)) return uint16_t(h - 1);
  return h;
}
uint16_t to_bfloat16(double x, Rounding r) {
  const uint16_t b = bfloat16_bits(to_odd(x));
  if (r == Rounding::Zero && x == x && std::fabs(double(bfloat16_value(b))) > std::fabs(x)) return uint16_t(b - 1);
  return b;
}

struct Range {
  __int128 low, high;
};
Range range_of(Type t) {
  const unsigned n = 8 * bytes_of(t);
  const __int128 one = 1;
  return is_signed(t) ? Range{-(one << (n - 1)), (one << (n - 1)) - 1} : Range{0, (one << n) - 1};
}

__int128 integer_value(uint64_t bits, Type t) {
  switch (t) {
    case Type::s8: return as<int8_t>(bits);
    case Type::s16: return as<int16_t>(bits);
    case Type::s32: return as<int32_t>(bits);
    case Type::s64: return as<int64_t>(bits);
    case Type::u8: case Type::b8: return as<uint8_t>(bits);
    case Type::u16: case Type::b16: return as<uint16_t>(bits);
    case Type::u32: case Type::b32: return as<uint32_t>(bits);
    default: return bits;
  }
}

uint64_t converted(uint64_t bits, const Conversion& c) {
  uint64_t out;
  if (!is_float(c.from) && !is_float(c.to)) {
    __int128 v = integer_value(bits, c.from);
    const Range r = range_of(c.to);
    if (c.saturated) v = v < r.low ? r.low : v > r.high ? r.high : v;
    out = uint64_t(v);
  } else if (!is_float(c.to)) {  // beyond the range comes its end; NaN gives 0, where f64 or 64 bits take part the highest bit alone
    double x = real_value(bits, c.from);
    if (c.ftz && c.from == Type::f32) x = flush(float(x));
    const Range r = range_of(c.to);
    x = round_integral(x, c.rounding);
    const unsigned size = bytes_of(c.to);
    const __int128 of_nan = c.from == Type::f64 || size == 8 ? __int128(1) << (8 * size - 1) : 0;
    const __int128 v = x != x ? of_nan : x <= double(r.low) ? r.low : x >= double(r.high) ? r.high : __int128(x);
    out = uint64_t(v);
  } else {
    if (!is_float(c.from) && (c.to == Type::f32 || c.to == Type::f64)) {
      const __int128 v = integer_value(bits, c.from);
      if (c.to == Type::f64) return to_bits(from_integer<double>(v, c.rounding));
      if (!c.saturated) return to_bits(from_integer<float>(v, c.rounding));
    }
    double x = is_float(c.from) ? real_value(bits, c.from) : double(integer_value(bits, c.from));
    if (c.ftz && c.from == Type::f32) x = flush(float(x));
    if (c.integral) x = round_integral(x, c.rounding);
    if (c.saturated) x = x > 0 ? (x < 1 ? x : 1.0) : 0.0;
    if (c.relu) x = x > 0 || x != x ? x : 0.0;
    switch (c.to) {
      case Type::f16: return to_half(x, c.integral ? Rounding::Nearest : c.rounding);
      case Type::bf16: return to_bfloat16(x, c.integral ? Rounding::Nearest : c.rounding);
      case Type::f32: {
        const float f = to_float(x, c.integral ? Rounding::Nearest : c.rounding);
        return to_bits(c.ftz && tiny(x) ? std::copysign(0.0f, f) : f);
      }
      case Type::tf32: {  // 10 bits of fraction: towards zero, or to nearest with halves away from zero or to even
        uint32_t b = as<uint32_t>(to_bits(float(x)));
        if (x != x) return c.rounding == Rounding::NearestAway ? as<uint32_t>(bits) & 0xffffe000 : 0x7fffe000;
        if ((b & 0x7f800000) == 0x7f800000) return b;
        if (c.rounding == Rounding::NearestAway) b += 0x1000;
        if (c.rounding == Rounding::Nearest) b += 0xfff + (b >> 13 & 1);
        return b & 0xffffe000;
      }
      default: return to_bits(x);
    }
  }
  const unsigned n = 8 * bytes_of(c.to);
  return n == 64 ? out : out & ((uint64_t(1) << n) - 1);
}

void convert(Frame& f, const Instruction& i) {
  const Conversion c = as<Conversion>(uint64_t(i.offset));
  uint64_t out = converted(get(f, i.s[0]), c);
  // Into a register that is larger: sign-extended if the destination's type has a sign.
  if (is_signed(c.to) && i.bytes > bytes_of(c.to)) {
    out = uint64_t(int64_t(integer_value(out, c.to)));
    if (i.bytes < 8) out &= (uint64_t(1) << 8 * i.bytes) - 1;
  }
  f.reg[i.d[0]] = out;
}

// cvt.rn.f16x2.f32 d, a, b: a into the upper half, b into the lower.
void convert_pair(Frame& f, const Instruction& i) {
  const Conversion c = as<Conversion>(uint64_t(i.offset));
  f.reg[i.d[0]] = converted(get(f, i.s[0]), c) << 16 | converted(get(f, i.s[1]), c);
}

void decode_conversion(Decoder& d) {
  static_assert(sizeof(Conversion) <= 8, "");
  Conversion c = {};
  const struct {
    const char* name;
    Rounding rounding;
    bool integral;
  } modes[] = {{"rn", Rounding::Nearest, false}, {"rz", Rounding::Zero, false},  {"rm", Rounding::Down, false},
               {"rp", Rounding::Up, false},      {"rna", Rounding::NearestAway, false}, {"rni", Rounding::Nearest, true},
               {"rzi", Rounding::Zero, true},    {"rmi", Rounding::Down, true},  {"rpi", Rounding::Up, true}};
  for (const auto& m : modes)
    if (d.take(m.name)) c.rounding = m.rounding, c.integral = m.integral;
  c.ftz = d.take("ftz");
  c.saturated = d.take("sat");
  c.relu = d.take("relu");
  const Type to = d.take_type(), from = d.take_type();
  c.to = to;
  c.from = from;
  const bool pair = to == Type::f16x2 || to == Type::bf16x2;
  if (pair) {
    c.to = to == Type::f16x2 ? Type::f16 : Type::bf16;
    if (from != Type::f32 || c.integral || (c.rounding != Rounding::Nearest && c.rounding != Rounding::Zero)) d.unknown();
    d.expect(3);
    d.destination(0, to);
    d.source(1, from);
    d.source(2, from);
    d.out.run = convert_pair;
  } else {
    const bool reals = is_float(to) && is_float(from), narrowing = reals && bytes_of(to) < bytes_of(from);
    const bool between = is_float(to) != is_float(from) || to == Type::tf32;
    if ((narrowing || between) && c.rounding == Rounding::None) d.refuse(d.out.opcode + " needs a rounding: .rn or .rzi");
    if (to == Type::pred || from == Type::pred || from == Type::tf32 || from == Type::f16x2 || from == Type::bf16x2 ||
        (to == Type::tf32 && from != Type::f32) || (c.rounding == Rounding::NearestAway && to != Type::tf32) ||
        ((to == Type::f16 || to == Type::bf16) && (c.rounding == Rounding::Down || c.rounding == Rounding::Up) && !c.integral))
      d.unknown();
    const Range all = range_of(from), room = range_of(to);
    const bool never = !is_float(from) && !is_float(to) && room.low <= all.low && all.high <= room.high;
    if (c.saturated && (never || to == Type::bf16)) d.unknown();  // ptxas has no .sat where nothing is out of range
    if (!is_float(to) && is_float(from) && !c.integral) d.refuse(d.out.opcode + " needs an integral rounding: .rni, .rzi");
    d.expect(2);
    d.destination(0, to, !is_float(to));
    d.source(1, from, !is_float(from));
    d.out.bytes = d.register_bytes(d.operands[0]);
    d.out.run = convert;
  }
  d.out.offset = int64_t(to_bits(c));
}

// ---- comparisons

enum class Compare : uint8_t { Eq, Ne, Lt, Le, Gt, Ge, Num, Nan };

template <class T>
bool compared(Compare op, bool unordered, T a, T b) {
  if constexpr (is_real<T>) {
    const bool nan = a != a || b != b;
    if (op == Compare::Num) return !nan;
    if (op == Compare::Nan) return nan;
    if (nan) return unordered;
  }
  switch (op) {
    case Compare::Eq: return a == b;
    case Compare::Ne: return a != b;
    case Compare::Lt: return a < b;
    case Compare::Le: return a <= b;
    case Compare::Gt: return a > b;
    default: return a >= b;
  }
}

enum class Join : uint8_t { None, And, Or, Xor };

// offset: Compare | unordered << 8 | Join << 16 | ftz << 24
template <class T>
void set_predicate(Frame& f, const Instruction& i) {
  T a = get<T>(f, i.s[0]), b = get<T>(f, i.s[1]);
  if (i.offset >> 24 & 1) a = flush(a), b = flush(b);
  const bool r = compared(Compare(i.offset & 0xff), i.offset >> 8 & 1, a, b);
  const auto joined = [&](bool v) {
    const bool c = i.s.size() > 2 && get(f, i.s[2]) != 0;
    switch (Join(i.offset >> 16 & 0xff)) {
      case Join::And: return v && c;
      case Join::Or: return v || c;
      case Join::Xor: return v != c;
      default: return v;
    }
  };
  const bool p = joined(r), q = joined(!r);
  put(f, i.d[0], p);
  if (i.d.size() > 1) put(f, i.d[1], q);
}

void decode_setp(Decoder& d) {
  const struct {
    const char* name;
    Compare op;
    bool unordered;
  } ops[] = {{"eq", Compare::Eq, false}, {"ne", Compare::Ne, false}, {"lt", Compare::Lt, false}, {"le", Compare::Le, false},
             {"gt", Compare::Gt, false}, {"ge", Compare::Ge, false}, {"lo", Compare::Lt, false}, {"ls", Compare::Le, false},
             {"hi", Compare::Gt, false}, {"hs", Compare::Ge, false}, {"equ", Compare::Eq, true}, {"neu", Compare::Ne, true},
             {"ltu", Compare::Lt, true}, {"leu", Compare::Le, true}, {"gtu", Compare::Gt, true}, {"geu", Compare::Ge, true},
             {"num", Compare::Num, false}, {"nan", Compare::Nan, false}};
  bool found = false;
  for (const auto& op : ops)
    if (d.take(op.name)) d.out.offset = int64_t(op.op) | int64_t(op.unordered) << 8, found = true;
  const Join join = d.take("and") ? Join::And : d.take("or") ? Join::Or : d.take("xor") ? Join::Xor : Join::None;
  d.out.offset |= int64_t(join) << 16 | int64_t(d.take("ftz")) << 24;
  const Type t = d.take_type();
  switch (t) {
    case Type::b16: case Type::u16: d.out.run = set_predicate<uint16_t>; break;
    case Type::b32: case Type::u32: d.out.run = set_predicate<uint32_t>; break;
    case Type::b64: case Type::u64: d.out.run = set_predicate<uint64_t>; break;
    case Type::s16: d.out.run = set_predicate<int16_t>; break;
    case Type::s32: d.out.run = set_predicate<int32_t>; break;
    case Type::s64: d.out.run = set_predicate<int64_t>; break;
    case Type::f16: d.out.run = set_predicate<Half>; break;
    case Type::bf16: d.out.run = set_predicate<Brain>; break;
    case Type::f32: d.out.run = set_predicate<float>; break;
    case Type::f64: d.out.run = set_predicate<double>; break;
    default: d.unknown();
  }
  if (!found || (d.paired && (t == Type::f16 || t == Type::bf16))) d.unknown();
  const size_t first = d.paired ? 2 : 1;
  d.expect(first + 2 + (join != Join::None));
  for (size_t i = 0; i < first; ++i) d.destination(i, Type::pred);
  d.source(first, t);
  d.source(first + 1, t);
  if (join != Join::None) d.predicate(d.operands[first + 2]);
}

void select(Frame& f, const Instruction& i) { f.reg[i.d[0]] = get(f, i.s[2]) != 0 ? get(f, i.s[0]) : get(f, i.s[1]); }

// ---- which is which

Run approximation(const std::string& base, Type t, bool ftz) {
  if (t == Type::f64) return nullptr;
  if (base == "ex2") return unary_of<Ex2>(t, ftz, false, true);
  if (base == "tanh") return unary_of<Tanh>(t, ftz, false, true);
  if (t != Type::f32) return nullptr;
  if (base == "lg2") return unary_of<Lg2>(t, ftz, false, true);
  if (base == "rcp") return unary_of<Rcp>(t, ftz, false, true);
  if (base == "sqrt") return unary_of<Sqrt>(t, ftz, false, true);
  if (base == "rsqrt") return unary_of<Rsqrt>(t, ftz, false, true);
  if (base == "sin") return unary_of<Sin>(t, ftz, false, true);
  if (base == "cos") return unary_of<Cos>(t, ftz, false, true);
  return nullptr;
}

bool decode_approximation(Decoder& d) {
  for (const char* name : {"ex2", "tanh", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos"}) {
    if (d.base != name) continue;
    const bool approximate = d.take("approx"), exact = (d.base == "rcp" || d.base == "sqrt") && d.take("rn"), ftz = d.take("ftz");
    const Type t = d.take_type();
    d.out.run = approximation(d.base, t, ftz);
    if (d.out.run == nullptr || approximate == exact) d.unknown();
    d.expect(2);
    d.destination(0, t);
    d.source(1, t);
    return true;
  }
  return false;
}

bool bits_operation(Decoder& d, Run (*choose)(Type)) {
  const Type t = d.take_type();
  d.out.run = choose(t);
  if (d.out.run == nullptr) d.unknown();
  d.expect(3);
  d.destination(0, t);
  d.source(1, t);
  d.source(2, t);
  return true;
}

void decode_shift(Decoder& d, bool left) {
  const Type t = d.take_type();
  switch (t) {
    case Type::b16: case Type::u16: d.out.run = left ? shift<uint16_t, Shl> : shift<uint16_t, Shr>; break;
    case Type::b32: case Type::u32: d.out.run = left ? shift<uint32_t, Shl> : shift<uint32_t, Shr>; break;
    case Type::b64: case Type::u64: d.out.run = left ? shift<uint64_t, Shl> : shift<uint64_t, Shr>; break;
    case Type::s16: if (!left) d.out.run = shift<int16_t, Shr>; break;
    case Type::s32: if (!left) d.out.run = shift<int32_t, Shr>; break;
    case Type::s64: if (!left) d.out.run = shift<int64_t, Shr>; break;
    default: break;
  }
  if (d.out.run == nullptr) d.unknown();
  d.expect(3);
  d.destination(0, t);
  d.source(1, t);
  d.source(2, Type::u32);
}

void decode_counting(Decoder& d, Run narrow, Run wide, bool same) {
  const Type t = d.take_type();
  if (t != Type::b32 && t != Type::b64) d.unknown();
  d.out.run = t == Type::b32 ? narrow : wide;
  d.expect(2);
  d.destination(0, same ? t : Type::u32);
  d.source(1, t);
}

void decode_field(Decoder& d, bool inserting) {
  const Type t = d.take_type();
  if (inserting) d.out.run = t == Type::b32 ? insert<uint32_t> : t == Type::b64 ? insert<uint64_t> : nullptr;
  else
    d.out.run = t == Type::u32 ? extract<uint32_t> : t == Type::s32 ? extract<int32_t> : t == Type::u64 ? extract<uint64_t>
                : t == Type::s64 ? extract<int64_t> : nullptr;
  if (d.out.run == nullptr) d.unknown();
  d.expect(inserting ? 5 : 4);
  d.destination(0, t);
  d.source(1, t);
  if (inserting) d.source(2, t);
  d.source(inserting ? 3 : 2, Type::u32);
  d.source(inserting ? 4 : 3, Type::u32);
}

void fixed(Decoder& d, Run run, size_t sources) {  // all 32 bits
  d.out.run = run;
  d.expect(1 + sources);
  d.destination(0, Type::b32);
  for (size_t i = 1; i <= sources; ++i) d.source(i, Type::b32);
}

}  // namespace

bool decode_arithmetic(Decoder& d) {
  const std::string& b = d.base;
  if (b == "add") return decode_simple(d, binary_of<Add>, 2, true, true), true;
  if (b == "sub") return decode_simple(d, binary_of<Sub>, 2, true, true), true;
  if (b == "mul") return decode_product(d, false), true;
  if (b == "mad") return decode_product(d, true), true;
  if (b == "fma") return decode_simple(d, ternary_of<Fma>, 3, false, true), true;
  if (b == "min") return decode_simple(d, d.take("NaN") ? binary_of<MinNan> : binary_of<Min>, 2, true, true), true;
  if (b == "max") return decode_simple(d, d.take("NaN") ? binary_of<MaxNan> : binary_of<Max>, 2, true, true), true;
  if (b == "neg") return decode_simple(d, unary_of<Neg>, 1, true, true), true;
  if (b == "abs") return decode_simple(d, unary_of<Abs>, 1, true, true), true;
  if (b == "div") {
    const auto quotient = d.take("approx") ? binary_of<DivApprox> : binary_of<Div>;
    return d.take("full"), decode_simple(d, quotient, 2, true, true), true;
  }
  if (b == "rem") return decode_simple(d, binary_of<Rem>, 2, true, false), true;
  if (b == "and") return bits_operation(d, bits2<And>);
  if (b == "or") return bits_operation(d, bits2<Or>);
  if (b == "xor") return bits_operation(d, bits2<Xor>);
  if (b == "not") {
    const Type t = d.take_type();
    if (t == Type::pred) {
      d.expect(2);
      d.destination(0, t);
      Operand negated = d.operands[1];
      negated.negated = !negated.negated;
      d.predicate(negated);
      d.out.run = select;
      d.out.s = {d.out.s[0], d.out.s[0], d.out.s[0]};
      return true;
    }
    d.out.run = unary_of<Not>(t, false, true, false);
    if (d.out.run == nullptr) d.unknown();
    d.expect(2);
    d.destination(0, t);
    d.source(1, t);
    return true;
  }
  if (b == "shl" || b == "shr") return decode_shift(d, b == "shl"), true;
  if (b == "shf") {
    const bool left = d.take("l"), wrap = d.take("wrap");
    if ((!left && !d.take("r")) || (!wrap && !d.take("clamp")) || !d.take("b32")) d.unknown();
    return fixed(d, left ? wrap ? funnel<true, true> : funnel<true, false> : wrap ? funnel<false, true> : funnel<false, false>, 3), true;
  }
  if (b == "prmt") return d.take("b32") ? (fixed(d, permute, 3), true) : false;
  if (b == "lop3") return d.take("b32") ? (fixed(d, any_logic, 4), true) : false;
  if (b == "bfe" || b == "bfi") return decode_field(d, b == "bfi"), true;
  if (b == "popc") return decode_counting(d, count_ones<uint32_t>, count_ones<uint64_t>, false), true;
  if (b == "clz") return decode_counting(d, leading_zeros<uint32_t>, leading_zeros<uint64_t>, false), true;
  if (b == "brev") return decode_counting(d, reverse_bits<uint32_t>, reverse_bits<uint64_t>, true), true;
  if (b == "mov") return decode_move(d), true;
  if (b == "cvt") return decode_conversion(d), true;
  if (b == "setp") return decode_setp(d), true;
  if (b == "selp") {
    const Type t = d.take_type();
    d.expect(4);
    d.destination(0, t);
    d.source(1, t);
    d.source(2, t);
    d.predicate(d.operands[3]);
    d.out.run = select;
    return true;
  }
  return decode_approximation(d);
}

}  // namespace emu::ptx
