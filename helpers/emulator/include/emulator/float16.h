// A 16-bit float and its pair: included once for half, once for bfloat16, with
//   T, T2, T_RAW   the type, its pair, and the struct of its bits
//   T_NAME(a, b)   a function's name, with the type's between a and b: __float2half_rn
//   T_BITS, T_VALUE   float to bits, rounded to nearest even, and back
// Sums, products, quotients and roots are computed in float and rounded once more, which gives the correctly rounded
// result because float has more than twice their digits; multiply-adds go through rounding to odd.

struct T_RAW {
  unsigned short x;
};
struct T {
  unsigned short emu_bits;
  T() = default;
  T(float x) : emu_bits(T_BITS(x)) {}
  T(double x) : emu_bits(T_BITS(emu::to_odd(x))) {}
  T(int x) : T(double(x)) {}
  T(unsigned x) : T(double(x)) {}
  T(long long x) : T(emu::integer_to_odd(x)) {}
  T(unsigned long long x) : T(emu::integer_to_odd(x)) {}
  T(short x) : T(double(x)) {}
  T(unsigned short x) : T(double(x)) {}
  T(T_RAW x) : emu_bits(x.x) {}
  operator float() const { return T_VALUE(emu_bits); }
  operator T_RAW() const { return {emu_bits}; }
};
struct __attribute__((aligned(4))) T2 {
  T x, y;
  T2() = default;
  constexpr T2(T x, T y) : x(x), y(y) {}
};

// ---- arithmetic

inline bool operator==(T a, T b) { return float(a) == float(b); }
inline bool operator!=(T a, T b) { return float(a) != float(b); }
inline bool operator<(T a, T b) { return float(a) < float(b); }
inline bool operator<=(T a, T b) { return float(a) <= float(b); }
inline bool operator>(T a, T b) { return float(a) > float(b); }
inline bool operator>=(T a, T b) { return float(a) >= float(b); }
inline T operator+(T a, T b) { return T(float(a) + float(b)); }
inline T operator-(T a, T b) { return T(float(a) - float(b)); }
inline T operator*(T a, T b) { return T(float(a) * float(b)); }
inline T operator/(T a, T b) { return T(float(a) / float(b)); }
inline T operator+(T a) { return a; }
inline T operator-(T a) { return T(-float(a)); }
inline T& operator+=(T& a, T b) { return a = a + b; }
inline T& operator-=(T& a, T b) { return a = a - b; }
inline T& operator*=(T& a, T b) { return a = a * b; }
inline T& operator/=(T& a, T b) { return a = a / b; }

inline T2 operator+(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }
inline T2 operator-(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }
inline T2 operator*(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }
inline T2 operator/(T2 a, T2 b) { return {a.x / b.x, a.y / b.y}; }
inline T2 operator-(T2 a) { return {-a.x, -a.y}; }
inline T2& operator+=(T2& a, T2 b) { return a = a + b; }
inline T2& operator-=(T2& a, T2 b) { return a = a - b; }
inline T2& operator*=(T2& a, T2 b) { return a = a * b; }
inline T2& operator/=(T2& a, T2 b) { return a = a / b; }
inline bool operator==(T2 a, T2 b) { return a.x == b.x && a.y == b.y; }
inline bool operator!=(T2 a, T2 b) { return a.x != b.x && a.y != b.y; }  // both differ: not the opposite of ==

