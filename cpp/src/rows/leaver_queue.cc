#include "rows/leaver_queue.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "recsdk/error.h"
#include "util/fork_gate.h"
#include "util/must.h"
#include "util/number_text.h"

namespace recsdk::internal {
namespace {

LeaversOptions validated(const LeaversOptions& options, const std::string& title) {
  if (options.max_rows < 1) {
    throw std::invalid_argument(title + ": " +
                                must("max_rows of leavers", "be 1 or more", options.max_rows));
  }
  if (options.on_overflow > OnOverflow::kRaise) {
    throw std::invalid_argument(title + ": " +
                                must("on_overflow", "be one of OnOverflow", options.on_overflow));
  }
  if (!(options.block_seconds > 0.0) || std::isinf(options.block_seconds)) {
    throw std::invalid_argument(
        title + ": " + must("block_seconds", "be finite and above 0", options.block_seconds));
  }
  return options;
}

// As a duration that no clock overflows at.
std::chrono::duration<double> seconds(double count) {
  constexpr double kLongest = 1e8;  // three years
  return std::chrono::duration<double>(std::min(count, kLongest));
}

}  // namespace

LeaverQueue::LeaverQueue(const LeaversOptions& options, std::string title,
                         std::optional<Widths> widths)
    : options_(validated(options, title)),
      title_(std::move(title)),
      has_rows_(widths.has_value()),
      dim_(has_rows_ ? widths->weights : 0),
      state_width_(has_rows_ ? widths->state : 0) {
  const auto num_rows = static_cast<std::size_t>(options_.max_rows);
  try {
    leaving_.resize(num_rows);
    weights_.resize(num_rows * static_cast<std::size_t>(dim_));
    state_.resize(num_rows * static_cast<std::size_t>(state_width_));
  } catch (const std::length_error&) {
    throw std::bad_alloc();
  }
}

std::int64_t LeaverQueue::reserve(std::int64_t count) {
  if (options_.on_overflow == OnOverflow::kCount || count == 0) return 0;
  std::unique_lock lock(mutex_);
  if (is_closed_) return 0;
  const auto fail = [&](ErrorCode code, const std::string& why) {
    throw Error(code, title_ + ": " + std::to_string(count) +
                          " keys would leave, and the reader of leavers has room for " +
                          std::to_string(num_places()) + " of max_rows " +
                          std::to_string(options_.max_rows) + why);
  };
  if (count > num_places() && options_.on_overflow == OnOverflow::kRaise)
    fail(ErrorCode::kCapacity, "; read what has left, or raise its max_rows");
  // Rows that leases may use become ready by other calls of the table, which wait for this one. A
  // reader that takes row numbers of an index may wait for it too.
  if (count > num_places() + num_readable()) fail(ErrorCode::kCapacity, why_not_by_reading(count));
  const bool has_room = has_places_.wait_for(lock, seconds(options_.block_seconds),
                                             [&] { return is_closed_ || count <= num_places(); });
  if (!has_room) {
    fail(ErrorCode::kBusy, ", and nobody has read for " + number_text(options_.block_seconds) +
                               " seconds; read on another thread, or raise its max_rows");
  }
  if (is_closed_) return 0;
  num_reserved_ += count;
  return count;
}

std::string LeaverQueue::why_not_by_reading(std::int64_t count) const {
  if (count > options_.max_rows) return " even once all is read; raise its max_rows";
  const std::int64_t num_in_use = num_held_ - num_ready_;
  std::string why;
  if (num_in_use > 0) {
    why += "; " + std::to_string(num_in_use) +
           " places are of rows that batches in flight may use: release their leases first";
  }
  if (!has_rows_ && num_ready_ > 0) {
    why += "; " + std::to_string(num_ready_) +
           " places are of keys that nobody has taken yet: take and free them first";
  }
  return why + ", or raise its max_rows";
}

void LeaverQueue::cancel(std::int64_t num_reserved) noexcept {
  const std::scoped_lock lock(mutex_);
  num_reserved_ -= std::min(num_reserved, num_reserved_);
}

void LeaverQueue::note(Key key, std::uint32_t row, LeaveCause cause, std::uint64_t epoch) noexcept {
  const std::scoped_lock lock(mutex_);
  if (is_closed_) return;
  if (num_reserved_ > 0) --num_reserved_;
  if (num_places() < 1) {
    ++num_lost_;
    return;
  }
  leaving_[place(num_held_++)] = {key, epoch, row, cause};
}

bool LeaverQueue::has_waiting(std::uint64_t epoch) const noexcept {
  const std::scoped_lock lock(mutex_);
  return num_ready_ < num_held_ && leaving_[place(num_ready_)].epoch < epoch;
}

void LeaverQueue::copy_before(std::uint64_t epoch, const ReadRow& read_row) noexcept {
  const std::scoped_lock lock(mutex_);
  if (is_closed_) return;
  const std::int64_t num_before = num_ready_;
  for (; num_ready_ < num_held_; ++num_ready_) {
    const std::size_t at = place(num_ready_);
    if (leaving_[at].epoch >= epoch) break;
    read_row(leaving_[at].row, weights_.data() + at * static_cast<std::size_t>(dim_),
             state_.data() + at * static_cast<std::size_t>(state_width_));
  }
  num_ended_ += static_cast<std::uint64_t>(num_ready_ - num_before);
  if (num_ready_ > num_before) has_ready_.happen();
}

// Rows that leases may still use are not copied any more.
void LeaverQueue::close() noexcept {
  const std::scoped_lock lock(mutex_);
  is_closed_ = true;
  num_held_ = num_ready_;
  num_reserved_ = 0;
  has_ready_.happen();
  has_places_.notify_all();
}

bool LeaverQueue::is_closed() const {
  const std::scoped_lock lock(mutex_);
  return is_closed_;
}

void LeaverQueue::check(const LeaversBuffer& buffer) const {
  if (buffer.capacity < 1 || buffer.keys == nullptr) {
    throw std::invalid_argument(title_ +
                                ": reading leavers needs a capacity of 1 or more and room for "
                                "keys");
  }
}

std::int64_t LeaverQueue::pop(const LeaversBuffer& buffer) {
  const std::int64_t count = std::min(buffer.capacity, num_ready_);
  copy_out(buffer, count);
  first_ = static_cast<std::int64_t>(place(count));
  num_ready_ -= count;
  num_held_ -= count;
  return count;
}

std::int64_t LeaverQueue::read(const LeaversBuffer& buffer) {
  check(buffer);
  const std::scoped_lock lock(mutex_);
  const std::int64_t count = pop(buffer);
  if (count > 0) has_places_.notify_all();
  return count;
}

std::int64_t LeaverQueue::take(const LeaversBuffer& buffer) {
  check(buffer);
  const std::scoped_lock lock(mutex_);
  const std::int64_t count = pop(buffer);
  num_taken_ += count;
  return count;
}

void LeaverQueue::free_rows(std::int64_t count) noexcept {
  const std::scoped_lock lock(mutex_);
  num_taken_ -= std::clamp<std::int64_t>(count, 0, num_taken_);
  has_places_.notify_all();
}

bool LeaverQueue::wait(double at_most) const {
  if (!(at_most >= 0.0)) {
    throw std::invalid_argument(title_ + ": " +
                                must("the seconds to wait for leavers", "be 0 or more", at_most));
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds(at_most));
  for (;;) {
    const std::uint32_t seen = has_ready_.count();
    {
      const auto gate = hold_off_fork();
      const std::scoped_lock lock(mutex_);
      const bool has_ready = num_ready_ > 0;
      if (has_ready || is_closed_ || Clock::now() >= end) return has_ready;
    }
    has_ready_.wait_since(seen, std::max(end - Clock::now(), Clock::duration::zero()));
  }
}

void LeaverQueue::copy_out(const LeaversBuffer& buffer, std::int64_t count) const {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t at = place(i);
    buffer.keys[i] = leaving_[at].key;
    if (buffer.causes != nullptr) buffer.causes[i] = leaving_[at].cause;
    if (buffer.rows != nullptr) buffer.rows[i] = leaving_[at].row;
    if (buffer.weights != nullptr)
      std::copy_n(weights_.data() + at * static_cast<std::size_t>(dim_), dim_,
                  buffer.weights + i * dim_);
    if (buffer.state != nullptr)
      std::copy_n(state_.data() + at * static_cast<std::size_t>(state_width_), state_width_,
                  buffer.state + i * state_width_);
  }
}

std::int64_t LeaverQueue::size() const {
  const std::scoped_lock lock(mutex_);
  return num_ready_;
}

std::uint64_t LeaverQueue::num_lost() const {
  const std::scoped_lock lock(mutex_);
  return num_lost_;
}

std::uint64_t LeaverQueue::num_ended() const {
  const std::scoped_lock lock(mutex_);
  return num_ended_;
}

}  // namespace recsdk::internal
