// Row files: what is written is read again; whatever is damaged is refused.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/format.h"
#include "io/checksum.h"
#include "recsdk/row_file.h"
#include "row_files_in_memory.h"
#include "temporary_file.h"

namespace recsdk::test::row_file_test {
namespace {

RowFileHeader header(RowFileKind kind = RowFileKind::kDelta) {
  RowFileHeader made;
  made.kind = kind;
  made.dim = 3;
  made.token = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  made.fields = {{"weight", FieldType::kBfloat16, 3},
                 {"sum", FieldType::kFloat32, 1},
                 {"flags", FieldType::kUint8, 5},
                 {"step", FieldType::kInt64, 1}};
  return made;
}

/// The bytes of n elements a row, different in each.
Bytes field_bytes(const FileField& field, std::size_t n) {
  Bytes bytes(n * static_cast<std::size_t>(field.row_bytes()));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + field.name.size());
  return bytes;
}

struct Rows {
  Rows(const RowFileHeader& h, std::size_t n) : keys(n) {
    for (std::size_t i = 0; i < n; ++i)
      keys[i] = static_cast<Key>(internal::checksum64(std::as_bytes(std::span(&i, 1))));
    for (const FileField& field : h.fields) fields.push_back(field_bytes(field, n));
  }
  /// Writes rows [begin, end).
  void write(RowFileWriter& writer, const RowFileHeader& h, std::size_t begin,
             std::size_t end) const {
    std::vector<const void*> data;
    for (std::size_t f = 0; f < fields.size(); ++f)
      data.push_back(fields[f].data() + begin * static_cast<std::size_t>(h.fields[f].row_bytes()));
    writer.write_rows(std::span(keys).subspan(begin, end - begin), data);
  }
  std::vector<Key> keys;
  std::vector<Bytes> fields;
};

constexpr std::size_t kNumRows = 500;

Bytes write_sample(const RowFileOptions& options, std::size_t rows_a_call = kNumRows) {
  MemorySink sink;
  const RowFileHeader h = header();
  RowFileWriter writer(sink, h, options);
  const Rows rows(h, kNumRows);
  for (std::size_t i = 0; i < kNumRows; i += rows_a_call)
    rows.write(writer, h, i, std::min(kNumRows, i + rows_a_call));
  std::vector<Key> erased(700);
  std::iota(erased.begin(), erased.end(), -350);
  writer.write_erased(erased);
  const RowFileSummary summary = writer.finish();
  EXPECT_EQ(summary.num_bytes, static_cast<std::int64_t>(sink.content.size()));
  return sink.content;
}

RowFileOptions small_blocks(Codec codec = Codec::kNone) {
  return {.codec = codec, .block_bytes = 4096, .in_background = false};
}

/// The message of the CheckpointError that reading gives; empty if it gives none.
std::string damage_of(const Bytes& bytes, bool in_background = false) {
  try {
    read_all(open(bytes, in_background));
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCheckpoint) << error.what();
    return error.what();
  }
}

#ifndef RECSDK_TEST_EMULATED
TEST(RowFileTest, HasEveryCodec) { EXPECT_TRUE(has_codec(Codec::kZstd)); }
#endif

TEST(RowFileTest, EverythingWrittenIsRead) {
  for (const Codec codec : codecs()) {
    const Bytes bytes = write_sample(small_blocks(codec));
    for (const bool in_background : {false, true}) {
      const FileContent content = read_all(open(bytes, in_background, 1000));
      EXPECT_EQ(content.header.fields, header().fields);
      EXPECT_EQ(content.header.token, header().token);
      EXPECT_EQ(content.header.kind, RowFileKind::kDelta);
      const Rows rows(header(), kNumRows);
      ASSERT_EQ(content.rows.size(), kNumRows);
      for (std::size_t i = 0; i < kNumRows; ++i) {
        ASSERT_EQ(content.rows[i].key, rows.keys[i]);
        std::string values;
        for (std::size_t f = 0; f < rows.fields.size(); ++f) {
          const auto size = static_cast<std::size_t>(header().fields[f].row_bytes());
          values.append(reinterpret_cast<const char*>(rows.fields[f].data() + i * size), size);
        }
        ASSERT_EQ(content.rows[i].values, values);
      }
      EXPECT_EQ(content.erased.size(), 700U);
      EXPECT_EQ(content.erased.front(), -350);
      EXPECT_EQ(content.summary.num_rows, static_cast<std::int64_t>(kNumRows));
      EXPECT_EQ(content.summary.num_erased, 700);
    }
  }
}

