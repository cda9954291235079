// Makes the index of records that pass in ascending order of hash.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "recsdk/error.h"
#include "serving/format.h"

namespace recsdk::internal {

/// `Sink` takes bytes, line after line, by append(std::span<const std::byte>).
template <class Sink>
class LineWriter {
 public:
  /// The lines are for hashes that have the first `range_bits` bits in common.
  LineWriter(Sink& sink, std::int64_t num_lines, int range_bits = 0)
      : sink_(sink), num_lines_(num_lines), range_bits_(range_bits) {}

  /// Throws Error(kCheckpoint) for more keys of a line than it can have.
  void add(std::uint64_t hash) {
    move_to(frozen_line(hash << range_bits_, num_lines_));
    if (count_ == FrozenLine::kMostRecords) {
      throw Error(ErrorCode::kCheckpoint,
                  "more than " + std::to_string(FrozenLine::kMostRecords) +
                      " keys share a line of the index, which keys that nobody chose do not do; "
                      "freeze again, with another hash seed");
    }
    if (count_ < FrozenLine::kTags) line_.tags[count_] = frozen_tag(hash);
    ++count_;
    ++num_records_;
  }
  void finish() { move_to(num_lines_); }

 private:
  void move_to(std::int64_t number) {
    for (; number_ < number; ++number_) {
      line_.begin_and_count = static_cast<std::uint64_t>(num_records_ - count_) |
                              static_cast<std::uint64_t>(count_) << 56;
      sink_.append(std::as_bytes(std::span(&line_, 1)));
      line_ = {};
      count_ = 0;
    }
  }

  Sink& sink_;
  std::int64_t num_lines_;
  int range_bits_;
  std::int64_t number_ = 0;  // of the line under way
  FrozenLine line_{};
  int count_ = 0;
  std::int64_t num_records_ = 0;
};

}  // namespace recsdk::internal
