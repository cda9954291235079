#include "checkpoint/row_file_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "io/checksum.h"
#include "io/codec.h"
#include "util/must.h"

namespace recsdk {

using internal::BlockHead;

namespace {

constexpr std::int64_t kMinBlockBytes = 4096;
constexpr int kFinished = internal::kEndBlock;

std::int64_t checked_block_bytes(std::int64_t bytes) {
  if (bytes < kMinBlockBytes || bytes > kMaxWrittenBlockBytes) {
    throw std::invalid_argument(internal::must(
        "block_bytes",
        "be " + std::to_string(kMinBlockBytes) + " to " + std::to_string(kMaxWrittenBlockBytes),
        bytes));
  }
  return bytes;
}

std::int64_t rows_per_block(const RowFileHeader& header, std::int64_t block_bytes) {
  header.validate();
  const auto padding = static_cast<std::int64_t>(header.fields.size()) * 8;
  return std::max<std::int64_t>((checked_block_bytes(block_bytes) - padding) / header.row_bytes(),
                                1);
}

std::uint64_t content_of(Key key, LeaveCause cause) {
  std::array<std::byte, sizeof(Key) + 1> bytes;
  std::memcpy(bytes.data(), &key, sizeof(key));
  bytes.back() = static_cast<std::byte>(cause);
  return internal::checksum64(bytes);
}

}  // namespace

RowFileWriter::Impl::Impl(ByteSink& sink, const RowFileHeader& file_header,
                          const RowFileOptions& file_options)
    : header(file_header),
      options(file_options),
      rows_per_block_(rows_per_block(header, options.block_bytes)),
      queue_(std::in_place, sink, options.in_background) {
  internal::require_codec(options.codec);
  const std::vector<std::byte> bytes = internal::encode(header);
  std::memcpy(&file_checksum_, bytes.data() + bytes.size() - 8, 8);
  auto block = queue_->acquire(static_cast<std::int64_t>(bytes.size()), 0);
  std::copy(bytes.begin(), bytes.end(), block->data());
  num_bytes = static_cast<std::int64_t>(bytes.size());
  queue_->submit(std::move(block), num_bytes);
  if (options.sums_content) summary_.content = 0;
}

void RowFileWriter::Impl::require_stage(int stage, const char* call) {
  if (stage < stage_) {
    throw std::invalid_argument(std::string("row file: ") + call +
                                " comes too late; write rows, then erased keys, then finish once");
  }
  if (stage > stage_) {
    flush_rows();
    stage_ = stage;
  }
}

void RowFileWriter::Impl::begin_block() {
  const std::int64_t most =
      std::max({options.block_bytes, internal::rows_payload_bytes(header, rows_per_block_),
                std::int64_t{sizeof(internal::EndPayload)}});
  // A compressed payload is written from other memory; others lie at multiples of 8.
  const std::int64_t offset = options.codec == Codec::kNone ? num_bytes : 0;
  block_ = queue_->acquire(most + static_cast<std::int64_t>(sizeof(BlockHead)), offset);
}

std::byte* RowFileWriter::Impl::field_array(std::byte* first, std::int64_t n,
                                            std::size_t field) const {
  std::byte* array = first + n * static_cast<std::int64_t>(sizeof(Key));
  for (std::size_t f = 0; f < field; ++f)
    array += internal::padded(n * header.fields[f].row_bytes());
  return array;
}

RowSlots RowFileWriter::Impl::row_slots() {
  require_stage(static_cast<int>(BlockKind::kRows), "write_rows");
  if (block_ == nullptr) begin_block();
  RowSlots slots;
  slots.capacity = rows_per_block_ - num_in_block_;
  slots.keys = reinterpret_cast<Key*>(payload()) + num_in_block_;
  for (std::size_t f = 0; f < header.fields.size(); ++f) {
    slots.fields.push_back(field_array(payload(), rows_per_block_, f) +
                           num_in_block_ * header.fields[f].row_bytes());
  }
  return slots;
}

void RowFileWriter::Impl::commit_rows(std::int64_t count) {
  num_in_block_ += count;
  if (num_in_block_ == rows_per_block_) flush_rows();
}

// The arrays are laid out for a full block; in a shorter block they move up.
void RowFileWriter::Impl::pack_rows() {
  for (std::size_t f = 0; f < header.fields.size(); ++f) {
    const std::int64_t bytes = num_in_block_ * header.fields[f].row_bytes();
    std::byte* const place = field_array(payload(), num_in_block_, f);
    std::memmove(place, field_array(payload(), rows_per_block_, f),
                 static_cast<std::size_t>(bytes));
    std::fill_n(place + bytes, internal::padded(bytes) - bytes, std::byte{0});
  }
}

void RowFileWriter::Impl::add_rows_to_content() {
  std::vector<std::byte> row(static_cast<std::size_t>(header.row_bytes()));
  for (std::int64_t i = 0; i < num_in_block_; ++i) {
    std::byte* end = row.data();
    const auto add = [&](const std::byte* first, std::int64_t size) {
      end = std::copy_n(first + i * size, size, end);
    };
    add(payload(), sizeof(Key));
    for (std::size_t f = 0; f < header.fields.size(); ++f)
      add(field_array(payload(), num_in_block_, f), header.fields[f].row_bytes());
    *summary_.content += internal::checksum64(row);
  }
}

void RowFileWriter::Impl::flush_rows() {
  if (num_in_block_ == 0) return;
  pack_rows();
  if (summary_.content) add_rows_to_content();
  summary_.num_rows += num_in_block_;
  flush(static_cast<std::uint8_t>(BlockKind::kRows), num_in_block_,
        internal::rows_payload_bytes(header, num_in_block_));
  num_in_block_ = 0;
}

// Writes the payload.
void RowFileWriter::Impl::flush(std::uint8_t type, std::int64_t num_rows, std::int64_t raw_bytes) {
  BlockHead head{};
  head.type = type;
  if (type == static_cast<std::uint8_t>(BlockKind::kErased))
    head.cause = static_cast<std::uint8_t>(cause_);
  head.index = num_blocks_++;
  head.num_rows = static_cast<std::uint64_t>(num_rows);
  head.raw_bytes = static_cast<std::uint64_t>(raw_bytes);
  head.file_checksum = file_checksum_;
  submit(head, raw_bytes);
}

void RowFileWriter::Impl::submit(BlockHead head, std::int64_t raw_bytes) {
  std::size_t stored = static_cast<std::size_t>(raw_bytes);
  if (options.codec != Codec::kNone && head.type != internal::kEndBlock) {
    auto packed =
        queue_->acquire(raw_bytes + static_cast<std::int64_t>(sizeof(BlockHead)), num_bytes);
    // The payload stays as it is unless compression makes it shorter.
    const auto size = internal::compress(
        options.codec, {payload(), stored},
        {packed->data() + sizeof(BlockHead), std::max<std::size_t>(stored, 1) - 1});
    if (size) {
      head.codec = static_cast<std::uint8_t>(options.codec);
      stored = *size;
      std::swap(packed, block_);
    }
    queue_->recycle(std::move(packed));
  }
  head.stored_bytes = stored;
  head.payload_checksum = internal::checksum64({payload(), stored});
  internal::seal(head);
  std::memcpy(block_->data(), &head, sizeof(head));
  const auto size = static_cast<std::int64_t>(stored + sizeof(head));
  num_bytes += size;
  queue_->submit(std::move(block_), size);
}

void RowFileWriter::Impl::write_erased(std::span<const Key> keys, LeaveCause cause) {
  if (header.kind == RowFileKind::kSnapshot)
    throw std::invalid_argument("row file: a snapshot has no erased keys; make a delta");
  require_stage(static_cast<int>(BlockKind::kErased), "write_erased");
  if (cause < cause_)
    throw std::invalid_argument(
        "row file: write_erased comes too late; write keys by ascending "
        "cause");
  cause_ = cause;
  const auto most = static_cast<std::size_t>(options.block_bytes) / sizeof(Key);
  for (; !keys.empty(); keys = keys.subspan(std::min(most, keys.size()))) {
    const std::span<const Key> part = keys.first(std::min(most, keys.size()));
    begin_block();
    std::memcpy(payload(), part.data(), part.size_bytes());
    summary_.num_erased += static_cast<std::int64_t>(part.size());
    if (summary_.content) {
      for (const Key key : part) *summary_.content += content_of(key, cause);
    }
    internal::count_causes(summary_, cause, static_cast<std::int64_t>(part.size()));
    flush(static_cast<std::uint8_t>(BlockKind::kErased), static_cast<std::int64_t>(part.size()),
          static_cast<std::int64_t>(part.size_bytes()));
  }
}

RowFileSummary RowFileWriter::Impl::finish() {
  if (stage_ == kFinished) throw std::invalid_argument("row file: it is finished already");
  require_stage(kFinished, "finish");
  const internal::EndPayload end{static_cast<std::uint64_t>(summary_.num_rows),
                                 static_cast<std::uint64_t>(summary_.num_erased), num_blocks_};
  if (block_ == nullptr) begin_block();
  std::memcpy(payload(), &end, sizeof(end));
  flush(internal::kEndBlock, 0, sizeof(end));
  summary_.num_bytes = num_bytes;
  summary_.checksum = queue_->drain();
  return summary_;
}

RowFileWriter::RowFileWriter(ByteSink& sink, const RowFileHeader& header,
                             const RowFileOptions& options)
    : impl_(std::make_unique<Impl>(sink, header, options)) {}
RowFileWriter::~RowFileWriter() = default;
RowFileWriter::RowFileWriter(RowFileWriter&&) noexcept = default;
RowFileWriter& RowFileWriter::operator=(RowFileWriter&&) noexcept = default;

void RowFileWriter::write_rows(std::span<const Key> keys, std::span<const void* const> fields) {
  const std::vector<FileField>& all = impl_->header.fields;
  if (fields.size() != all.size()) {
    throw std::invalid_argument(
        "row file: " + internal::must("fields",
                                      "have one array per field, " + std::to_string(all.size()),
                                      fields.size()));
  }
  for (std::size_t done = 0; done < keys.size();) {
    const RowSlots slots = impl_->row_slots();
    const std::size_t n = std::min(keys.size() - done, static_cast<std::size_t>(slots.capacity));
    std::memcpy(slots.keys, keys.data() + done, n * sizeof(Key));
    for (std::size_t f = 0; f < all.size(); ++f) {
      const auto bytes = static_cast<std::size_t>(all[f].row_bytes());
      std::memcpy(slots.fields[f], static_cast<const std::byte*>(fields[f]) + done * bytes,
                  n * bytes);
    }
    impl_->commit_rows(static_cast<std::int64_t>(n));
    done += n;
  }
}

void RowFileWriter::write_erased(std::span<const Key> keys, LeaveCause cause) {
  impl_->write_erased(keys, cause);
}
RowFileSummary RowFileWriter::finish() { return impl_->finish(); }
std::int64_t RowFileWriter::num_bytes() const { return impl_->num_bytes; }

}  // namespace recsdk