TEST(RowFileTest, BytesDependOnContentOnly) {
  for (const Codec codec : codecs()) {
    const Bytes bytes = write_sample(small_blocks(codec));
    for (const std::size_t rows_a_call : {1UL, 7UL, 499UL}) {
      RowFileOptions options = small_blocks(codec);
      options.in_background = true;
      EXPECT_EQ(write_sample(options, rows_a_call), bytes);
    }
  }
}

TEST(RowFileTest, TheChecksumIsThatOfTheWholeFile) {
  MemorySink sink;
  RowFileWriter writer(sink, header());
  const RowFileSummary summary = writer.finish();
  internal::StreamChecksum checksum;
  checksum.add(sink.content);
  EXPECT_EQ(summary.checksum, checksum.text());
  EXPECT_EQ(read_all(open(sink.content)).summary.checksum, checksum.text());
}

TEST(RowFileTest, ARowLongerThanABlockIsABlockOfItsOwn) {
  RowFileHeader h = header();
  h.dim = 5000;
  h.fields = {{"weight", FieldType::kFloat32, 5000}};
  MemorySink sink;
  RowFileWriter writer(sink, h, small_blocks());
  const Rows rows(h, 3);
  rows.write(writer, h, 0, 3);
  writer.finish();
  EXPECT_EQ(read_all(open(sink.content)).rows.size(), 3U);
}

// ---- what the writer refuses --------------------------------------------------------------------

TEST(RowFileTest, HeadersThatMakeNoSenseAreRefused) {
  const auto refuses = [](const auto& change) {
    RowFileHeader h = header();
    change(h);
    EXPECT_THROW(h.validate(), std::invalid_argument);
  };
  EXPECT_NO_THROW(header().validate());
  refuses([](RowFileHeader& h) { h.dim = 0; });
  refuses([](RowFileHeader& h) { h.dim = (std::int64_t{1} << 20) + 1; });
  refuses([](RowFileHeader& h) { h.fields.clear(); });
  refuses([](RowFileHeader& h) { h.fields.resize(33, {"more", FieldType::kUint8, 1}); });
  refuses([](RowFileHeader& h) { h.fields[0].name = "weights"; });
  refuses([](RowFileHeader& h) { h.fields[0].count = 4; });
  refuses([](RowFileHeader& h) { h.fields[2].name = "sum"; });
  refuses([](RowFileHeader& h) { h.fields[1].name = ""; });
  refuses([](RowFileHeader& h) { h.fields[1].name = "two words"; });
  refuses([](RowFileHeader& h) { h.fields[1].name = std::string(48, 'x'); });
  refuses([](RowFileHeader& h) { h.fields[1].count = 0; });
  refuses([](RowFileHeader& h) { h.fields[1].type = static_cast<FieldType>(9); });
  refuses([](RowFileHeader& h) { h.kind = static_cast<RowFileKind>(2); });
}

// A file that holds more than whatever lists it says is refused at the block that goes beyond.
TEST(RowFileTest, NoMoreIsReadThanMayBeThere) {
  const Bytes bytes = write_sample(small_blocks());
  const auto read_with = [&](std::optional<std::int64_t> rows, std::optional<std::int64_t> erased) {
    RowFileReader reader(std::make_shared<MemorySource>(bytes), std::ssize(bytes), "limited",
                         {.max_rows = rows, .max_erased = erased, .in_background = false});
    EXPECT_EQ(reader.expected_rows(),
              rows.value_or(std::ssize(bytes) / reader.header().row_bytes()));
    std::int64_t num_rows = 0;
    RowBlock block;
    try {
      while (reader.next(block)) {
        if (block.kind == BlockKind::kRows) num_rows += std::ssize(block.keys);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCheckpoint);
      EXPECT_LE(num_rows, rows.value_or(kNumRows));
      return std::string(error.what());
    }
    return std::string();
  };
  constexpr auto kRows = static_cast<std::int64_t>(kNumRows);
  EXPECT_EQ(read_with(kRows, 700), "");
  EXPECT_EQ(read_with(std::nullopt, std::nullopt), "");
  EXPECT_NE(read_with(kRows - 1, 700).find("rows, and it must have 499"), std::string::npos);
  EXPECT_NE(read_with(0, 700).find("rows, and it must have 0"), std::string::npos);
  EXPECT_NE(read_with(kRows, 699).find("erased keys, and it must have 699"), std::string::npos);
}

