// Bytes from the operating system: 64-byte aligned, zeroed, committed when first touched, in huge pages where it has them.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace spolia {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes == 0) return;
    void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(address);
#ifdef MADV_HUGEPAGE
    if (num_bytes >= (size_t{4} << 20)) madvise(address, num_bytes, MADV_HUGEPAGE);  // a wish: failure changes nothing
#endif
  }
  ~Memory() {
    if (data_) munmap(data_, num_bytes_);
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return num_bytes_; }

  // At least num_bytes, of any content: what was there is lost when it grows.
  void reserve(size_t num_bytes) {
    if (num_bytes > num_bytes_) *this = Memory(num_bytes + num_bytes / 4);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace spolia
