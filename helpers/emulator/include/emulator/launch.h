// What the source translation (translate.py) writes in place of CUDA's own syntax.
//   kernel<<<grid, block, bytes>>>(q, k)   ->  ::emu::prepare("kernel", kernel, ::emu::Shape(grid, block, bytes))(q, k)
//   __launch_bounds__(256, 2) … {          ->  {  ::emu::launch_bounds(256, 2);
//   __shared__ float x[8];                 ->  struct emu_shared_1 { float x[8]; }; auto& x = ::emu::shared<emu_shared_1, float[8]>("x").x
//   extern __shared__ char smem[];         ->  char (&smem)[] = the block's dynamic shared memory
//   const __grid_constant__ Maps maps      ->  const Maps &maps, of which the grid has one
#pragma once
#include <tuple>
#include <type_traits>

namespace emu {

struct Shape {
  dim3 grid, block;
  size_t bytes;
  Shape(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t = nullptr) : grid(grid), block(block), bytes(bytes) {}
};

// An argument as the kernel takes it: by value, what every thread has its own copy of. Once it is copied, the stack below, where
// the kernel's local variables come to lie, is filled anew: copying is traced, and leaves its own values there.
template <class P>
__attribute__((always_inline, no_sanitize("thread"))) inline P argument(const std::decay_t<P>& p) {
  struct WhenCopied {
    __attribute__((always_inline)) ~WhenCopied() { poison_stack(); }
  } when_copied;
  return p;
}

template <class... P, class Kernel>
void run(const char* name, const void* identity, const Shape& shape, Kernel kernel, P... p) {
  using Arguments = std::tuple<Kernel, std::decay_t<P>...>;
  const Arguments arguments(kernel, p...);
  const auto call = [](const void* arguments) {
    const auto enter = [](const auto& kernel, const auto&... p) __attribute__((no_sanitize("thread"))) {
      if (sizeof...(p) == 0) poison_stack();
      kernel(argument<P>(p)...);
    };
    std::apply(enter, *static_cast<const Arguments*>(arguments));
  };
  launch({identity, name, {shape.grid.x, shape.grid.y, shape.grid.z}, {shape.block.x, shape.block.y, shape.block.z},
          shape.bytes, call, &arguments, sizeof arguments});  // its error is what cudaGetLastError gives
}

// Arguments are converted to the kernel's parameters before the launch, as CUDA does.
template <class... P>
struct Prepared {
  const char* name;
  void (*kernel)(P...);
  Shape shape;
  void operator()(P... p) const { run<P...>(name, reinterpret_cast<const void*>(kernel), shape, kernel, p...); }
  template <int = 0>  // all other arguments
  __attribute__((unavailable("the launch's arguments are not those that the kernel takes"))) void operator()(...) const;
};
template <class... P>
Prepared<P...> prepare(const char* name, void (*kernel)(P...), Shape shape) {
  return {name, kernel, shape};
}

// A template whose arguments the launch deduces comes as a lambda that calls it: which instance it is, is not known.
template <class F>
auto prepare(const char* name, F kernel, Shape shape) {
  return [=](auto... p) { run<const decltype(p)&...>(name, nullptr, shape, kernel, p...); };
}

// A variable, as the one member of Holder, at the same place for all threads of the block.
template <class Holder, class Variable>
inline Holder& shared(const char* name) {
  static const char key = 0;  // its address tells variables (and template instances) apart
  constexpr size_t rank = std::rank_v<Variable>;
  constexpr ArrayShape shape = {sizeof(std::remove_all_extents_t<Variable>), rank > 4 ? 0 : rank,
                                {std::extent_v<Variable, 0>, std::extent_v<Variable, 1>, std::extent_v<Variable, 2>,
                                 std::extent_v<Variable, 3>}};
  return *static_cast<Holder*>(static_shared(&key, sizeof(Holder), alignof(Holder), name, shape));
}

template <class Array>
inline Array& dynamic_array(const char* name) {
  return *static_cast<Array*>(dynamic_shared(name));
}

// A place of shared memory, a pointer or an address of PTX, which `note` hears of under its name. A constant is none.
template <void (*note)(const char*, uint64_t), class T>
constexpr T noted(const char* name, T place) {
  if (__builtin_is_constant_evaluated()) return place;
  if constexpr (std::is_pointer_v<T>)
    note(name, reinterpret_cast<uint64_t>(place));
  else if constexpr (std::is_integral_v<T>)
    note(name, uint64_t(place));
  return place;
}

// `float *K_smem = smem + n;` in a kernel -> `float *K_smem = ::emu::named("K_smem", smem + n);`
template <class T>
constexpr T named(const char* name, T place) { return noted<name_shared>(name, place); }

// `mbarrier_init(K_full + 8 * s, 1)` -> `mbarrier_init(::emu::named_mbarrier("K_full", K_full + 8 * s), 1)`
template <class T>
inline T named_mbarrier(const char* name, T place) { return noted<name_mbarrier>(name, place); }

}  // namespace emu

// -fstack-protector: a function that is guarded comes here instead of returning if what lies behind its arrays has changed.
// The kernel's own, so that the C library's, which ends the process, isn't taken.
extern "C" __attribute__((used, noinline, visibility("hidden"))) void __stack_chk_fail() {
  emu::local_array_overrun(reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