TEST(RowFileTest, CallsOutOfOrderAreRefused) {
  MemorySink sink;
  RowFileWriter writer(sink, header());
  const std::vector<Key> keys = {1};
  writer.write_erased(keys);
  const Rows rows(header(), 1);
  EXPECT_THROW(rows.write(writer, header(), 0, 1), std::invalid_argument);
  writer.finish();
  EXPECT_THROW(writer.write_erased(keys), std::invalid_argument);
  EXPECT_THROW(writer.finish(), std::invalid_argument);
}

TEST(RowFileTest, KeysThatLeftHaveTheirCause) {
  MemorySink sink;
  RowFileWriter writer(sink, header());
  const std::vector<Key> keys = {3, 5};
  writer.write_erased(keys, LeaveCause::kEvicted);
  writer.write_erased(std::span(keys).first(1), LeaveCause::kExpired);
  EXPECT_THROW(writer.write_erased(keys, LeaveCause::kErased), std::invalid_argument);
  const RowFileSummary summary = writer.finish();
  EXPECT_EQ(summary.num_erased, 3);
  EXPECT_EQ(summary.num_evicted, 2);
  EXPECT_EQ(summary.num_expired, 1);
  RowFileReader reader = open(sink.content);
  std::vector<LeaveCause> causes;
  for (RowBlock block; reader.next(block);) causes.push_back(block.cause);
  EXPECT_EQ(causes, (std::vector<LeaveCause>{LeaveCause::kEvicted, LeaveCause::kExpired}));
}

/// The content of 60 rows that begin with some, in blocks of 4 KiB, and of two keys that left.
std::optional<std::uint64_t> content_from(std::size_t first, std::uint8_t changed = 0,
                                          LeaveCause cause = LeaveCause::kExpired) {
  RowFileOptions options = small_blocks();
  options.sums_content = true;
  MemorySink sink;
  const RowFileHeader h = header();
  RowFileWriter writer(sink, h, options);
  Rows rows(h, kNumRows);
  rows.fields[2][5] ^= std::byte{changed};
  rows.write(writer, h, first, kNumRows);
  rows.write(writer, h, 0, first);
  const std::vector<Key> keys = first == 0 ? std::vector<Key>{3, 5} : std::vector<Key>{5, 3};
  writer.write_erased(keys, cause);
  return writer.finish().content;
}

TEST(RowFileTest, TheContentHasNoOrder) {
  const std::optional<std::uint64_t> content = content_from(0);
  ASSERT_TRUE(content);
  for (const std::size_t first : {1U, 13U, 499U}) EXPECT_EQ(content_from(first), content);
  EXPECT_NE(content_from(0, 1), content);
  EXPECT_NE(content_from(0, 0, LeaveCause::kErased), content);
  MemorySink sink;
  RowFileWriter writer(sink, header());
  Rows(header(), 3).write(writer, header(), 0, 3);
  EXPECT_EQ(writer.finish().content, std::nullopt);
}

TEST(RowFileTest, OptionsOutOfRangeAreRefused) {
  MemorySink sink;
  EXPECT_THROW(RowFileWriter(sink, header(), {.block_bytes = 100}), std::invalid_argument);
  EXPECT_THROW(RowFileWriter(sink, header(), {.block_bytes = std::int64_t{1} << 40}),
               std::invalid_argument);
  EXPECT_THROW(RowFileWriter(sink, header(), {.codec = static_cast<Codec>(7)}),
               std::invalid_argument);
  RowFileWriter snapshot(sink, header(RowFileKind::kSnapshot));
  EXPECT_THROW(snapshot.write_erased(std::vector<Key>{1}), std::invalid_argument);
}

// ---- damage -------------------------------------------------------------------------------------

