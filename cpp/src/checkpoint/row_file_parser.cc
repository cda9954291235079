#include "checkpoint/row_file_parser.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "io/codec.h"

namespace recsdk::internal {
namespace {

// So few bytes are still in the processor's cache when their second checksum is computed.
constexpr std::size_t kPiece = std::size_t{256} << 10;

}  // namespace

RowFileParser::RowFileParser(std::shared_ptr<ByteSource> source, std::int64_t size,
                             std::string name, const ReadOptions& options)
    : source_(std::move(source)), size_(size), name_(std::move(name)), options_(options) {
  if (size_ < 0) throw std::invalid_argument("the size of '" + name_ + "' is negative");
  read_header();
}

bool RowFileParser::next(RowBlock& block) {
  const std::int64_t place = offset_;
  const BlockHead head = read_head();
  Memory memory = read_payload(head, place);
  if (head.type == kEndBlock) {
    check_end(memory.get(), place);
    return false;
  }
  ++num_blocks_;
  block = make_block(head, std::move(memory));
  return true;
}

// Throws unless `size` more bytes are there; the block's checksum begins with them.
void RowFileParser::begin_part(std::size_t size) {
  if (static_cast<std::int64_t>(size) > size_ - offset_)
    throw_damaged(at(offset_), "the file ends here, within a block or before its end block");
  block_checksum_.reset();
}

void RowFileParser::add_checksums(std::span<const std::byte> bytes) {
  checksum_.add(bytes);
  block_checksum_.add(bytes);
}

// Reads bytes that must be there, and adds them to both checksums.
void RowFileParser::read_some(std::span<std::byte> bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const std::size_t n = source_->read(offset_, bytes.subspan(done));
    if (n == 0 || n > bytes.size() - done)
      throw_damaged(at(offset_), "the file is shorter than its size says");
    done += n;
    offset_ += static_cast<std::int64_t>(n);
  }
  add_checksums(bytes);
}

void RowFileParser::read_exactly(std::span<std::byte> bytes) {
  begin_part(bytes.size());
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPiece, bytes.size())))
    read_some(bytes.first(std::min(kPiece, bytes.size())));
}

// Bytes that must be there: where the source has them in memory, or else, also if keys would not be
// aligned there, read into memory of our own.
RowFileParser::Memory RowFileParser::take_or_read(std::size_t size) {
  begin_part(size);
  if (Memory taken = source_->take(offset_, size)) {
    std::span<const std::byte> bytes(taken.get(), size);
    offset_ += static_cast<std::int64_t>(size);
    for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPiece, bytes.size())))
      add_checksums(bytes.first(std::min(kPiece, bytes.size())));
    if (reinterpret_cast<std::uintptr_t>(taken.get()) % alignof(Key) == 0) return taken;
    const auto own = memory_.take(static_cast<std::int64_t>(size));
    std::memcpy(own.get(), taken.get(), size);
    return own;
  }
  const auto own = memory_.take(static_cast<std::int64_t>(size));
  read_exactly({own.get(), size});
  return own;
}

void RowFileParser::read_header() {
  FileHead head;
  const auto fixed = std::as_writable_bytes(std::span(&head, 1));
  if (size_ < static_cast<std::int64_t>(sizeof(head)))
    throw_damaged(at(0), "the file ends within its header");
  read_exactly(fixed);
  check(head, size_, name_);
  std::vector<std::byte> bytes(head.header_bytes);
  std::copy(fixed.begin(), fixed.end(), bytes.begin());
  read_exactly(std::span(bytes).subspan(sizeof(head)));
  header_ = decode(bytes, name_);
  std::memcpy(&file_checksum_, bytes.data() + bytes.size() - 8, 8);
}

BlockHead RowFileParser::read_head() {
  const std::int64_t place = offset_;
  BlockHead head;
  read_exactly(std::as_writable_bytes(std::span(&head, 1)));
  check(head, header_, size_ - offset_, at(place));
  if (head.file_checksum != file_checksum_)
    throw_damaged(at(place), "this block belongs to another file");
  if (head.index != num_blocks_)
    throw_damaged(at(place), "block " + std::to_string(head.index) + " where block " +
                                 std::to_string(num_blocks_) + " must be");
  if (std::pair(head.type, head.cause) < last_)
    throw_damaged(at(place), "blocks are not in the order of rows, then erased keys by cause");
  last_ = {head.type, head.cause};
  check_totals(head, place);
  return head;
}

// Refuses a block that brings more than the file may hold.
void RowFileParser::check_totals(const BlockHead& head, std::int64_t place) const {
  const auto check_one = [&](BlockKind kind, std::int64_t before, std::optional<std::int64_t> most,
                             const char* what) {
    const auto n = static_cast<std::int64_t>(head.num_rows);
    if (head.type != static_cast<std::uint8_t>(kind) || !most || n <= *most - before) return;
    throw_damaged(at(place), "a block brings the file to " + std::to_string(before + n) + " " +
                                 what + ", and it must have " + std::to_string(*most));
  };
  check_one(BlockKind::kRows, summary_.num_rows, options_.max_rows, "rows");
  check_one(BlockKind::kErased, summary_.num_erased, options_.max_erased, "erased keys");
}

RowFileParser::Memory RowFileParser::read_payload(const BlockHead& head, std::int64_t place) {
  Memory stored = take_or_read(head.stored_bytes);
  if (block_checksum_.value() != head.payload_checksum)
    throw_damaged(at(place), "the checksum of a block's content differs");
  if (head.codec == static_cast<std::uint8_t>(Codec::kNone)) return stored;
  return unpack(head, {stored.get(), head.stored_bytes}, place);
}

RowFileParser::Memory RowFileParser::unpack(const BlockHead& head,
                                            std::span<const std::byte> stored, std::int64_t place) {
  const auto codec = static_cast<Codec>(head.codec);
  if (!has_codec(codec)) {
    throw Error(ErrorCode::kCheckpoint,
                "'" + name_ +
                    "' is compressed with zstd, which is missing here; install libzstd, " +
                    "or get a copy without compression");
  }
  const auto raw = memory_.take(static_cast<std::int64_t>(head.raw_bytes));
  if (!decompress(codec, stored, {raw.get(), head.raw_bytes}))
    throw_damaged(at(place), "a block does not decompress to its size");
  return raw;
}

RowBlock RowFileParser::make_block(const BlockHead& head, Memory memory) {
  RowBlock block;
  block.kind = static_cast<BlockKind>(head.type);
  block.cause = static_cast<LeaveCause>(head.cause);
  const std::byte* const bytes = memory.get();
  block.memory = std::move(memory);
  block.keys = {reinterpret_cast<const Key*>(bytes), head.num_rows};
  const auto n = static_cast<std::int64_t>(head.num_rows);
  (block.kind == BlockKind::kRows ? summary_.num_rows : summary_.num_erased) += n;
  if (block.kind == BlockKind::kErased) count_causes(summary_, block.cause, n);
  if (block.kind == BlockKind::kRows) {
    const std::byte* array = bytes + n * static_cast<std::int64_t>(sizeof(Key));
    for (const FileField& field : header_.fields) {
      block.fields.push_back(array);
      array += padded(n * field.row_bytes());
    }
  }
  return block;
}

void RowFileParser::check_end(const std::byte* payload, std::int64_t place) {
  EndPayload end;
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

}  // namespace recsdk::internal
