#include "serving/shared_image.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "recsdk/freeze.h"

namespace recsdk::internal {

SharedImage::SharedImage(FrozenDType dtype, std::int64_t dim, std::int64_t num_rows)
    : dtype_(dtype),
      dim_(dim),
      num_rows_(num_rows),
      record_bytes_(kKeyBytes + internal::frozen_row_bytes(dtype, dim)) {}

void SharedImage::add(const std::string& table, std::span<const Key> keys, const float* weights) {
  if (num_rows_ == 0 && !keys.empty()) {
    throw std::invalid_argument("table '" + table +
                                "': its missing keys share no rows; set num_shared, or add none");
  }
  SharedImage next = *this;  // so that a call that fails adds none
  next.records_.resize(static_cast<std::size_t>(num_rows_ * record_bytes_));
  next.is_added_.resize(static_cast<std::size_t>(num_rows_));
  const auto dim = static_cast<std::size_t>(dim_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::int64_t row = frozen_shared_row(keys[i], num_rows_);
    if (std::exchange(next.is_added_[static_cast<std::size_t>(row)], 1) != 0) {
      throw std::invalid_argument("table '" + table + "': shared row " + std::to_string(row) +
                                  " is added twice; give each once");
    }
    std::byte* const record = next.records_.data() + row * record_bytes_;
    std::memcpy(record, &keys[i], sizeof(Key));
    if (!quantize_row(dtype_, {weights + i * dim, dim}, record + sizeof(Key)))
      throw std::invalid_argument(frozen_row_refusal(table, dtype_, keys[i]));
    ++next.num_added_;
  }
  *this = std::move(next);
}

void SharedImage::require_whole(const std::string& table) const {
  if (num_added_ == num_rows_) return;
  throw std::invalid_argument("table '" + table + "': " + std::to_string(num_added_) + " of " +
                              std::to_string(num_rows_) + " shared rows were added; add all");
}

}  // namespace recsdk::internal
