// What Python hands to the runtime and reads back, mirrored with ctypes in native.py.
#pragma once
#include <cstdint>

namespace emu {

// A tensor.
struct Region {
  const char* name;
  char* base;
  uint64_t bytes;                 // from the first element to the end of the last
  uint64_t item;                  // bytes of an element
  int32_t contiguous, dims;
  int32_t given;                  // 1: an input; 2: flags; 3: an input that another GPU writes; 0: outputs and workspace, uninitialised until a kernel writes them
  int64_t size[8], stride[8];     // in elements, strides decreasing
};

// What stopped a kernel.
struct Finding {
  char kind[32];
  char text[4096];                // one sentence
  char file[1024];                // where, if known without a pc
  char module[1024];              // else the library and the offset in it
  uint64_t offset, outer[4];      // outer: calls around it, innermost first, if what is at `offset` is the emulator's own
  int32_t line, error;            // error: a cudaError_t
  uint64_t block;
  char kernel[256];
};

// Bytes that threads asked to read and write of one tensor, and whether cudaMemset or cudaMemcpy has written to it in the launcher.
struct Counter {
  uint64_t read, written, by_host;
};

// What a tool has found without stopping the kernel: at one instruction, or between two.
struct FoundRow {
  const char *kind, *text;        // "{other}" in the text stands for the line of the other instruction
  uint64_t pc, other_pc, count, block;  // other_pc 0: there is none; block: where it was first seen
  int32_t launch, apart;          // apart: the threads were at most 0 in one warp, 1 in one block, 2 in two blocks, 3 where flags order these
};

// Warp requests that one instruction made of one target, added up over a launch.
struct TraceRow {
  const char *kernel, *target, *file;           // file and line: empty unless the pc says nothing
  int32_t line, shared;
  uint64_t pc;
  int32_t op, width;
  uint64_t requests, bytes, cost, ideal;
  uint32_t worst, worst_ideal, warp, launch;
  uint64_t block;
  int64_t address[32];
};

// How many warps have executed an instruction.
struct TraceCount {
  const char* name;
  uint64_t count;
};

}  // namespace emu
