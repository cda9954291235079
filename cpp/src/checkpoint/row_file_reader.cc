#include "recsdk/row_file.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "checkpoint/row_file_parser.h"
#include "util/owned_here.h"

namespace recsdk {

namespace internal {
class ReadAhead;
}  // namespace internal

namespace {

// The most blocks that wait for the user; more than one only while they are small.
constexpr std::size_t kMostAhead = 3;
constexpr std::int64_t kSmallBlock = kDefaultBlockBytes * 5 / 4;

}  // namespace

// Runs a parser some blocks ahead of its user. Named by a member of what is public, so not local.
class internal::ReadAhead {
 public:
  explicit ReadAhead(std::shared_ptr<internal::RowFileParser> parser) : parser_(std::move(parser)) {
    thread_ = std::thread([this] { serve(); });
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  bool next(RowBlock& block) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty() || is_over_; });
    if (ready_.empty()) {
      if (error_) std::rethrow_exception(error_);
      return false;
    }
    block = std::move(ready_.front());
    ready_.pop_front();
    changed_.notify_all();
    return true;
  }

 private:
  void serve() {
    try {
      RowBlock block;
      while (parser_->next(block)) {
        std::unique_lock lock(mutex_);
        const std::size_t most = is_small(block) ? kMostAhead : 1;
        changed_.wait(lock, [&] { return ready_.size() < most || stopping_; });
        if (stopping_) return;
        ready_.push_back(std::move(block));
        changed_.notify_all();
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }

  bool is_small(const RowBlock& block) const {
    const auto num_keys = static_cast<std::int64_t>(block.keys.size());
    return num_keys * parser_->header().row_bytes() <= kSmallBlock;
  }

  // Shared: a child of fork, which leaves this reader behind, must not destroy the parser either.
  const std::shared_ptr<internal::RowFileParser> parser_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<RowBlock> ready_;
  bool is_over_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

struct RowFileReader::Impl {
  Impl(std::shared_ptr<ByteSource> source, std::int64_t size, std::string name,
       const ReadOptions& read_options)
      : parser(std::make_shared<internal::RowFileParser>(std::move(source), size, std::move(name),
                                                         read_options)),
        options(read_options) {}

  void start() {
    is_at_start = false;
    if (!options.in_background) return;
    try {
      ahead = internal::OwnedHere<internal::ReadAhead>(std::in_place, parser);
    } catch (const std::system_error&) {
      // The system gives no thread: the caller reads.
    }
  }

  bool next(RowBlock& block) {
    if (is_over) return false;
    if (is_at_start) start();
    try {
      is_over = !(ahead ? ahead->next(block) : parser->next(block));
    } catch (...) {
      is_broken = true;
      throw;
    }
    if (is_over) ahead.reset();
    return !is_over;
  }

  std::shared_ptr<internal::RowFileParser> parser;
  ReadOptions options;
  bool is_at_start = true;
  bool is_over = false;
  bool is_broken = false;
  internal::OwnedHere<internal::ReadAhead> ahead;
};

RowFileReader::RowFileReader(std::shared_ptr<ByteSource> source, std::int64_t size,
                             std::string name, const ReadOptions& options)
    : impl_(std::make_unique<Impl>(std::move(source), size, std::move(name), options)) {}
RowFileReader::~RowFileReader() = default;
RowFileReader::RowFileReader(RowFileReader&&) noexcept = default;
RowFileReader& RowFileReader::operator=(RowFileReader&&) noexcept = default;

const std::string& RowFileReader::name() const { return impl_->parser->name(); }
const RowFileHeader& RowFileReader::header() const { return impl_->parser->header(); }
std::int64_t RowFileReader::num_bytes() const { return impl_->parser->size(); }
std::int64_t RowFileReader::expected_rows() const {
  return impl_->options.max_rows.value_or(num_bytes() / header().row_bytes());
}
bool RowFileReader::next(RowBlock& block) {
  if (impl_->is_broken)
    throw std::invalid_argument("'" + name() + "' could not be read on; open it again");
  return impl_->next(block);
}
bool RowFileReader::is_at_start() const { return impl_->is_at_start; }

const RowFileSummary& RowFileReader::summary() const {
  if (!impl_->is_over)
    throw std::invalid_argument("'" + name() + "' was not read to its end; call next until false");
  return impl_->parser->summary();
}

}  // namespace recsdk
