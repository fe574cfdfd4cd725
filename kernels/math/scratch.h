// Reusable, 64-byte aligned working memory, one set per thread.
//
// The math kernels are compiled once per instruction set, and a standard container instantiated in
// an AVX-512 translation unit could be the copy that the linker keeps for everyone. So they take
// memory from here (compiled once, for the plain instruction set) and use no containers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace hybridge {

// Each user of scratch memory has its own slot: the thread that runs an op also runs some of the
// op's tasks, so the two must not share a buffer.
enum class ScratchSlot : int {
  kOperator = 0,  // lives for one call of an op, allocated by the thread that calls it
  kTask = 1,      // lives for one parallel task
  kProduct = 2,   // lives for one matrix product within a call of an op, in the calling thread
};

// Returns at least `bytes` of uninitialised memory, valid until the same thread asks for the same
// slot again. Throws std::bad_alloc.
void* scratch_bytes(ScratchSlot slot, std::size_t bytes);

// Cuts one scratch allocation into aligned pieces. Run the same sequence of `take` calls on a
// default-constructed arena first to learn the size, then on one with memory behind it.
class ScratchArena {
 public:
  ScratchArena() = default;
  explicit ScratchArena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(std::size_t count) {
    char* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    // A size that overflowed, or was negative, must not pass for a small one.
    if (count > (std::size_t{1} << 56) / sizeof(T)) throw std::bad_alloc();
    const std::size_t size = count * sizeof(T);
    used_ += (size + 63) / 64 * 64;
#if defined(__SANITIZE_ADDRESS__)
    // An access between the pieces is an error like one outside an allocation.
    used_ += 64;
    if (piece != nullptr)
      __asan_poison_memory_region(piece + size, used_ - (piece - memory_) - size);
#endif
    return reinterpret_cast<T*>(piece);
  }

  std::size_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace hybridge
