// Files past the page cache: the same bytes as through it, whatever their pieces and faults.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "io/block_memory.h"
#include "io/direct_reader.h"
#include "recsdk/row_file.h"
#include "row_files_in_memory.h"
#include "temporary_file.h"

namespace recsdk::test::direct_io_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPieces[] = {64, 4 * kMiB + 1000, 1, 3 * kMiB, 4096, 700'001};

Bytes make_bytes(std::size_t size) {
  Bytes bytes(size);
  std::uint64_t state = 1;
  for (std::byte& b : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    b = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

/// Sets RECSDK_DIRECT_IO while it lives.
class DirectIo {
 public:
  explicit DirectIo(bool is_on) { setenv("RECSDK_DIRECT_IO", is_on ? "1" : "0", 1); }
  DirectIo(const DirectIo&) = delete;
  DirectIo& operator=(const DirectIo&) = delete;
  ~DirectIo() { unsetenv("RECSDK_DIRECT_IO"); }
};

void write_in_pieces(ByteSink& sink, std::span<const std::byte> bytes) {
  for (std::size_t i = 0; !bytes.empty(); ++i) {
    const std::size_t n = std::min(kPieces[i % std::size(kPieces)], bytes.size());
    sink.write(bytes.first(n));
    bytes = bytes.subspan(n);
  }
}

Bytes read_in_pieces(ByteSource& source, std::int64_t offset, std::size_t most) {
  Bytes found;
  for (std::size_t i = 0; found.size() < most; ++i) {
    Bytes piece(kPieces[i % std::size(kPieces)]);
    const std::size_t n = source.read(offset + static_cast<std::int64_t>(found.size()), piece);
    if (n == 0) break;
    found.insert(found.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(n));
  }
  return found;
}

TEST(BlockMemory, IsAlignedToHugePagesAndTakenAgainForWhatFits) {
  for (const std::int64_t size : {kDefaultBlockBytes, kMaxWrittenBlockBytes}) {
    internal::BlockMemory memory;
    auto given = memory.take(size);
    const std::byte* const place = given.get();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(place) % internal::kHugePage, 0U);
    given[size - 1] = std::byte{1};
    const auto other = memory.take(size);
    EXPECT_NE(other.get(), place);
    given.reset();
    EXPECT_EQ(memory.take(1).get(), place);
  }
}

TEST(BlockMemory, MayBeGivenBackLater) {
  auto memory = std::make_unique<internal::BlockMemory>();
  const auto given = memory->take(1);
  memory.reset();
  given[0] = std::byte{1};
}

TEST(DirectIoTest, FilesAreWrittenAlikeWhateverTheirSizeAndStart) {
  for (const bool is_on : {false, true}) {
    const DirectIo direct(is_on);
    for (const std::size_t size : {std::size_t{100}, 8 * kMiB, 14 * kMiB, 20 * kMiB + 12'345}) {
      for (const off_t start : {off_t{0}, off_t{100}}) {
        const TemporaryFile file;
        const Bytes before(static_cast<std::size_t>(start), std::byte{7});
        ASSERT_EQ(write(file.descriptor, before.data(), before.size()), start);
        Bytes bytes = make_bytes(size);
        FileSink sink(file.descriptor, "file");
        write_in_pieces(sink, bytes);
        sink.finish();
        EXPECT_FALSE(file.is_direct());
        bytes.insert(bytes.begin(), before.begin(), before.end());
        EXPECT_TRUE(file.content() == bytes) << is_on << " " << size << " " << start;
      }
    }
  }
}

TEST(DirectIoTest, ItIsTurnedOnWhereTheFileSystemCanDoIt) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(20 * kMiB);
  {
    FileSink sink(file.descriptor, "file");
    write_in_pieces(sink, std::span(bytes).first(12 * kMiB));
    EXPECT_EQ(file.is_direct(), file.can_be_direct());
    write_in_pieces(sink, std::span(bytes).subspan(12 * kMiB));
    sink.finish();
  }
  EXPECT_FALSE(file.is_direct());
  ASSERT_TRUE(file.content() == bytes);
  file.forget();
  if (file.cached_share() > 0.1) GTEST_SKIP() << "this file system keeps all files in memory";
  FileSource source(file.descriptor, "file");
  EXPECT_TRUE(read_in_pieces(source, 0, bytes.size()) == bytes);
  if (file.can_be_direct()) {
    EXPECT_LT(file.cached_share(), 0.5);
  }
}

// Blocks that a writer has made are written from where they lie, whatever comes between them.
TEST(DirectIoTest, PiecesThatLieAsInTheFileAreWrittenAlikeToo) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(30 * kMiB);
  FileSink sink(file.descriptor, "file");
  alignas(internal::kDirectAlignment) static std::byte memory[5 * kMiB];
  for (std::size_t done = 0, i = 0; done < bytes.size(); ++i) {
    const std::size_t n = std::min(i % 3 == 2 ? 777 : 4 * kMiB - 100 * i, bytes.size() - done);
    std::byte* const place = memory + (i % 5 == 4 ? 8 : done % internal::kDirectAlignment);
    std::copy_n(bytes.data() + done, n, place);
    sink.write({place, n});
    done += n;
  }
  sink.finish();
  EXPECT_TRUE(file.content() == bytes);
}

TEST(DirectIoTest, ADroppedSinkLeavesTheDescriptorAsItWas) {
  const TemporaryFile file;
  {
    FileSink sink(file.descriptor, "file");
    write_in_pieces(sink, make_bytes(20 * kMiB));
  }
  EXPECT_FALSE(file.is_direct());
}

TEST(DirectIoTest, ALimitWithinALargeFileIsAnError) {
  const TemporaryFile file;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 13 * kMiB + 100;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
  FileSink sink(file.descriptor, "some file");
  std::optional<std::string> text;
  try {
    write_in_pieces(sink, make_bytes(20 * kMiB));
    sink.finish();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCheckpoint);
    text = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  ASSERT_TRUE(text);
  EXPECT_NE(text->find("some file"), std::string::npos);
  const Bytes found = file.content();
  EXPECT_LE(found.size(), limit.rlim_cur);
  EXPECT_TRUE(std::equal(found.begin(), found.end(), make_bytes(20 * kMiB).begin()));
}

TEST(DirectIoTest, FilesAreReadAlikeFromTheDiskAndFromTheCache) {
  for (const std::size_t size : {std::size_t{100}, 8 * kMiB, 20 * kMiB, 20 * kMiB + 12'345}) {
    const TemporaryFile file;
    const Bytes bytes = make_bytes(size);
    file.put(bytes);
    for (const bool is_cold : {true, false}) {
      for (const bool is_on : {false, true}) {
        const DirectIo direct(is_on);
        if (is_cold) file.forget();
        FileSource source(file.descriptor, "file");
        EXPECT_TRUE(read_in_pieces(source, 0, size + 1) == bytes) << size;
        FileSource middle(file.descriptor, "file");
        const Bytes rest(bytes.begin() + 33, bytes.end());
        EXPECT_TRUE(read_in_pieces(middle, 33, size + 1) == rest) << size;
      }
    }
  }
}

/// Takes parts of these sizes, 64 bytes between them, which are read; counts those that there were.
std::size_t take_parts(ByteSource& source, const Bytes& bytes, std::span<const std::size_t> sizes) {
  std::size_t count = 0;
  std::size_t offset = 0;
  for (std::size_t i = 0; offset + 64 < bytes.size(); ++i) {
    const std::size_t size = std::min(sizes[i % sizes.size()], bytes.size() - offset - 64);
    const auto expect = [&](const std::byte* found, std::size_t n) {
      EXPECT_TRUE(std::equal(found, found + n, bytes.data() + offset)) << i << " at " << offset;
      offset += n;
    };
    const Bytes between = read_in_pieces(source, static_cast<std::int64_t>(offset), 64);
    expect(between.data(), 64);
    if (const auto taken = source.take(static_cast<std::int64_t>(offset), size)) {
      ++count;
      expect(taken.get(), size);
    } else {
      const Bytes read = read_in_pieces(source, static_cast<std::int64_t>(offset), size);
      expect(read.data(), size);
    }
  }
  return count;
}

TEST(DirectIoTest, PartsAreTakenWhereTheyWereReadTo) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(50 * kMiB);
  file.put(bytes);
  const std::vector<std::vector<std::size_t>> all_sizes = {
      {4 * kMiB - 1000},
      {5 * kMiB},
      {12 * kMiB},
      {13 * kMiB},
      {100'000},
      {4096, 4096, 4096, 24},
      {3 * kMiB, 3 * kMiB + 8, 2 * kMiB + 1, 24}};
  for (const std::vector<std::size_t>& sizes : all_sizes) {
    file.forget();
    FileSource source(file.descriptor, "file");
    const std::size_t count = take_parts(source, bytes, sizes);
    const bool is_foreseen = sizes.size() == 1 && sizes[0] <= 12 * kMiB;
    if (is_foreseen && file.can_be_direct() && file.cached_share() < 0.5) {
      EXPECT_GE(count, bytes.size() / (sizes[0] + 64)) << sizes[0];
    }
  }
}

TEST(DirectIoTest, WhatWasTakenOutlivesItsSource) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(20 * kMiB);
  file.put(bytes);
  file.forget();
  std::vector<std::shared_ptr<const std::byte[]>> parts;
  {
    FileSource source(file.descriptor, "file");
    for (std::size_t i = 0; i < 20; ++i)
      parts.push_back(source.take(static_cast<std::int64_t>(i * kMiB), kMiB));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == nullptr) continue;
    EXPECT_TRUE(std::equal(parts[i].get(), parts[i].get() + kMiB, bytes.data() + i * kMiB));
  }
}

