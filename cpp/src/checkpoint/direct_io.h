// Reading and writing past the page cache (O_DIRECT), where the file system can do that.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "util/memory.h"

namespace recsdk::internal {

/// What addresses, offsets and sizes must be multiples of. Disks ask for 512 or 4096.
inline constexpr std::size_t kDirectAlignment = 4096;

/// False if the environment says RECSDK_DIRECT_IO=0.
bool is_direct_io_wanted();

/// Turns O_DIRECT of a descriptor on or off; false if it cannot be had.
bool set_direct(int descriptor, bool is_on) noexcept;

/// Bytes from a plain file's position to the next place that is aligned; absent if it is none.
std::optional<std::size_t> bytes_to_direct_place(int descriptor) noexcept;

/// Whether it is a plain file of at least `least` bytes that is not in the page cache, by samples.
bool is_worth_direct(int descriptor, std::int64_t least) noexcept;

/// Reads a file from an offset to its end, some pieces ahead of its user.
class DirectReader {
 public:
  /// Opens the descriptor's file anew, since the flag belongs to what is open. Where that fails
  /// there is nothing to read. Throws std::bad_alloc and Error(kOutOfMemory).
  DirectReader(int descriptor, std::int64_t offset);
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;
  ~DirectReader();

  /// Fills the front of `bytes`; returns how many: 0 at the end, after an error, or if `offset` is
  /// not where the last call ended.
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes);

 private:
  static constexpr std::size_t kPieceBytes = std::size_t{2} << 20;
  static constexpr std::size_t kPieces = 4;

  std::byte* piece(std::uint64_t number) const noexcept {
    return memory_.data() + number % kPieces * kPieceBytes;
  }
  void serve() noexcept;
  std::size_t fill(std::uint64_t number) const noexcept;

  int descriptor_;
  std::int64_t begin_;     // of the first piece
  std::int64_t position_;  // where the next read must go on
  Pages memory_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::size_t, kPieces> sizes_{};  // bytes in pieces; a short one is the last
  std::uint64_t num_filled_ = 0;
  std::uint64_t num_used_ = 0;
  bool is_over_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace recsdk::internal
