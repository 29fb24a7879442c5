// What the source translation (translate.py) writes in place of CUDA's own syntax.
//   kernel<<<grid, block, bytes>>>(q, k)   ->  ::emu::prepare("kernel", kernel, ::emu::Shape(grid, block, bytes))(q, k)
//   __shared__ float tile[32][33];         ->  struct emu_1 { float tile[32][33]; }; float (&tile)[32][33] = ... in the arena
//   extern __shared__ char smem[];         ->  char (&smem)[] = the block's dynamic shared memory
#pragma once
#include <tuple>

namespace emu {

struct Shape {
  dim3 grid, block;
  size_t bytes;
  Site site;
  Shape(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t = nullptr, const char* file = __builtin_FILE(),
        int line = __builtin_LINE())
      : grid(grid), block(block), bytes(bytes), site{"launch", file, line} {}
};

template <class... P>
struct Prepared {
  const char* name;
  void (*kernel)(P...);
  Shape shape;

  using Arguments = std::tuple<void (*)(P...), P...>;
  static void call(const void* arguments) {
    // By value: every thread has its own copy of the parameters.
    std::apply([](auto kernel, auto... p) { kernel(p...); }, *static_cast<const Arguments*>(arguments));
  }

  void operator()(P... p) const {
    const Arguments arguments(kernel, p...);
    Launch l = {reinterpret_cast<const void*>(kernel),
                name,
                {shape.grid.x, shape.grid.y, shape.grid.z},
                {shape.block.x, shape.block.y, shape.block.z},
                shape.bytes,
                call,
                &arguments,
                sizeof arguments,
                shape.site.file,
                shape.site.line};
    set_error(launch(l));
  }
};

template <class... P>
Prepared<P...> prepare(const char* name, void (*kernel)(P...), Shape shape) {
  return {name, kernel, shape};
}

// One declaration's variables, as members of Variables, at the same place for all threads of the block.
template <class Variables, size_t n>
inline Variables& shared(const SharedName (&names)[n]) {
  static const char key = 0;  // its address tells declarations (and template instances) apart
  return *static_cast<Variables*>(static_shared(&key, sizeof(Variables), alignof(Variables), names, int(n)));
}

template <class Array>
inline Array& dynamic_array() {
  return *static_cast<Array*>(dynamic_shared());
}

}  // namespace emu

#define EMU_NAME(variables, name) {#name, __builtin_offsetof(variables, name), sizeof(variables::name)}
