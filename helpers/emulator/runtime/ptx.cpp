// Inline PTX: the text of an asm statement is parsed when a thread first comes to it, and interpreted from then on.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "../include/emulator/ptx.h"
#include "ptx_families.h"
#include "ptx_parser.h"
#include "report.h"
#include "worker.h"

namespace emu::ptx {

namespace {

// In the order in which they are asked.
const std::vector<Family> kFamilies = {decode_control, decode_async,  decode_matrix,    decode_warpgroup,
                                       decode_memory,  decode_warp,   decode_arithmetic};

std::mutex parsing;

const Program& program_of(Ptx* statement) {
  void* known = __atomic_load_n(&statement->program, __ATOMIC_ACQUIRE);
  if (known != nullptr) return *static_cast<Program*>(known);
  Worker* w = worker;
  ++w->critical;
  Program* program = new Program;
  {
    std::lock_guard<std::mutex> hold(parsing);
    if (statement->program == nullptr) {
      try {
        parse(*statement, kFamilies, *program);
      } catch (const Refusal& r) {
        program->kind = r.kind;
        program->error = r.why;
        if (program->name.empty()) program->name = statement->text;
      }
      __atomic_store_n(&statement->program, program, __ATOMIC_RELEASE);
    } else {
      delete program;
    }
    program = static_cast<Program*>(statement->program);
  }
  --w->critical;
  return *program;
}

[[noreturn]] void refused(const Program& p, uintptr_t pc, Site site) {
  if (strcmp(p.kind, "syntax") == 0)
    fail("inline PTX", 801, pc, site, "executes inline PTX: %s, which is no PTX: %s", p.name.c_str(), p.error.c_str());
  fail("unsupported", 801, pc, site, "executes inline PTX: %s, which the emulator doesn't know", p.name.c_str());
}

}  // namespace

}  // namespace emu::ptx

namespace emu {

template <int n>
__attribute__((noinline)) Outputs<n> interpret(Ptx* statement, ...) {
  using namespace ptx;
  const uintptr_t pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (worker == nullptr || worker->current == nullptr) {
    fprintf(stderr, "%s:%d: host code executes inline PTX\n", statement->file, statement->line);
    abort();
  }
  const Program& p = program_of(statement);
  if (p.kind[0] != 0) refused(p, pc, {"inline PTX", statement->file, statement->line});
  uint64_t* reg = static_cast<uint64_t*>(__builtin_alloca((p.registers + 1) * sizeof(uint64_t)));
  memset(reg, 0xff, p.registers * sizeof(uint64_t));  // NaN of every format: no program is right by the luck of zeros
  va_list values;
  va_start(values, statement);
  for (const Ref r : p.inputs) reg[r] = va_arg(values, uint64_t);
  va_end(values);
  for (const auto& [r, bits] : p.constants) reg[r] = bits;
  Frame f{reg, pc, 0, &p, reinterpret_cast<uintptr_t>(__builtin_frame_address(0))};
  for (const size_t end = p.code.size(); f.next < end;) {
    const Instruction& i = p.code[f.next++];
    if (i.guard != kNone && (reg[i.guard] != 0) == i.negated) continue;
    i.run(f, i);
  }
  Outputs<n> out;
  out.bits[0] = 0;
  for (size_t i = 0; i < p.outputs.size(); ++i) out.bits[i] = reg[p.outputs[i]];
  return out;
}
template Outputs<1> interpret(Ptx*, ...);
template Outputs<4> interpret(Ptx*, ...);
template Outputs<16> interpret(Ptx*, ...);
template Outputs<64> interpret(Ptx*, ...);
template Outputs<256> interpret(Ptx*, ...);

}  // namespace emu