inline T __hadd(T a, T b) { return a + b; }
inline T __hsub(T a, T b) { return a - b; }
inline T __hmul(T a, T b) { return a * b; }
inline T __hdiv(T a, T b) { return a / b; }
inline T __hadd_rn(T a, T b) { return a + b; }
inline T __hsub_rn(T a, T b) { return a - b; }
inline T __hmul_rn(T a, T b) { return a * b; }
inline T __hneg(T a) { return -a; }
inline T __habs(T a) { return T(::fabsf(float(a))); }
inline T __hfma(T a, T b, T c) { return T(emu::fma_to_odd(float(a), float(b), float(c))); }
inline bool __heq(T a, T b) { return a == b; }
inline bool __hne(T a, T b) { return float(a) < float(b) || float(a) > float(b); }  // false for NaN, as the manual has it
inline bool __hlt(T a, T b) { return a < b; }
inline bool __hle(T a, T b) { return a <= b; }
inline bool __hgt(T a, T b) { return a > b; }
inline bool __hge(T a, T b) { return a >= b; }
inline bool __hisnan(T a) { return float(a) != float(a); }
inline int __hisinf(T a) { return float(a) == INFINITY ? 1 : float(a) == -INFINITY ? -1 : 0; }
inline T __hmax(T a, T b) { return T(emu::larger(float(a), float(b))); }
inline T __hmin(T a, T b) { return T(emu::smaller(float(a), float(b))); }
inline T __hmax_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }
inline T __hmin_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); }

// Saturating to [0, 1], and clamping below at 0: NaN gives 0 and NaN.
inline T emu_saturate(T a) { return float(a) > 0.0f ? (float(a) < 1.0f ? a : T(1.0f)) : T(0.0f); }
inline T __hadd_sat(T a, T b) { return emu_saturate(T(float(a) + float(b))); }
inline T __hsub_sat(T a, T b) { return emu_saturate(T(float(a) - float(b))); }
inline T __hmul_sat(T a, T b) { return emu_saturate(T(float(a) * float(b))); }
inline T __hfma_sat(T a, T b, T c) { return emu_saturate(__hfma(a, b, c)); }
inline T __hfma_relu(T a, T b, T c) { return __hmax_nan(__hfma(a, b, c), T(0.0f)); }

inline T2 __hadd2(T2 a, T2 b) { return a + b; }
inline T2 __hsub2(T2 a, T2 b) { return a - b; }
inline T2 __hmul2(T2 a, T2 b) { return a * b; }
inline T2 __h2div(T2 a, T2 b) { return a / b; }
inline T2 __hadd2_rn(T2 a, T2 b) { return a + b; }
inline T2 __hsub2_rn(T2 a, T2 b) { return a - b; }
inline T2 __hmul2_rn(T2 a, T2 b) { return a * b; }
inline T2 __hneg2(T2 a) { return -a; }
inline T2 __habs2(T2 a) { return {__habs(a.x), __habs(a.y)}; }
inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
inline T2 __hmax2_nan(T2 a, T2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }
inline T2 __hmin2_nan(T2 a, T2 b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; }
inline T2 __hadd2_sat(T2 a, T2 b) { return {__hadd_sat(a.x, b.x), __hadd_sat(a.y, b.y)}; }
inline T2 __hsub2_sat(T2 a, T2 b) { return {__hsub_sat(a.x, b.x), __hsub_sat(a.y, b.y)}; }
inline T2 __hmul2_sat(T2 a, T2 b) { return {__hmul_sat(a.x, b.x), __hmul_sat(a.y, b.y)}; }
inline T2 __hfma2_sat(T2 a, T2 b, T2 c) { return {__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y)}; }
inline T2 __hfma2_relu(T2 a, T2 b, T2 c) { return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)}; }
#define EMU_COMPARE(name, op)                                                                       \
  inline T2 __h##name##2(T2 a, T2 b) { return {T(a.x op b.x ? 1.0f : 0.0f), T(a.y op b.y ? 1.0f : 0.0f)}; } \
  inline bool __hb##name##2(T2 a, T2 b) { return a.x op b.x && a.y op b.y; }
EMU_COMPARE(eq, ==)
EMU_COMPARE(lt, <)
EMU_COMPARE(le, <=)
EMU_COMPARE(gt, >)
EMU_COMPARE(ge, >=)
#undef EMU_COMPARE

#define EMU_FUNCTION(name, expression)                                         \
  inline T h##name(T a) {                                                      \
    const double x = float(a);                                                 \
    return T(emu::to_odd(expression));                                         \
  }                                                                            \
  inline T2 h2##name(T2 a) { return {h##name(a.x), h##name(a.y)}; }
