// dim3 and the vector types, with CUDA's sizes and alignments (CUDA C++ Programming Guide, "Built-in Vector Types").
#pragma once

// A copy is one load and one store of the whole, as on a GPU. clang would make loads and stores of the members.
#if defined(__clang__)
#define EMU_WHOLE(T, name, n)                                                              \
  typedef T emu_whole __attribute__((vector_size(n * sizeof(T)), may_alias));              \
  name() = default;                                                                        \
  name(const name& o) { *reinterpret_cast<emu_whole*>(this) = *reinterpret_cast<const emu_whole*>(&o); } \
  name& operator=(const name& o) {                                                         \
    *reinterpret_cast<emu_whole*>(this) = *reinterpret_cast<const emu_whole*>(&o);         \
    return *this;                                                                          \
  }
#define EMU_WHOLE2(T, name) EMU_WHOLE(T, name, 2) constexpr name(T x, T y = {}) : x(x), y(y) {}
#define EMU_WHOLE4(T, name) \
  EMU_WHOLE(T, name, 4) constexpr name(T x, T y = {}, T z = {}, T w = {}) : x(x), y(y), z(z), w(w) {}
#else
#define EMU_WHOLE2(T, name)
#define EMU_WHOLE4(T, name)
#endif

#define EMU_VECTOR(T, name, align2, align4)                                                \
  struct name##1 { T x; };                                                                 \
  struct __attribute__((aligned(align2))) name##2 { T x, y; EMU_WHOLE2(T, name##2) };      \
  struct name##3 { T x, y, z; };                                                           \
  struct __attribute__((aligned(align4))) name##4 { T x, y, z, w; EMU_WHOLE4(T, name##4) };\
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
#undef EMU_WHOLE
#undef EMU_WHOLE2
#undef EMU_WHOLE4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};
