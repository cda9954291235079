// A growing array of plain values that are not zeroed first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

namespace recsdk::internal {

template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  explicit Buffer(std::int64_t size) : Buffer() { resize(size); }

  /// Makes room for `size` values; what they are is unspecified. Aligned to 64 bytes.
  void resize(std::int64_t size) {
    if (size > capacity_) {
      data_.reset(static_cast<T*>(
          ::operator new(static_cast<std::size_t>(size) * sizeof(T), std::align_val_t{64})));
      capacity_ = size;
    }
    size_ = size;
  }

  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }
  std::int64_t size() const noexcept { return size_; }
  /// Values that it has memory for.
  std::int64_t capacity() const noexcept { return capacity_; }
  T& operator[](std::int64_t i) noexcept { return data_.get()[i]; }
  const T& operator[](std::int64_t i) const noexcept { return data_.get()[i]; }

 private:
  struct Delete {
    void operator()(T* p) const noexcept { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Delete> data_;
  std::int64_t capacity_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace recsdk::internal
