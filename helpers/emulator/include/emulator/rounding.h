// float and double to 16 bits and back: IEEE 754, to nearest, ties to even.
#pragma once
#include "math.h"

namespace emu {

// Rounds to odd: whoever rounds the result again, to fewer bits, gets what one rounding of `x` would have given.
inline float to_odd(double x) {
  const float f = static_cast<float>(x);
  if (static_cast<double>(f) == x || x != x) return f;
  uint32_t bits = bit_cast<uint32_t>(f);
  if ((bits & 1) == 0) bits += std::fabs(static_cast<double>(f)) < std::fabs(x) ? 1 : -1;
  return bit_cast<float>(bits);
}

// The same of an integer, to double.
template <class Integer>
inline double integer_to_odd(Integer x) {
  const double nearest = static_cast<double>(x);
  const __int128 back = static_cast<__int128>(nearest);
  uint64_t bits = bit_cast<uint64_t>(nearest);
  if (back != x && (bits & 1) == 0) bits += (back < x) == (x > 0) ? 1 : -1;
  return bit_cast<double>(bits);
}

// x * y + z, rounded to odd; x * y must be exact, as it is for factors of 16 bits.
inline float fma_to_odd(float x, float y, float z) {
  const double product = static_cast<double>(x) * y, sum = product + z;
  const double z_part = sum - product, lost = (product - (sum - z_part)) + (z - z_part);
  uint64_t bits = bit_cast<uint64_t>(sum);
  if (lost != 0 && lost == lost && (bits & 1) == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return to_odd(bit_cast<double>(bits));
}

inline uint16_t half_bits(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;                                        // NaN
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);         // 65520 and beyond: infinity
  if (magnitude < 0x38800000) {                                                     // subnormal: 0.5 has half's smallest step
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000) >> 13);
}

inline float half_value(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t bfloat16_bits(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_value(uint16_t b) { return bit_cast<float>(static_cast<uint32_t>(b) << 16); }

}  // namespace emu
