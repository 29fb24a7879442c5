// Branches. PTX ISA, "Control Flow Instructions".
#include "../include/emulator/runtime.h"
#include "ptx_families.h"

namespace emu::ptx {

static void branch(Frame& f, const Instruction& i) {
  if (size_t(i.offset) < f.next) yield();  // a loop may wait for another thread
  f.next = size_t(i.offset);
}

bool decode_control(Decoder& d) {
  if (d.base == "bra") {
    d.take("uni");
    d.expect(1);
    if (d.operands[0].kind != Operand::Label) d.refuse("bra takes a label");
    d.out.run = branch;
    d.assembly.jumps.push_back({d.assembly.program.code.size(), d.operands[0].text});
    return true;
  }
  return false;
}

}  // namespace emu::ptx
