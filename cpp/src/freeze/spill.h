// Records on their way to files that are sorted: parted by where they belong, in a file without a
// name, so that each part can be sorted in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace recsdk::internal {

class Spill {
 public:
  /// Buffers of all parts together have about `max_bytes`. This, `next` and `read` throw
  /// Error(kCheckpoint) for a file that cannot be made, written or read.
  Spill(const std::string& folder, std::int64_t num_parts, std::int64_t record_bytes,
        std::int64_t max_bytes);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  /// Where to put the next record of a part.
  std::byte* next(std::int64_t part);
  std::int64_t num_records(std::int64_t part) const { return parts_[index(part)].num_records; }
  /// The records of a part, in the order in which they came.
  std::vector<std::byte> read(std::int64_t part) const;

 private:
  struct Part {
    std::vector<std::byte> buffer;     // empty until its first record
    std::vector<std::int64_t> chunks;  // where full buffers lie in the file
    std::size_t used = 0;              // bytes of the buffer
    std::int64_t num_records = 0;
  };

  static std::size_t index(std::int64_t part) { return static_cast<std::size_t>(part); }
  void write_out(Part& part);

  std::string name_;
  int descriptor_ = -1;
  std::int64_t end_ = 0;  // of the file
  std::size_t record_bytes_;
  std::size_t chunk_bytes_;
  std::vector<Part> parts_;
};

/// Writes or reads all of `bytes` at a place of a file; throws Error(kCheckpoint) naming it.
void write_at(int descriptor, std::int64_t offset, std::span<const std::byte> bytes,
              const std::string& name);
void read_at(int descriptor, std::int64_t offset, std::span<std::byte> bytes,
             const std::string& name);

}  // namespace recsdk::internal