EMU_FUNCTION(exp, std::exp(x))
EMU_FUNCTION(exp2, std::exp2(x))
EMU_FUNCTION(exp10, std::pow(10.0, x))
EMU_FUNCTION(log, std::log(x))
EMU_FUNCTION(log2, std::log2(x))
EMU_FUNCTION(log10, std::log10(x))
EMU_FUNCTION(sqrt, std::sqrt(x))
EMU_FUNCTION(rsqrt, 1.0 / std::sqrt(x))
EMU_FUNCTION(rcp, 1.0 / x)
EMU_FUNCTION(sin, std::sin(x))
EMU_FUNCTION(cos, std::cos(x))
EMU_FUNCTION(tanh, std::tanh(x))
EMU_FUNCTION(floor, std::floor(x))
EMU_FUNCTION(ceil, std::ceil(x))
EMU_FUNCTION(trunc, std::trunc(x))
EMU_FUNCTION(rint, std::nearbyint(x))
#undef EMU_FUNCTION

inline float __low2float(T2 a) { return float(a.x); }
inline float __high2float(T2 a) { return float(a.y); }
inline T atomicAdd(T* p, T v, EMU_HERE) {
  return emu::atomic_update(p, EMU_SITE("atomicAdd"), [v](T old) { return old + v; });
}
inline T2 atomicAdd(T2* p, T2 v, EMU_HERE) {
  return emu::atomic_update(p, EMU_SITE("atomicAdd"), [v](T2 old) { return old + v; });
}

// ---- conversions

inline T T_NAME(__float2, )(float x) { return T(x); }
inline T T_NAME(__float2, _rn)(float x) { return T(x); }
inline T T_NAME(__double2, )(double x) { return T(x); }
inline float T_NAME(__, 2float)(T x) { return float(x); }
inline T2 T_NAME(make_, 2)(T x, T y) { return {x, y}; }
inline T2 T_NAME(__halves2, 2)(T x, T y) { return {x, y}; }
inline T2 T_NAME(__float2, 2_rn)(float x) { return {T(x), T(x)}; }
inline T2 T_NAME(__floats2, 2_rn)(float x, float y) { return {T(x), T(y)}; }
inline T2 T_NAME(__float22, 2_rn)(float2 x) { return {T(x.x), T(x.y)}; }
inline float2 T_NAME(__, 22float2)(T2 x) { return {float(x.x), float(x.y)}; }
inline T T_NAME(__low2, )(T2 x) { return x.x; }
inline T T_NAME(__high2, )(T2 x) { return x.y; }
inline T2 T_NAME(__low2, 2)(T2 x) { return {x.x, x.x}; }
inline T2 T_NAME(__high2, 2)(T2 x) { return {x.y, x.y}; }
inline T2 T_NAME(__lows2, 2)(T2 x, T2 y) { return {x.x, y.x}; }
inline T2 T_NAME(__highs2, 2)(T2 x, T2 y) { return {x.y, y.y}; }
inline T2 __lowhigh2highlow(T2 x) { return {x.y, x.x}; }
inline unsigned short T_NAME(__, _as_ushort)(T x) { return x.emu_bits; }
inline short T_NAME(__, _as_short)(T x) { return short(x.emu_bits); }
inline T T_NAME(__ushort_as_, )(unsigned short x) { return T(T_RAW{x}); }
inline T T_NAME(__short_as_, )(short x) { return T(T_RAW{(unsigned short)x}); }
inline T T_NAME(__int2, _rn)(int x) { return T(x); }
inline int T_NAME(__, 2int_rn)(T x) { return __float2int_rn(float(x)); }
inline int T_NAME(__, 2int_rz)(T x) { return __float2int_rz(float(x)); }

#undef T
#undef T2
#undef T_RAW
#undef T_NAME
#undef T_BITS
#undef T_VALUE
