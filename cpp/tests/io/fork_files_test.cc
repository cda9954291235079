// A forked child ends what its parent was reading and writing, with threads that it does not have.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "children_of_fork.h"
#include "io/block_memory.h"
#include "recsdk/recsdk.h"
#include "row_files_in_memory.h"
#include "temporary_file.h"

namespace recsdk::test::fork_files_test {
namespace {

constexpr std::size_t kRows = 40'000;
constexpr int kMoments = 20;

RowFileHeader header() {
  return {RowFileKind::kSnapshot, 4, {}, {{"weight", FieldType::kFloat32, 4}}};
}

std::vector<Key> some_keys() {
  std::vector<Key> keys(kRows);
  std::iota(keys.begin(), keys.end(), -5);
  return keys;
}

const std::vector<float>& values() {
  static const std::vector<float> all = [] {
    std::vector<float> made(kRows * 4);
    std::iota(made.begin(), made.end(), 1.0F);
    return made;
  }();
  return all;
}

RowFileWriter writer_to(ByteSink& sink) {
  return RowFileWriter(sink, header(), {.codec = Codec::kNone, .block_bytes = 4096});
}

void write_rows(RowFileWriter& writer, std::size_t begin, std::size_t end) {
  const std::vector<Key> keys = some_keys();
  const void* const fields[] = {values().data() + begin * 4};
  writer.write_rows(std::span(keys).subspan(begin, end - begin), fields);
}

Bytes row_file() {
  MemorySink sink;
  RowFileWriter writer = writer_to(sink);
  write_rows(writer, 0, kRows);
  writer.finish();
  return sink.content;
}

template <typename Body>
bool is_refused(const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

TEST(ForkFilesTest, AReaderEndsInAChild) {
  const Bytes bytes = row_file();
  for (int i = 0; i < kMoments; ++i) {
    std::optional<RowFileReader> reader = open(bytes, true);
    RowBlock block;
    for (int j = 0; j <= i; ++j) reader->next(block);
    const int status = status_of_child([&] {
      const bool is_well = is_refused([&] { reader->next(block); });
      reader.reset();
      return is_well;
    });
    ASSERT_EQ(status, 0);
    while (reader->next(block)) {
    }
    EXPECT_EQ(reader->summary().num_rows, static_cast<std::int64_t>(kRows));
  }
}

TEST(ForkFilesTest, AWriterEndsInAChild) {
  const Bytes expected = row_file();
  for (std::size_t i = 0; i < kMoments; ++i) {
    MemorySink sink([] { std::this_thread::yield(); });
    std::optional<RowFileWriter> writer = writer_to(sink);
    write_rows(*writer, 0, 1000 * (i + 1));
    const int status = status_of_child([&] {
      const bool is_well = is_refused([&] { write_rows(*writer, 0, kRows); });
      writer.reset();
      return is_well;
    });
    ASSERT_EQ(status, 0);
    write_rows(*writer, 1000 * (i + 1), kRows);
    writer->finish();
    EXPECT_TRUE(sink.content == expected);
  }
}

// Past the page cache, by threads of its own; the child goes on without them.
TEST(ForkFilesTest, AFileIsReadOnInAChild) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  const TemporaryFile file;
  Bytes bytes(30 * kPiece);
  for (std::size_t i = 0; i < bytes.size(); i += 7) bytes[i] = static_cast<std::byte>(i >> 9);
  file.put(bytes);
  const auto reads = [&](FileSource& source, std::size_t piece) {
    Bytes found(1000);
    const auto offset = static_cast<std::int64_t>(piece * kPiece);
    return source.read(offset, found) == found.size() &&
           std::equal(found.begin(), found.end(), bytes.begin() + offset);
  };
  for (std::size_t i = 0; i < kMoments; ++i) {
    file.forget();
    std::optional<FileSource> source(std::in_place, file.descriptor, "file");
    EXPECT_TRUE(reads(*source, i));
    const auto taken = source->take(static_cast<std::int64_t>(i * kPiece), 100);
    const int status = status_of_child([&] {
      const bool is_well = reads(*source, i + 1) && reads(*source, 0);
      source.reset();
      return is_well;
    });
    ASSERT_EQ(status, 0);
    EXPECT_TRUE(reads(*source, i + 1));
  }
}

/// Reads from memory; the read of this number forks, and fails in the child.
class ForkingSource final : public ByteSource {
 public:
  ForkingSource(const Bytes& content, int number) : memory_(content), number_(number) {}
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes) override {
    if (number_-- == 0) {
      child = fork();
      if (child == 0) {
        alarm(60);
        throw std::runtime_error("in the child");
      }
    }
    return memory_.read(offset, bytes);
  }
  pid_t child = -1;

 private:
  MemorySource memory_;
  int number_;
};

// While a thread puts keys into the index.
TEST(ForkFilesTest, ARestoreEndsInAChild) {
  const int threads_before = num_threads();
  set_num_threads(3);
  const Bytes bytes = row_file();
  for (int i = 0; i < kMoments; ++i) {
    TableConfig config;
    config.dim = 4;
    Table table(config);
    const auto source = std::make_shared<ForkingSource>(bytes, 20 * i + 12);
    std::optional<Restore> restore(table);
    RowFileReader reader(source, static_cast<std::int64_t>(bytes.size()), "memory",
                         {.in_background = false});
    try {
      restore->add_file(reader, {});
    } catch (const std::exception&) {
      restore.reset();
      _exit(source->child == 0 ? 0 : 1);
    }
    ASSERT_GT(source->child, 0);
    int status = -1;
    waitpid(source->child, &status, 0);
    ASSERT_EQ(status, 0);
    restore->commit(0);
    EXPECT_EQ(table.size(), static_cast<std::int64_t>(kRows));
  }
  set_num_threads(threads_before);
}

TEST(ForkFilesTest, MemoryOfBlocksIsGivenBackInAChild) {
  internal::BlockMemory memory;
  auto given = memory.take(1);
  std::atomic<bool> is_over{false};
  std::thread taking([&] {
    while (!is_over.load()) memory.take(1);
  });
  int status = 0;
  for (int i = 0; i < 100 && status == 0; ++i) {
    status = status_of_child([&] {
      given.reset();
      return true;
    });
  }
  is_over.store(true);
  taking.join();
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace recsdk::test::fork_files_test
