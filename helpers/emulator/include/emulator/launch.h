// What the source translation (translate.py) writes in place of CUDA's own syntax.
//   kernel<<<grid, block, bytes>>>(q, k)   ->  ::emu::prepare("kernel", kernel, ::emu::Shape(grid, block, bytes))(q, k)
//   __shared__ float x[8];                 ->  struct emu_shared_1 { float x[8]; }; auto& x = ::emu::shared<emu_shared_1>("x").x
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
    launch(l);  // its error is what cudaGetLastError gives
  }
};

template <class... P>
Prepared<P...> prepare(const char* name, void (*kernel)(P...), Shape shape) {
  return {name, kernel, shape};
}

// A variable, as the one member of Holder, at the same place for all threads of the block.
template <class Holder>
inline Holder& shared(const char* name) {
  static const char key = 0;  // its address tells variables (and template instances) apart
  return *static_cast<Holder*>(static_shared(&key, sizeof(Holder), alignof(Holder), name));
}

template <class Array>
inline Array& dynamic_array() {
  return *static_cast<Array*>(dynamic_shared());
}

}  // namespace emu
