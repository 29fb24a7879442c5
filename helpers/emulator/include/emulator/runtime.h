// What the headers that shadow CUDA's ask of the emulator's runtime (helpers/emulator/runtime).
// Kernels are compiled with -fsanitize=thread and the runtime is not: what happens behind these functions is not traced.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

// ---- who am I: packed, and const, so that the compiler may keep them in registers across barriers
uint64_t thread_index() noexcept __attribute__((const));  // x | y << 16 | z << 32
uint64_t block_index() noexcept __attribute__((const));   // x | y << 32 | z << 48
uint64_t block_extent() noexcept __attribute__((const));  // as thread_index
uint64_t grid_extent() noexcept __attribute__((const));   // as block_index
unsigned lane() noexcept __attribute__((const));

// ---- where in the reader's source an instruction stands
struct Site {
  const char* what;  // the instruction's name, as the reader wrote it
  const char* file;
  int line;
  uintptr_t pc = 0;  // of inline PTX: where the kernel comes to it, which may be a line that calls what stands in `file`
};

// ---- rendezvous of a warp: the last lane of `mask` to arrive computes for all of them
enum class Shuffle { Index, Up, Down, Xor };
enum class Vote { All, Any, Uniform, Ballot };
enum class Reduce { AddU, MinU, MaxU, AddS, MinS, MaxS, And, Or, Xor };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int source, int width, Site);
unsigned vote(Vote kind, unsigned mask, int predicate, Site);
unsigned match(unsigned mask, uint64_t value, bool all, Site);  // the lanes with my value; for `all`: the mask, or 0
unsigned reduce(Reduce kind, unsigned mask, unsigned value, Site);
void sync_warp(unsigned mask, Site);
unsigned active_mask(Site);

// The general form, for instructions with wider operands: `operand[l]` is what lane l passed, null if it takes no part.
using Combine = void (*)(void* const operand[32]);
void rendezvous(unsigned mask, void* operand, Combine combine, Site);

// ---- rendezvous of a block
enum class BarrierVote { None, And, Or, Count };
int sync_block(BarrierVote kind, int predicate, Site);

// ---- shared memory of the running block
// `key` is the identity of a `__shared__` variable, the same for every thread that comes to its declaration.
struct ArrayShape {
  uint32_t item, dims, extent[4];     // bytes of an element; 0 dims: no array, or one of more dimensions than fit
};
void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name, ArrayShape);
void* dynamic_shared(const char* name);
void name_shared(const char* name, uint64_t address);  // an array in dynamic shared memory begins at the address
void name_mbarrier(const char* name, uint64_t address);  // what the source calls it
uint32_t shared_address(const void* generic);  // what ld.shared would take

// ---- memory
// Before an atomic: checks the access, and holds the block back until every lower block has finished, so that
// sums in global memory come out in one order, and the same to the last bit, on any number of cores.
void before_atomic(const void* address, unsigned bytes, uintptr_t pc, Site, unsigned order = 0);
void undisturbed(bool);  // from now on, or no longer: no other thread runs, whatever is traced
void memory_fence();  // __threadfence and its kin: orders what the thread does with flags, and all else
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes);
extern "C" void* __tsan_memset(void* to, int byte, size_t bytes);
// A launcher's cudaMemset and cudaMemcpy, by the name that it calls: out of bounds, they end it. kind: a cudaMemcpyKind.
int set_bytes(const char* name, void* to, int byte, size_t bytes);
int copy_bytes(const char* name, void* to, const void* from, size_t bytes, int kind);

// ---- ends
[[noreturn]] void trap(Site);
[[noreturn]] void local_array_overrun(uintptr_t pc);
[[noreturn]] void assertion_failed(const char* expression, Site);
[[noreturn]] void unsupported(Site);  // Site::what names it
void yield();                         // let the block's other threads run
uint64_t clock();
int print(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- launches
struct Launch {
  const void* kernel;                 // its identity, for cudaFuncSetAttribute; null: none, see prepare in launch.h
  const char* name;
  uint32_t grid[3], block[3];
  size_t dynamic_shared;
  void (*call)(const void* arguments);  // runs the kernel's body for the thread that calls it
  const void* arguments;
  size_t argument_bytes;
};
void launch(const Launch&);
void poison_stack();                                               // what lies below the caller's frame
void launch_bounds(unsigned threads, unsigned = 0, unsigned = 0);  // of the kernel that runs: CUDA launches no more

// ---- the runtime API's state
int get_last_error(bool clear);
int set_error(int error, const char* hint = nullptr);  // remembers and returns it
const char* error_name(int error);
const char* error_text(int error);
int set_dynamic_shared_limit(const void* kernel, int bytes, int most);
int multiprocessors();
int allocate(void** pointer, size_t bytes);
int release(void* pointer);

}  // namespace emu
