// Memory of a kernel: which accesses are allowed, and what their addresses are called.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/emulator/runtime.h"
#include "ops.h"
#include "worker.h"

namespace emu {

inline const char* verb(bool write) { return write ? "writes" : "reads"; }

// ---- what lies where
StaticArray shared_array(const Worker*, size_t offset);  // that the offset lies in, or behind
const char* shared_name(const Worker*, const std::vector<NamedPlace>&, size_t offset, size_t* begin);  // of the array there
std::string shared_place(const Worker*, unsigned warp, size_t offset);  // "K_smem[12][3]", "K_smem + 384 B"
void add_named_place(std::vector<NamedPlace>&, const char* name, uint32_t offset);
int region_at(uintptr_t address, size_t bytes);  // the tensor that these bytes belong to; -1: none
std::string demangled(const char* name);
Variable variable_at(Worker*, uintptr_t address);
uintptr_t begin_of(Worker*, uint16_t target, uintptr_t address);  // of the tensor, variable or allocation there
bool in_global(const Worker*, const void*);      // neither in shared memory nor on the current thread's stack
std::string address_in_words(const Worker*, uintptr_t);  // "K_smem[12][3]", "O + 128 bytes", or the address

// ---- accesses
[[noreturn]] void misaligned(const char* does, uintptr_t address, size_t bytes, uintptr_t pc, Site);  // to a multiple of bytes
// One lane's part in a memory instruction, before it happens; instructions that the runtime executes itself call this,
// lane by lane, each in its own fiber. Fails if the access can't happen: bounds, alignment (to `bytes`), initialisation.
// LoadMatrix and StoreMatrix: the 16-byte row whose address this lane gives; a lane whose address the instruction
// ignores says NoAddress. AsyncCopy: the destination in shared memory; its global source is a Load with the same pc.
// pc: the return address of the call in the kernel.
void check_access(Op, const void* address, size_t bytes, uintptr_t pc, Site);
// The same of an access that may be one of a flag, with an Order; before it, of one that reads, `spin`. atomic: its pc, if it is one.
void strong_access(Op, const void* address, size_t bytes, unsigned order, uintptr_t pc, Site);
void spin(const void* flag, uintptr_t atomic);
void read_flag(const void*, unsigned order);     // what it holds has been read
// The bytes at `offset` of shared memory lie in one array; fails otherwise.
void check_bounds(size_t offset, size_t bytes, bool write, uintptr_t pc, Site);
// A run of bytes in global memory that a bulk copy reads or writes.
void bulk_access(Op, bool write, const void* address, size_t bytes, uintptr_t pc, Site);

// Within bounds, else it fails.
struct Actor;
void begin_async_read(size_t offset, size_t bytes, const Actor&, uintptr_t pc, Site);
void count_instruction(Worker*, uintptr_t pc, const Site&);  // one that makes no request and meets nobody, by the current thread

void add_counters(Worker*);                      // to those of the session

}  // namespace emu
