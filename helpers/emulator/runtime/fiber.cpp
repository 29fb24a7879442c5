// Fibers: the switch, and stacks.
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace emu {

// Only what a called function must preserve is saved: the compiler already treats the switch as a call. What controls
// floating point (MXCSR, FPCR) is not, since nobody changes it. Both are global symbols: AArch64's linker takes the address of a
// local label from a table, where it is the start of the section.
#if defined(__APPLE__)
#define EMU_FUNCTION(name) ".text\n.globl _" #name "\n.private_extern _" #name "\n.p2align 4\n_" #name ":\n"
#else
#define EMU_FUNCTION(name) ".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n.p2align 4\n" #name ":\n"
#endif

#if defined(__x86_64__)
asm(EMU_FUNCTION(emu_switch)
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    EMU_FUNCTION(emu_fiber_start)
    "  callq *%rbx\n"
    "  ud2\n");
constexpr size_t kFrame = 56, kEntry = 32, kReturn = 48;  // r15 r14 r13 r12 rbx rbp, return address
#elif defined(__aarch64__)
asm(EMU_FUNCTION(emu_switch)
    "  stp x29, x30, [sp, #-160]!\n"
    "  stp x19, x20, [sp, #16]\n  stp x21, x22, [sp, #32]\n  stp x23, x24, [sp, #48]\n"
    "  stp x25, x26, [sp, #64]\n  stp x27, x28, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #16]\n  ldp x21, x22, [sp, #32]\n  ldp x23, x24, [sp, #48]\n"
    "  ldp x25, x26, [sp, #64]\n  ldp x27, x28, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  ldp x29, x30, [sp], #160\n"
    "  ret\n"
    EMU_FUNCTION(emu_fiber_start)
    "  blr x19\n"
    "  brk #1\n");
constexpr size_t kFrame = 160, kEntry = 16, kReturn = 8;  // x29 x30 x19 … x28 d8 … d15
#else
#error "the emulator's fibers know x86-64 and aarch64; add the switch for this machine here"
#endif

extern "C" void emu_fiber_start();

void* fiber_at(char* top, void (*entry)()) {
  char* sp = top - kFrame;  // top is a multiple of 16, as both ABIs want it at the call in emu_fiber_start
  memset(sp, 0, kFrame);
  void (*start)() = emu_fiber_start;
  memcpy(sp + kEntry, &entry, sizeof entry);
  memcpy(sp + kReturn, &start, sizeof start);
  return sp;
}

size_t page_bytes() {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

size_t guard_bytes() {
#if defined(__x86_64__) && defined(__linux__)
  return page_bytes();     // a larger frame touches every page that it takes (-fstack-clash-protection)
#else
  return 4 * kStackBytes;  // on AArch64 g++ touches every 64 KB; clang before 18, and for macOS, only what the code uses
#endif
}

void Stacks::reserve(size_t count) {
  const size_t stride = kStackBytes + guard_bytes();
  for (size_t c = 0; c * kChunk < count; ++c) {
    if (chunk_[c] != nullptr) continue;
    void* p = mmap(nullptr, kChunk * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    chunk_[c] = static_cast<char*>(p);
    for (size_t k = 0; k < kChunk; ++k)
      if (mprotect(chunk_[c] + k * stride, guard_bytes(), PROT_NONE) != 0) throw std::bad_alloc();
  }
}

char* Stacks::bottom(size_t i) const {
  return chunk_[i / kChunk] + (i % kChunk) * (kStackBytes + guard_bytes()) + guard_bytes();
}

bool Stacks::guards(const void* address) const {
  const size_t stride = kStackBytes + guard_bytes();
  for (const char* chunk : chunk_) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(chunk);
    if (chunk != nullptr && offset < kChunk * stride && offset % stride < guard_bytes()) return true;
  }
  return false;
}

}  // namespace emu
