// The runtime's interpreter of PTX: the other half of emulator.cpp.
#include "async.h"
#include "ptx.cpp"
#include "ptx_arithmetic.cpp"
#include "ptx_matrix.cpp"
#include "ptx_wgmma.cpp"
#include "ptx_memory.cpp"
#include "ptx_warp.cpp"
#include "ptx_async.cpp"
