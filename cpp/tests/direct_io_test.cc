// Files past the page cache: the same bytes as through it, whatever their pieces and faults.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/direct_io.h"
#include "recsdk/row_file.h"

namespace recsdk::test {
namespace {

using Bytes = std::vector<std::byte>;

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

/// A file in the folder for tests, which may or may not be able to do without the page cache.
class TemporaryFile {
 public:
  TemporaryFile() : path_(testing::TempDir() + "recsdk_direct_io_XXXXXX") {
    descriptor = mkstemp(path_.data());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    close(descriptor);
    unlink(path_.c_str());
  }

  bool is_direct() const { return (fcntl(descriptor, F_GETFL) & O_DIRECT) != 0; }

  /// All of it, through the page cache.
  Bytes content() const {
    Bytes bytes(static_cast<std::size_t>(lseek(descriptor, 0, SEEK_END)));
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t n =
          pread(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      if (n <= 0) break;
      done += static_cast<std::size_t>(n);
    }
    return bytes;
  }

  void put(const Bytes& bytes) const {
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t n =
          pwrite(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      ASSERT_GT(n, 0);
      done += static_cast<std::size_t>(n);
    }
  }

  /// Takes it out of the page cache.
  void forget() const {
    fsync(descriptor);
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  }

  int descriptor = -1;

 private:
  std::string path_;
};

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
}  // namespace recsdk::test