TEST(RowFileDamageTest, EveryFlippedByteIsSeen) {
  for (const Codec codec : codecs()) {
    const Bytes bytes = write_sample(small_blocks(codec));
    std::mt19937 random(7);
    for (std::size_t i = 0; i < bytes.size(); i += 1 + random() % 5) {
      Bytes damaged = bytes;
      damaged[i] ^= static_cast<std::byte>(1U << random() % 8);
      ASSERT_NE(damage_of(damaged, i % 64 == 0), "") << "byte " << i;
    }
  }
}

TEST(RowFileDamageTest, EveryTruncationIsSeen) {
  const Bytes bytes = write_sample(small_blocks());
  for (std::size_t size = 0; size < bytes.size(); size += size < 600 ? 1 : 37)
    ASSERT_NE(damage_of(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size))),
              "");
  Bytes longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_NE(damage_of(longer).find("bytes follow the end"), std::string::npos);
}

TEST(RowFileDamageTest, AFileShorterThanItsSizeIsSeen) {
  const Bytes bytes = write_sample(small_blocks());
  RowFileReader reader(std::make_shared<MemorySource>(bytes),
                       static_cast<std::int64_t>(bytes.size()) + 1000, "memory");
  EXPECT_THROW(read_all(std::move(reader)), Error);
}

/// Where the blocks of a file begin.
std::vector<std::size_t> block_offsets(const Bytes& bytes) {
  std::vector<std::size_t> offsets;
  std::uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data() + 12, 4);
  for (std::size_t at = header_bytes; at < bytes.size();) {
    offsets.push_back(at);
    internal::BlockHead head;
    std::memcpy(&head, bytes.data() + at, sizeof(head));
    at += sizeof(head) + head.stored_bytes;
  }
  return offsets;
}

Bytes part(const Bytes& bytes, std::size_t begin, std::size_t end) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(end)};
}

TEST(RowFileDamageTest, BlocksThatWereMovedTakenOutOrComeFromElsewhereAreSeen) {
  const Bytes bytes = write_sample(small_blocks());
  const std::vector<std::size_t> at = block_offsets(bytes);
  ASSERT_GT(at.size(), 5U);
  const auto join = [](std::initializer_list<Bytes> parts) {
    Bytes joined;
    for (const Bytes& p : parts) joined.insert(joined.end(), p.begin(), p.end());
    return joined;
  };
  const Bytes rest = part(bytes, at[2], bytes.size());
  EXPECT_NE(damage_of(join({part(bytes, 0, at[0]), part(bytes, at[1], at[2]),
                            part(bytes, at[0], at[1]), rest})),
            "");
  EXPECT_NE(damage_of(join({part(bytes, 0, at[1]), rest})), "");
  EXPECT_NE(damage_of(join({part(bytes, 0, at[1]), part(bytes, at[0], at[1]), rest})), "");

  MemorySink sink;
  RowFileHeader other = header();
  other.token[0] = 99;
  RowFileWriter writer(sink, other, small_blocks());
  Rows(other, kNumRows).write(writer, other, 0, kNumRows);
  writer.finish();
  const std::string reason = damage_of(join(
      {part(bytes, 0, at[0]), part(sink.content, at[0], at[1]), part(bytes, at[1], bytes.size())}));
  EXPECT_NE(reason.find("another file"), std::string::npos) << reason;
}

/// Rewrites the header of a block, with a checksum that fits.
template <typename Change>
Bytes with_block(Bytes bytes, std::size_t at, const Change& change) {
  internal::BlockHead head;
  std::memcpy(&head, bytes.data() + at, sizeof(head));
  change(head);
  internal::seal(head);
  std::memcpy(bytes.data() + at, &head, sizeof(head));
  return bytes;
}

