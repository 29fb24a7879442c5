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
  Shape(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t = nullptr) : grid(grid), block(block), bytes(bytes) {}
};

template <class Kernel, class... P>
void run(const char* name, const void* identity, const Shape& shape, Kernel kernel, P... p) {
  using Arguments = std::tuple<Kernel, P...>;
  const Arguments arguments(kernel, p...);
  const auto call = [](const void* arguments) {  // by value: every thread has its own copy of the parameters
    std::apply([](auto kernel, auto... p) { kernel(p...); }, *static_cast<const Arguments*>(arguments));
  };
  launch({identity, name, {shape.grid.x, shape.grid.y, shape.grid.z}, {shape.block.x, shape.block.y, shape.block.z},
          shape.bytes, call, &arguments, sizeof arguments});  // its error is what cudaGetLastError gives
}

// Arguments are converted to the kernel's parameters before the launch, as CUDA does.
template <class... P>
auto prepare(const char* name, void (*kernel)(P...), Shape shape) {
  return [=](P... p) { run(name, reinterpret_cast<const void*>(kernel), shape, kernel, p...); };
}

// A template whose arguments the launch deduces comes as a lambda that calls it.
template <class F>
auto prepare(const char* name, F kernel, Shape shape) {
  return [=](auto... p) { run(name, nullptr, shape, kernel, p...); };
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
