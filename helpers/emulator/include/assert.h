// A failed assertion in a kernel is a report, not the end of the process.
#include "emulator/runtime.h"
#undef assert
#define assert(e) \
  ((e) ? static_cast<void>(0) : ::emu::assertion_failed(#e, ::emu::Site{"assert", __FILE__, __LINE__}))