TEST(DirectIoTest, RowFilesPastTheCacheAreWhole) {
  const RowFileHeader header{
      RowFileKind::kSnapshot,
      64,
      {1, 2},
      {{"weight", FieldType::kFloat32, 64}, {"sum", FieldType::kFloat32, 1}}};
  constexpr std::size_t kRows = 70'000;
  std::vector<Key> keys(kRows);
  std::iota(keys.begin(), keys.end(), -7);
  const Bytes weights = make_bytes(kRows * 256);
  const Bytes sums = make_bytes(kRows * 4);
  for (const Codec codec : codecs()) {
    for (const std::int64_t block_bytes :
         {std::int64_t{40'000}, kDefaultBlockBytes, kMaxWrittenBlockBytes}) {
      const TemporaryFile file;
      FileSink sink(file.descriptor, "file");
      RowFileWriter writer(sink, header, {.codec = codec, .block_bytes = block_bytes});
      const void* const fields[] = {weights.data(), sums.data()};
      writer.write_rows(keys, fields);
      const RowFileSummary summary = writer.finish();
      file.forget();
      RowFileReader reader(std::make_shared<FileSource>(file.descriptor, "file"), summary.num_bytes,
                           "file");
      RowBlock block;
      std::size_t done = 0;
      std::vector<RowBlock> kept;  // they live on their own
      while (reader.next(block)) {
        const std::size_t n = block.keys.size();
        EXPECT_TRUE(std::equal(block.keys.begin(), block.keys.end(), keys.data() + done));
        EXPECT_TRUE(std::equal(block.fields[1], block.fields[1] + n * 4, sums.data() + done * 4));
        kept.push_back(block);
        done += n;
      }
      EXPECT_EQ(done, kRows);
      EXPECT_EQ(reader.summary().checksum, summary.checksum);
      done = 0;
      for (const RowBlock& one : kept) {
        const std::size_t bytes = one.keys.size() * 256;
        EXPECT_TRUE(std::equal(one.fields[0], one.fields[0] + bytes, weights.data() + done));
        done += bytes;
      }
    }
  }
}

TEST(DirectIoTest, ReadsThatJumpAreServedToo) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(12 * kMiB);
  file.put(bytes);
  file.forget();
  FileSource source(file.descriptor, "file");
  for (const std::size_t offset : {std::size_t{0}, 7 * kMiB + 3, std::size_t{5}, 11 * kMiB}) {
    const Bytes found = read_in_pieces(source, static_cast<std::int64_t>(offset), 1000);
    EXPECT_TRUE(std::equal(found.begin(), found.end(),
                           bytes.begin() + static_cast<std::ptrdiff_t>(offset)));
  }
}

TEST(DirectIoTest, AFileThatIsCutOffMeanwhileJustEnds) {
  const TemporaryFile file;
  file.put(make_bytes(40 * kMiB));
  file.forget();
  FileSource source(file.descriptor, "file");
  Bytes start(100);
  ASSERT_GT(source.read(0, start), 0U);
  ASSERT_EQ(ftruncate(file.descriptor, 30 * kMiB + 5), 0);
  const Bytes found = read_in_pieces(source, 100, 40 * kMiB);
  EXPECT_EQ(found.size(), 30 * kMiB + 5 - 100);
}

TEST(DirectIoTest, AReaderMayBeDroppedAtAnyTime) {
  const TemporaryFile file;
  const Bytes bytes = make_bytes(24 * kMiB);
  file.put(bytes);
  for (std::size_t n = 0; n < 6; ++n) {
    file.forget();
    internal::DirectReader reader(file.descriptor, 0);
    Bytes piece(n * 700'000);
    if (n > 0) reader.read(0, piece);
  }
}

}  // namespace
}  // namespace recsdk::test::direct_io_test
