#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "checkpoint/checksum.h"
#include "checkpoint/codec.h"
#include "checkpoint/format.h"
#include "recsdk/row_file.h"

namespace recsdk {

using internal::BlockHead;
using internal::throw_damaged;

namespace {

using Memory = std::shared_ptr<std::byte[]>;

Memory allocate(std::int64_t bytes) {
  return std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
}

// A file as a sequence of checked blocks.
class Parser {
 public:
  Parser(std::shared_ptr<ByteSource> source, std::int64_t size, std::string name)
      : source_(std::move(source)), size_(size), name_(std::move(name)) {
    if (size_ < 0) throw std::invalid_argument("the size of '" + name_ + "' is negative");
    read_header();
  }

  const std::string& name() const { return name_; }
  const RowFileHeader& header() const { return header_; }
  const RowFileSummary& summary() const { return summary_; }

  /// False at the end, which has been checked then.
  bool next(RowBlock& block) {
    const std::int64_t place = offset_;
    const BlockHead head = read_head();
    Memory memory = read_payload(head, place);
    if (head.type == internal::kEndBlock) {
      check_end(memory.get(), place);
      return false;
    }
    ++num_blocks_;
    block = make_block(head, std::move(memory), place);
    return true;
  }

 private:
  internal::Place at(std::int64_t offset) const { return {name_, offset}; }

  void read_exactly(std::span<std::byte> bytes) {
    const std::int64_t begin = offset_;
    if (static_cast<std::int64_t>(bytes.size()) > size_ - offset_)
      throw_damaged(at(begin), "the file ends here, within a block or before its end block");
    for (std::size_t done = 0; done < bytes.size();) {
      const std::size_t n = source_->read(offset_, bytes.subspan(done));
      if (n == 0 || n > bytes.size() - done)
        throw_damaged(at(offset_), "the file is shorter than its size says");
      done += n;
      offset_ += static_cast<std::int64_t>(n);
    }
    checksum_.add(bytes);
  }

  void read_header() {
    internal::FileHead head;
    const auto fixed = std::as_writable_bytes(std::span(&head, 1));
    if (size_ < static_cast<std::int64_t>(sizeof(head)))
      throw_damaged(at(0), "the file ends within its header");
    read_exactly(fixed);
    internal::check(head, size_, name_);
    std::vector<std::byte> bytes(head.header_bytes);
    std::copy(fixed.begin(), fixed.end(), bytes.begin());
    read_exactly(std::span(bytes).subspan(sizeof(head)));
    header_ = internal::decode(bytes, name_);
    std::memcpy(&file_checksum_, bytes.data() + bytes.size() - 8, 8);
  }

  BlockHead read_head() {
    const std::int64_t place = offset_;
    BlockHead head;
    read_exactly(std::as_writable_bytes(std::span(&head, 1)));
    internal::check(head, header_, size_ - offset_, at(place));
    if (head.file_checksum != file_checksum_)
      throw_damaged(at(place), "this block belongs to another file");
    if (head.index != num_blocks_)
      throw_damaged(at(place), "block " + std::to_string(head.index) + " where block " +
                                   std::to_string(num_blocks_) + " must be");
    if (head.type < last_type_)
      throw_damaged(at(place), "blocks are not in the order of rows, erased keys, policies");
    last_type_ = head.type;
    return head;
  }

  Memory read_payload(const BlockHead& head, std::int64_t place) {
    Memory stored = allocate(static_cast<std::int64_t>(head.stored_bytes));
    const std::span<std::byte> bytes(stored.get(), head.stored_bytes);
    read_exactly(bytes);
    if (internal::checksum64(bytes) != head.payload_checksum)
      throw_damaged(at(place), "the checksum of a block's content differs");
    if (head.codec == static_cast<std::uint8_t>(Codec::kNone)) return stored;
    return unpack(head, bytes, place);
  }

  Memory unpack(const BlockHead& head, std::span<const std::byte> stored, std::int64_t place) {
    const auto codec = static_cast<Codec>(head.codec);
    if (!has_codec(codec)) {
      throw Error(ErrorCode::kCheckpoint,
                  "'" + name_ +
                      "' is compressed with zstd, which is missing here; install libzstd, " +
                      "or get a copy without compression");
    }
    Memory raw = allocate(static_cast<std::int64_t>(head.raw_bytes));
    if (!internal::decompress(codec, stored, {raw.get(), head.raw_bytes}))
      throw_damaged(at(place), "a block does not decompress to its size");
    return raw;
  }

  RowBlock make_block(const BlockHead& head, Memory memory, std::int64_t place) {
    RowBlock block;
    block.kind = static_cast<BlockKind>(head.type);
    const std::byte* const bytes = memory.get();
    block.memory = std::move(memory);
    if (block.kind == BlockKind::kPolicy) {
      read_policy({bytes, head.raw_bytes}, place, block);
      return block;
    }
    block.keys = {reinterpret_cast<const Key*>(bytes), head.num_rows};
    const auto n = static_cast<std::int64_t>(head.num_rows);
    (block.kind == BlockKind::kRows ? summary_.num_rows : summary_.num_erased) += n;
    if (block.kind == BlockKind::kRows) {
      const std::byte* array = bytes + n * static_cast<std::int64_t>(sizeof(Key));
      for (const FileField& field : header_.fields) {
        block.fields.push_back(array);
        array += internal::padded(n * field.row_bytes());
      }
    }
    return block;
  }

