#include "io/direct_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "recsdk/row_file.h"
#include "util/memory.h"

namespace recsdk::internal {
namespace {

constexpr auto kAlignment = static_cast<std::int64_t>(kDirectAlignment);
constexpr std::int64_t kPieceBytes = kDefaultBlockBytes + kAlignment;
static_assert(kPieceBytes + 2 * kAlignment <= 2 * static_cast<std::int64_t>(kHugePage),
              "a block of the usual size, with whole pages about it, fills two huge pages");
constexpr std::int64_t kMostPieceBytes = kMaxWrittenBlockBytes + kAlignment;
// Bytes between two parts of a row file: the head of a block.
constexpr std::int64_t kUsualGap = 64;
// Pieces behind the one in use: more than one only while they are small.
constexpr std::size_t kAhead = 2;
constexpr std::int64_t kSmallPiece = kDefaultBlockBytes * 5 / 4;

std::int64_t round_down(std::int64_t offset) { return offset / kAlignment * kAlignment; }
std::int64_t round_up(std::int64_t offset) { return round_down(offset + kAlignment - 1); }

}  // namespace

// All that takes memory comes before the file is opened.
DirectReader::DirectReader(int descriptor, std::int64_t offset)
    : file_size_(size_of_plain_file(descriptor).value_or(0)) {
  pieces_.push_back(make_piece(offset, offset + kPieceBytes));
  file_ = open_direct(descriptor);
  if (!file_.is_open()) return;
  try {
    for (std::thread& thread : threads_) thread = std::thread([this] { serve(); });
  } catch (const std::exception&) {
    return;  // there is one thread less, or no memory for it
  }
}

DirectReader::~DirectReader() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

// Memory is a little larger than needed, so that it fits later pieces too.
std::shared_ptr<DirectReader::Piece> DirectReader::make_piece(std::int64_t begin,
                                                              std::int64_t end) {
  constexpr std::int64_t kMultiple = std::int64_t{64} << 10;
  auto piece = std::make_shared<Piece>();
  piece->start = round_down(begin);
  piece->begin = begin;
  piece->end = end;
  const std::int64_t bytes = round_up(end) - piece->start;
  piece->data = memory_.take((bytes + kMultiple - 1) / kMultiple * kMultiple);
  return piece;
}

// Drops pieces so that the last one that begins at the offset or before it is in front.
void DirectReader::drop_before(std::int64_t offset) noexcept {
  while (pieces_.size() > 1 && pieces_[1]->begin <= offset) pieces_.pop_front();
}

const DirectReader::Piece& DirectReader::wait_for_front(std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Piece> front = pieces_.front();
  changed_.wait(lock, [&] { return front->is_done; });
  return *front;
}

std::size_t DirectReader::read(std::int64_t offset, std::span<std::byte> bytes) {
  if (!has_threads()) return 0;
  std::unique_lock lock(mutex_);
  drop_before(offset);
  if (pieces_.front()->begin > offset || pieces_.front()->end <= offset) return 0;
  const Piece& piece = wait_for_front(lock);
  if (piece.filled <= offset) return 0;
  const std::size_t n =
      std::min(bytes.size(), static_cast<std::size_t>(std::min(piece.filled, piece.end) - offset));
  std::memcpy(bytes.data(), piece.data.get() + (offset - piece.start), n);
  // If reads go on like this, nobody calls take, which would plan; so plan here.
  const std::int64_t middle = piece.begin + (piece.end - piece.begin) / 2;
  if (offset + static_cast<std::int64_t>(n) >= middle) plan(pieces_.back()->end, kPieceBytes);
  return n;
}

std::shared_ptr<const std::byte[]> DirectReader::take(std::int64_t offset, std::size_t size) {
  const Part part{offset, offset + static_cast<std::int64_t>(size)};
  const bool is_regular = last_ && last_->size() == part.size();
  if (!has_threads() || part.size() > kMaxWrittenBlockBytes) return nullptr;
  std::unique_lock lock(mutex_);
  drop_before(part.begin);
  const auto is_within = [&](const Piece& piece) {
    return piece.begin <= part.begin && part.end <= piece.end;
  };
  if (!is_within(*pieces_.front()) && is_regular) {
    std::shared_ptr<Piece> piece = make_piece(part.begin, part.end);
    pieces_.resize(1);  // in place: this takes no memory, so there is always a front
    pieces_.front() = std::move(piece);
    changed_.notify_all();
  }
  std::shared_ptr<const std::byte[]> taken;
  if (is_within(*pieces_.front())) {
    is_regular || !last_ ? plan_after(part) : plan(pieces_.back()->end, kPieceBytes);
    const Piece& piece = wait_for_front(lock);
    if (piece.filled >= part.end)
      taken = std::shared_ptr<const std::byte[]>(piece.data,
                                                 piece.data.get() + (part.begin - piece.start));
  }
  last_ = part;
  return taken;
}

// Plans as if parts of this size followed at equal distances.
void DirectReader::plan_after(const Part& part) noexcept {
  const std::int64_t gap = last_ ? part.begin - last_->end : kUsualGap;
  const std::int64_t stride = std::max<std::int64_t>((gap < 0 ? kUsualGap : gap) + part.size(), 1);
  const std::int64_t fitting = (pieces_.front()->end - part.end) / stride;
  const std::int64_t next = part.end + fitting * stride;
  if (pieces_.size() > 1 && pieces_[1]->begin != next) pieces_.resize(1);
  const std::int64_t count = std::max<std::int64_t>(kPieceBytes / stride, 1);
  plan(pieces_.size() > 1 ? pieces_.back()->end : next, count * stride);
}

// Plans pieces of `length` bytes from `next` on, as far as the file goes. Best effort.
void DirectReader::plan(std::int64_t next, std::int64_t length) noexcept {
  length = std::min(length, kMostPieceBytes);
  const std::size_t most = 1 + (length <= kSmallPiece ? kAhead : 1);
  try {
    while (pieces_.size() < most && next < file_size_) {
      pieces_.push_back(make_piece(next, std::min(next + length, file_size_)));
      next += length;
    }
  } catch (const std::exception&) {
    // No memory: less is read ahead.
  }
  changed_.notify_all();
}

void DirectReader::serve() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto next = [&] {
      return std::find_if(pieces_.begin(), pieces_.end(),
                          [](const auto& piece) { return !piece->is_claimed; });
    };
    changed_.wait(lock, [&] { return stopping_ || next() != pieces_.end(); });
    if (stopping_) return;
    const std::shared_ptr<Piece> piece = *next();
    piece->is_claimed = true;
    lock.unlock();
    fill(*piece);
    lock.lock();
    piece->is_done = true;
    changed_.notify_all();
  }
}

// It gets fewer bytes only at the end of the file, or after an error.
void DirectReader::fill(Piece& piece) const noexcept {
  const std::int64_t end = round_up(piece.end);
  piece.filled = piece.start;
  while (piece.filled < end) {
    const std::int64_t done = piece.filled - piece.start;
    const ssize_t n = ::pread(file_.number(), piece.data.get() + done,
                              static_cast<std::size_t>(end - piece.filled), piece.filled);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    piece.filled += n;
    // A short read ends the file, or leaves a place from which direct reads cannot go on.
    if (piece.filled % kAlignment != 0) break;
  }
}

}  // namespace recsdk::internal
