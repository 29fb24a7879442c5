// dim3 and the vector types, with CUDA's sizes and alignments (CUDA C++ Programming Guide, "Built-in Vector Types").
#pragma once

#define EMU_VECTOR(T, name, align2, align4)                                                \
  struct name##1 { T x; };                                                                 \
  struct __attribute__((aligned(align2))) name##2 { T x, y; };                             \
  struct name##3 { T x, y, z; };                                                           \
  struct __attribute__((aligned(align4))) name##4 { T x, y, z, w; };                       \
  inline name##1 make_##name##1(T x) { return {x}; }                                       \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                       \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char, 2, 4)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned, uint, 8, 16)
EMU_VECTOR(long, long, 16, 16)
EMU_VECTOR(unsigned long, ulong, 16, 16)
EMU_VECTOR(long long, longlong, 16, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};
