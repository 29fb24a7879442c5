// exit(), abort() and their like in what the emulator runs: they end the kernel or fa_launch, as a finding.
#include "../../toolchain/guard.h"

#include "grid.h"
#include "report.h"
#include "worker.h"

void guard::end(const char* kind, const char* text, const void* pc, const char*, int) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(pc);
  if (emu::worker != nullptr && emu::worker->current != nullptr)
    emu::fail("host function", 719, at, {}, "%s, which only host code can", text);
  emu::fail_launcher(kind, text, at == 0 ? 0 : at - 1);
}
