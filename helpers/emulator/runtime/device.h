// The emulated device: the limits of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities"), and how a
// block's shared memory is laid out here.
#pragma once
#include <cstddef>

namespace emu {

constexpr unsigned kMaxThreads = 1024, kWarp = 32, kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStaticShared = 48 << 10, kSharedOptIn = 227 << 10, kSharedPerBlock = 48 << 10;
constexpr size_t kGap = 128;                      // between static arrays, so that an overrun of one is seen
constexpr size_t kStaticArena = 64 << 10;         // static arrays with their gaps; the dynamic array follows, at dynamic_base
constexpr size_t kDescribed = 256 << 10;          // how far the 14 bits of a wgmma descriptor's address reach
constexpr size_t kArena = kStaticArena + (228 << 10);
constexpr size_t kPrinted = 1 << 20;              // bytes of printf output, as CUDA's default: what goes beyond is lost

}  // namespace emu
