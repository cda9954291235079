// The rows that missing keys of a frozen table share, in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "recsdk/serving/frozen.h"
#include "recsdk/types.h"
#include "serving/format.h"

namespace recsdk::internal {

/// Records of all of them, in the order of rows; they come in any.
class SharedImage {
 public:
  SharedImage() = default;
  SharedImage(FrozenDType dtype, std::int64_t dim, std::int64_t num_rows);

  /// Adds weights (m, D) of rows, each under a key (m,) that reads it. Throws
  /// std::invalid_argument for one that came before, if the table has none, and for a row that
  /// the dtype cannot hold; then none of the call is added.
  void add(const std::string& table, std::span<const Key> keys, const float* weights);
  /// Throws std::invalid_argument unless all have come.
  void require_whole(const std::string& table) const;
  bool is_empty() const { return num_added_ == 0; }

  std::int64_t num_rows() const { return num_rows_; }
  const std::byte* record(std::int64_t row) const { return records_.data() + row * record_bytes_; }
  /// Those of some rows, one after the other.
  std::span<const std::byte> records(SharedRange rows) const {
    return {record(rows.begin), static_cast<std::size_t>(rows.size() * record_bytes_)};
  }
  std::int64_t num_bytes() const { return std::ssize(records_); }

 private:
  FrozenDType dtype_ = FrozenDType::kFloat32;
  std::int64_t dim_ = 0;
  std::int64_t num_rows_ = 0;
  std::int64_t record_bytes_ = 0;
  std::int64_t num_added_ = 0;
  std::vector<std::byte> records_;  // empty until the first is added
  std::vector<std::uint8_t> is_added_;
};

}  // namespace recsdk::internal
