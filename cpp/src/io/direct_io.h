// Reading and writing past the page cache (O_DIRECT), where the file system can do that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace recsdk::internal {

/// Addresses, offsets and sizes must be multiples of it. Disks demand 512 or 4096.
inline constexpr std::size_t kDirectAlignment = 4096;
/// From this offset on a file is written past the page cache; smaller files are read through it.
inline constexpr std::int64_t kDirectFrom = std::int64_t{8} << 20;

/// False if the environment says RECSDK_DIRECT_IO=0.
bool is_direct_io_wanted();

/// Turns O_DIRECT of a descriptor on or off; false if that fails.
bool set_direct(int descriptor, bool is_on) noexcept;

/// Bytes from a plain file's position to the next aligned place; absent if it is no plain file.
std::optional<std::size_t> bytes_to_direct_place(int descriptor) noexcept;

/// Whether it is a plain file of at least `least` bytes that, judged by samples, is not in the page
/// cache.
bool is_worth_direct(int descriptor, std::int64_t least) noexcept;

/// The size of a plain file; absent if it is no plain file.
std::optional<std::int64_t> size_of_plain_file(int descriptor) noexcept;

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  bool is_open() const noexcept { return number_ >= 0; }
  int number() const noexcept { return number_; }

 private:
  int number_ = -1;
};

/// Opens a descriptor's file once more, to read past the page cache; returns no descriptor if it
/// cannot.
Descriptor open_direct(int descriptor) noexcept;

}  // namespace recsdk::internal
