// How a math kernel asks for several threads without knowing who owns them.
//
// onnxruntime owns the only thread pool in the process; the op layer wraps it in this struct. A
// null `run` means "no pool": the loop then runs in the calling thread, which is what small tests
// use.
#pragma once

#include <cstddef>
#include <type_traits>

namespace hybridge {

struct Parallel {
  using Task = void (*)(void* argument, std::size_t index);

  void* context = nullptr;
  void (*run)(void* context, Task task, std::size_t count, void* argument) = nullptr;
};

// Calls body(index) for every index below count, in any order and from any thread.
template <typename Body>
inline void parallel_for(const Parallel& parallel, std::size_t count, Body&& body) {
  if (parallel.run == nullptr || count < 2) {
    for (std::size_t index = 0; index < count; ++index) body(index);
    return;
  }
  using Plain = typename std::remove_reference<Body>::type;
  parallel.run(
      parallel.context,
      [](void* argument, std::size_t index) { (*static_cast<Plain*>(argument))(index); }, count,
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace hybridge