TEST(RowFileDamageTest, LiesWithRightChecksumsAreSeenBeforeMemoryIsTaken) {
  const Bytes bytes = write_sample(small_blocks());
  const std::size_t at = block_offsets(bytes)[0];
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 63;
  using Head = internal::BlockHead;
  const std::vector<std::function<void(Head&)>> lies = {
      [](Head& h) { h.num_rows = kHuge; },
      [](Head& h) { h.num_rows = ~std::uint64_t{0}; },
      [](Head& h) { h.num_rows = 0; },
      [](Head& h) { ++h.num_rows; },
      [](Head& h) { h.raw_bytes = kHuge; },
      [](Head& h) { h.raw_bytes = h.stored_bytes = kHuge; },
      [](Head& h) { h.stored_bytes = ~std::uint64_t{0}; },
      [](Head& h) { --h.stored_bytes; },
      [](Head& h) { h.type = 4; },
      [](Head& h) { h.type = 0; },
      [](Head& h) { h.type = internal::kEndBlock; },
      [](Head& h) { h.type = static_cast<std::uint8_t>(BlockKind::kErased); },
      [](Head& h) { h.type = 3; },
      [](Head& h) { h.codec = 2; },
      [](Head& h) { h.codec = 1; },
      [](Head& h) { h.reserved = 1; },
      [](Head& h) { h.index = 1; },
      // Both of these together are consistent, and fit no file.
      [](Head& h) {
        h.num_rows = std::uint64_t{1} << 22;
        h.raw_bytes = h.stored_bytes =
            static_cast<std::uint64_t>(internal::rows_payload_bytes(header(), 1 << 22));
      },
  };
  for (std::size_t i = 0; i < lies.size(); ++i)
    EXPECT_NE(damage_of(with_block(bytes, at, lies[i])), "") << "lie " << i;
}

TEST(RowFileDamageTest, WrongTotalsAreSeen) {
  const Bytes bytes = write_sample(small_blocks());
  const std::size_t at = block_offsets(bytes).back();
  for (const std::size_t field : {0UL, 1UL, 2UL}) {
    Bytes lying = bytes;
    lying[at + sizeof(internal::BlockHead) + field * 8] ^= std::byte{1};
    lying = with_block(lying, at, [&](internal::BlockHead& h) {
      h.payload_checksum =
          internal::checksum64(std::span(lying).subspan(at + sizeof(h), h.stored_bytes));
    });
    EXPECT_NE(damage_of(lying).find("totals"), std::string::npos);
  }
}

/// Rewrites the header of the file, with a checksum that fits.
template <typename Change>
Bytes with_header(Bytes bytes, const Change& change) {
  internal::FileHead head;
  std::memcpy(&head, bytes.data(), sizeof(head));
  const std::uint32_t size = head.header_bytes;
  change(head, bytes);
  std::memcpy(bytes.data(), &head, sizeof(head));
  const std::uint64_t checksum = internal::checksum64(std::span(bytes).first(size - 8));
  std::memcpy(bytes.data() + size - 8, &checksum, 8);
  return bytes;
}

TEST(RowFileDamageTest, HeadersThatLieAreSeen) {
  const Bytes bytes = write_sample(small_blocks());
  using Head = internal::FileHead;
  constexpr std::size_t kFirstField = sizeof(Head);
  const std::vector<std::function<void(Head&, Bytes&)>> lies = {
      [](Head& h, Bytes&) { h.version = 2; },
      [](Head& h, Bytes&) { h.header_bytes = 0xFFFFFFFF; },
      [](Head& h, Bytes&) { h.num_fields = 0; },
      [](Head& h, Bytes&) { h.num_fields = 0xFFFFFFFF; },
      [](Head& h, Bytes&) { h.num_fields = 3; },
      [](Head& h, Bytes&) { h.kind = 2; },
      [](Head& h, Bytes&) { h.dim = std::uint64_t{1} << 63; },
      [](Head& h, Bytes&) { h.dim = 4; },
      [](Head& h, Bytes&) { h.magic[0] = 'x'; },
      [](Head&, Bytes& b) { b[kFirstField] = std::byte{'W'}; },
      [](Head&, Bytes& b) { b[kFirstField + 20] = std::byte{'x'}; },
      [](Head&, Bytes& b) { b[kFirstField + 48] = std::byte{77}; },
      [](Head&, Bytes& b) { b[kFirstField + 52] = std::byte{1}; },
      [](Head&, Bytes& b) { b[kFirstField + 63] = std::byte{0x80}; },
      [](Head&, Bytes& b) { std::fill_n(b.begin() + kFirstField, 48, std::byte{'w'}); },
  };
  for (std::size_t i = 0; i < lies.size(); ++i)
    EXPECT_NE(damage_of(with_header(bytes, lies[i])), "") << "lie " << i;
  EXPECT_NE(damage_of(with_header(bytes, lies[0])).find("version 2"), std::string::npos);
}

