#include "math/scratch.h"

#include <cstdlib>
#include <new>

namespace hybridge {
namespace {

constexpr std::size_t kAlignment = 64;

struct Buffer {
  void* memory = nullptr;
  std::size_t size = 0;

  ~Buffer() { std::free(memory); }

  void* at_least(std::size_t bytes) {
    if (bytes <= size) return memory;
    std::free(memory);
    memory = nullptr;
    size = 0;
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (rounded >= bytes) memory = std::aligned_alloc(kAlignment, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    size = rounded;
    return memory;
  }
};

thread_local Buffer buffers[3];  // one for each ScratchSlot

}  // namespace

void* scratch_bytes(ScratchSlot slot, std::size_t bytes) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(buffer.memory, buffer.size);
#endif
  void* memory = buffer.at_least(bytes == 0 ? 1 : bytes);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(static_cast<char*>(memory) + bytes, buffer.size - bytes);
#endif
  return memory;
}

}  // namespace hybridge
