// The whole runtime, one translation unit.
#include "fiber.cpp"
#include "block.cpp"
#include "warp.cpp"
#include "memory.cpp"
#include "grid.cpp"
#include "report.cpp"
#include "api.cpp"