TEST(RowFileDamageTest, ASnapshotHasNoErasedKeys) {
  const Bytes bytes = write_sample(small_blocks());
  EXPECT_NE(damage_of(with_header(bytes, [](internal::FileHead& h, Bytes&) { h.kind = 0; })), "");
}

TEST(RowFileTest, AReaderThatFailedStaysFailed) {
  Bytes bytes = write_sample(small_blocks());
  bytes[1000] ^= std::byte{1};
  for (const bool in_background : {false, true}) {
    RowFileReader reader = open(bytes, in_background);
    RowBlock block;
    EXPECT_THROW(while (reader.next(block)){}, Error);
    EXPECT_THROW(reader.next(block), std::invalid_argument);
    EXPECT_THROW(reader.summary(), std::invalid_argument);
  }
}

TEST(RowFileTest, AReaderMayBeDroppedHalfway) {
  const Bytes bytes = write_sample(small_blocks());
  for (int n = 0; n < 4; ++n) {
    RowFileReader reader = open(bytes, true);
    RowBlock block;
    for (int i = 0; i < n; ++i) ASSERT_TRUE(reader.next(block));
    EXPECT_EQ(reader.is_at_start(), n == 0);
    EXPECT_THROW(reader.summary(), std::invalid_argument);
  }
}

// ---- sinks that fail ----------------------------------------------------------------------------

TEST(RowFileSinkTest, WhatTheSinkThrowsComesThrough) {
  for (const bool in_background : {false, true}) {
    for (int n = 0;; ++n) {
      int left = n;
      MemorySink sink([&] {
        if (left-- == 0) throw std::runtime_error("the sink is full");
      });
      const auto write = [&] {
        RowFileOptions options = small_blocks();
        options.in_background = in_background;
        RowFileWriter writer(sink, header(), options);
        const Rows rows(header(), kNumRows);
        rows.write(writer, header(), 0, kNumRows);
        writer.finish();
      };
      try {
        write();
        EXPECT_GT(n, 5);
        break;
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "the sink is full");
      }
    }
  }
}

TEST(RowFileSinkTest, FilesAreWrittenAndRead) {
  const TemporaryFile file;
  FileSink sink(file.descriptor, "file");
  RowFileWriter writer(sink, header(), small_blocks());
  const Rows rows(header(), kNumRows);
  rows.write(writer, header(), 0, kNumRows);
  const RowFileSummary summary = writer.finish();
  RowFileReader reader(std::make_shared<FileSource>(file.descriptor, "file"), summary.num_bytes,
                       "file");
  EXPECT_EQ(read_all(std::move(reader)).summary.checksum, summary.checksum);
}

TEST(RowFileSinkTest, AFullDiskIsACheckpointErrorThatSaysSo) {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  FileSink sink(full, "some file");
  const auto write = [&] {
    RowFileWriter writer(sink, header());
    writer.finish();
  };
  try {
    write();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCheckpoint);
    EXPECT_NE(std::string(error.what()).find("some file"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos);
  }
  close(full);
}

TEST(RowFileSinkTest, ShortWritesGoOnAndALimitIsAnError) {
  const TemporaryFile file;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 10'000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
  FileSink sink(file.descriptor, "file");
  const Bytes bytes(15'000, std::byte{5});
  EXPECT_THROW(sink.write(bytes), Error);  // the first write was short
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(lseek(file.descriptor, 0, SEEK_END), 10'000);
}

TEST(RowFileSinkTest, ABadDescriptorIsACheckpointError) {
  FileSink sink(-1, "nothing");
  const Bytes bytes(10);
  EXPECT_THROW(sink.write(bytes), Error);
  FileSource source(-1, "nothing");
  Bytes out(10);
  EXPECT_THROW(source.read(0, out), Error);
}

TEST(RowFileTest, VirtualShardsAreFixedForEver) {
  EXPECT_EQ(virtual_shard(0), 0xE220A8397B1DCDAFU & 0xFFFFU);
  EXPECT_EQ(virtual_shard(1), 0x910A2DEC89025CC1U & 0xFFFFU);
}

}  // namespace
}  // namespace recsdk::test::row_file_test