  void read_policy(std::span<const std::byte> bytes, std::int64_t place, RowBlock& block) {
    std::uint32_t length = 0;
    if (bytes.size() >= sizeof(length)) std::memcpy(&length, bytes.data(), sizeof(length));
    const bool fits = length >= 1 && length <= internal::kMaxPolicyName &&
                      length <= bytes.size() - sizeof(length);
    if (!fits) throw_damaged(at(place), "a policy's name does not fit its block");
    bytes = bytes.subspan(sizeof(length));
    block.name.assign(reinterpret_cast<const char*>(bytes.data()), length);
    block.data = bytes.subspan(length);
  }

  void check_end(const std::byte* payload, std::int64_t place) {
    internal::EndPayload end;
    std::memcpy(&end, payload, sizeof(end));
    if (end.num_rows != static_cast<std::uint64_t>(summary_.num_rows) ||
        end.num_erased != static_cast<std::uint64_t>(summary_.num_erased) ||
        end.num_blocks != num_blocks_) {
      throw_damaged(at(place), "the totals at the end differ from what the file holds");
    }
    if (offset_ != size_) throw_damaged(at(offset_), "bytes follow the end of the file's content");
    summary_.num_bytes = size_;
    summary_.checksum = checksum_.text();
  }

  std::shared_ptr<ByteSource> source_;
  std::int64_t size_;
  std::string name_;
  RowFileHeader header_;
  std::uint64_t file_checksum_ = 0;
  std::int64_t offset_ = 0;
  std::uint64_t num_blocks_ = 0;
  std::uint8_t last_type_ = 0;
  internal::StreamChecksum checksum_;
  RowFileSummary summary_;
};

// Runs a parser one block ahead of its user.
class ReadAhead {
 public:
  explicit ReadAhead(Parser& parser) : parser_(parser) {
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
    changed_.wait(lock, [&] { return ready_ || is_over_; });
    if (!ready_) {
      if (error_) std::rethrow_exception(error_);
      return false;
    }
    block = std::move(*ready_);
    ready_.reset();
    changed_.notify_all();
    return true;
  }

 private:
  void serve() {
    try {
      RowBlock block;
      while (parser_.next(block)) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !ready_ || stopping_; });
        if (stopping_) return;
        ready_ = std::move(block);
        changed_.notify_all();
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }

  Parser& parser_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<RowBlock> ready_;
  bool is_over_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace

struct RowFileReader::Impl {
  Impl(std::shared_ptr<ByteSource> source, std::int64_t size, std::string name,
       const ReadOptions& read_options)
      : parser(std::move(source), size, std::move(name)), options(read_options) {}

  void start() {
    is_at_start = false;
    if (!options.in_background) return;
    try {
      ahead = std::make_unique<ReadAhead>(parser);
    } catch (const std::system_error&) {
      // The system gives no thread: the caller reads.
    }
  }

  bool next(RowBlock& block) {
    if (is_over) return false;
    if (is_at_start) start();
    try {
      is_over = !(ahead ? ahead->next(block) : parser.next(block));
    } catch (...) {
      is_broken = true;
      throw;
    }
    if (is_over) ahead.reset();
    return !is_over;
  }

  Parser parser;
  ReadOptions options;
  bool is_at_start = true;
  bool is_over = false;
  bool is_broken = false;
  std::unique_ptr<ReadAhead> ahead;  // destroyed before the parser
};

RowFileReader::RowFileReader(std::shared_ptr<ByteSource> source, std::int64_t size,
                             std::string name, const ReadOptions& options)
    : impl_(std::make_unique<Impl>(std::move(source), size, std::move(name), options)) {}
RowFileReader::~RowFileReader() = default;
RowFileReader::RowFileReader(RowFileReader&&) noexcept = default;
RowFileReader& RowFileReader::operator=(RowFileReader&&) noexcept = default;

const std::string& RowFileReader::name() const { return impl_->parser.name(); }
const RowFileHeader& RowFileReader::header() const { return impl_->parser.header(); }
bool RowFileReader::next(RowBlock& block) {
  if (impl_->is_broken)
    throw std::invalid_argument("'" + name() + "' could not be read on; open it again");
  return impl_->next(block);
}
bool RowFileReader::is_at_start() const { return impl_->is_at_start; }

const RowFileSummary& RowFileReader::summary() const {
  if (!impl_->is_over)
    throw std::invalid_argument("'" + name() + "' was not read to its end; call next until false");
  return impl_->parser.summary();
}

}  // namespace recsdk
