// Arithmetic intrinsics (CUDA Math API). The fast approximations (__expf and its kin) are computed in full precision:
// what a GPU gives may differ from these in the last bits.
#pragma once
#include <cfloat>
#include <cstdint>
// libstdc++'s Bessel functions and their kin, which no GPU has, would take a sixth of a small kernel's time to compile.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#include <cmath>
using std::isfinite, std::isinf, std::isnan, std::signbit;  // CUDA has them without std:: too

namespace emu {
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline float fast_exp(float x) { return ::expf(x); }
inline float fast_exp10(float x) { return ::powf(10.0f, x); }
inline float fast_log(float x) { return ::logf(x); }
inline float fast_log2(float x) { return ::log2f(x); }
inline float fast_log10(float x) { return ::log10f(x); }
inline float fast_sin(float x) { return ::sinf(x); }
inline float fast_cos(float x) { return ::cosf(x); }
inline float fast_tan(float x) { return ::tanf(x); }
inline float fast_pow(float x, float y) { return ::exp2f(y * ::log2f(x)); }  // NaN of x < 0, unlike powf
}  // namespace emu
// Macros, because some C libraries declare functions of these names.
#define __expf(x) ::emu::fast_exp(x)
#define __exp10f(x) ::emu::fast_exp10(x)
#define __logf(x) ::emu::fast_log(x)
#define __log2f(x) ::emu::fast_log2(x)
#define __log10f(x) ::emu::fast_log10(x)
#define __sinf(x) ::emu::fast_sin(x)
#define __cosf(x) ::emu::fast_cos(x)
#define __tanf(x) ::emu::fast_tan(x)
#define __powf(x, y) ::emu::fast_pow(x, y)

// There is no reciprocal of what is larger than 2^126.
inline float __fdividef(float x, float y) { return ::fabsf(y) > 0x1p126f ? x * ::copysignf(0.0f, y) : x / y; }
inline float rsqrtf(float x) { return 1.0f / ::sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / ::sqrt(double(x))); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return ::sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return ::fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return ::sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return ::fma(x, y, z); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN gives 0
inline float fdividef(float x, float y) { return x / y; }

inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bit_cast<double>(x); }
inline int __double2loint(double x) { return int(emu::bit_cast<unsigned long long>(x)); }
inline int __double2hiint(double x) { return int(emu::bit_cast<unsigned long long>(x) >> 32); }
inline double __hiloint2double(int hi, int lo) {
  return emu::bit_cast<double>((unsigned long long)unsigned(hi) << 32 | unsigned(lo));
}

namespace emu {
// As cvt does: what is out of range saturates. NaN gives 0, and where double or 64 bits take part the highest bit alone.
template <class To, class From>
inline To saturated(From x) {
  constexpr To top = To(1ull << (8 * sizeof(To) - 1)), most = To(-1) < 0 ? ~top : To(-1), least = ~most;
  if (x != x) return sizeof(To) == 8 || sizeof(From) == 8 ? top : 0;
  return x >= From(most) ? most : x <= From(least) ? least : To(x);
}
}  // namespace emu
#define EMU_TO_INTEGER(From, name, To)                                                               \
  inline To __##From##2##name##_rn(From x) { return emu::saturated<To>(std::rint(x)); }              \
  inline To __##From##2##name##_rz(From x) { return emu::saturated<To>(x); }                         \
  inline To __##From##2##name##_rd(From x) { return emu::saturated<To>(std::floor(x)); }             \
  inline To __##From##2##name##_ru(From x) { return emu::saturated<To>(std::ceil(x)); }
EMU_TO_INTEGER(float, int, int)
EMU_TO_INTEGER(float, uint, unsigned)
EMU_TO_INTEGER(float, ll, long long)
EMU_TO_INTEGER(float, ull, unsigned long long)
EMU_TO_INTEGER(double, int, int)
EMU_TO_INTEGER(double, uint, unsigned)
EMU_TO_INTEGER(double, ll, long long)
EMU_TO_INTEGER(double, ull, unsigned long long)
#undef EMU_TO_INTEGER
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return double(x); }
inline double __ull2double_rn(unsigned long long x) { return double(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}
inline int __mul24(int x, int y) {
  return int(unsigned(int(unsigned(x) << 8) >> 8) * unsigned(int(unsigned(y) << 8) >> 8));
}
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffff) * (y & 0xffffff); }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)x * y >> 32); }
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __usad(unsigned x, unsigned y, unsigned z) { return (x > y ? x - y : y - x) + z; }
inline unsigned __sad(int x, int y, unsigned z) { return (x > y ? unsigned(x) - y : unsigned(y) - x) + z; }
inline int __hadd(int x, int y) { return int(((long long)x + y) >> 1); }
inline int __rhadd(int x, int y) { return int(((long long)x + y + 1) >> 1); }
inline unsigned __uhadd(unsigned x, unsigned y) { return unsigned(((unsigned long long)x + y) >> 1); }
inline unsigned __urhadd(unsigned x, unsigned y) { return unsigned(((unsigned long long)x + y + 1) >> 1); }
inline int __dp4a(int x, int y, int z) {
  for (int i = 0; i < 32; i += 8) z += (signed char)(x >> i) * (signed char)(y >> i);
  return z;
}
inline unsigned __dp4a(unsigned x, unsigned y, unsigned z) {
  for (int i = 0; i < 32; i += 8) z += (x >> i & 0xff) * (y >> i & 0xff);
  return z;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 7;  // no sign by the highest bit, unlike prmt
    r |= (unsigned(bytes >> 8 * s) & 0xff) << 8 * i;
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((unsigned long long)hi << 32 | lo) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((unsigned long long)hi << 32 | lo) << (n < 32 ? n : 32) >> 32);
}
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((unsigned long long)hi << 32 | lo) >> (n < 32 ? n : 32));
}

// CUDA's min and max take any mix of arithmetic types, unlike std::min.
#define EMU_MIN_MAX(A, B, R)                                             \
  inline R min(A x, B y) {                                               \
    const R a = static_cast<R>(x), b = static_cast<R>(y);                \
    return b < a ? b : a;                                                \
  }                                                                      \
  inline R max(A x, B y) {                                               \
    const R a = static_cast<R>(x), b = static_cast<R>(y);                \
    return a < b ? b : a;                                                \
  }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(int, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long, unsigned long, unsigned long)
EMU_MIN_MAX(unsigned long, long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef EMU_MIN_MAX
namespace emu {
// Of a number and a NaN the number; -0 is less than +0.
template <class T>
inline T smaller(T a, T b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b; }
template <class T>
inline T larger(T a, T b) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a < b ? b : a; }
}  // namespace emu
inline float min(float a, float b) { return emu::smaller(a, b); }
inline float max(float a, float b) { return emu::larger(a, b); }
inline double min(double a, double b) { return emu::smaller(a, b); }
inline double max(double a, double b) { return emu::larger(a, b); }
inline double min(float a, double b) { return emu::smaller<double>(a, b); }
inline double max(float a, double b) { return emu::larger<double>(a, b); }
inline double min(double a, float b) { return emu::smaller<double>(a, b); }
inline double max(double a, float b) { return emu::larger<double>(a, b); }
inline unsigned umin(unsigned a, unsigned b) { return min(a, b); }
inline unsigned umax(unsigned a, unsigned b) { return max(a, b); }
inline long long llmin(long long a, long long b) { return min(a, b); }
inline long long llmax(long long a, long long b) { return max(a, b); }
inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return min(a, b); }
inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return max(a, b); }
