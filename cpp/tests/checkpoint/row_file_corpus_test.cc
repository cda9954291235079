// The corpus of row files: read for ever as it was written, and never more than refused when
// damaged. Each file begins with a byte for the fuzzer, not part of the row file.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fuzz/row_file_operations.h"
#include "profile.h"

namespace recsdk::test::row_file_corpus_test {
namespace {

using Input = std::vector<std::uint8_t>;

std::map<std::string, Input> corpus() {
  std::map<std::string, Input> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(RECSDK_TESTS_FOLDER "/fuzz/corpus/row_file")) {
    std::ifstream stream(entry.path(), std::ios::binary);
    files[entry.path().stem().string()] =
        Input(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return files;
}

Bytes file_of(const Input& input) {
  Bytes bytes(input.size() - 1);
  std::memcpy(bytes.data(), input.data() + 1, bytes.size());
  return bytes;
}

TEST(RowFileCorpusTest, FilesOfVersion1AreReadForEver) {
  const std::map<std::string, Input> files = corpus();
  const FileContent snapshot = read_all(open(file_of(files.at("snapshot"))));
  EXPECT_EQ(snapshot.summary.checksum, "3b31146c9d040d2e73a808cc4e4870e7");
  ASSERT_EQ(snapshot.rows.size(), 30U);
  for (std::size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(snapshot.rows[i].key, static_cast<Key>(i) * 1'000'003 - 15);
    float weight = 0.0F;
    std::memcpy(&weight, snapshot.rows[i].values.data(), sizeof(weight));
    EXPECT_EQ(weight, static_cast<float>(i) / 4.0F);
  }
  const FileContent delta = read_all(open(file_of(files.at("delta"))));
  EXPECT_EQ(delta.summary.checksum, "d1977963e5803c7704f311ae4b3d5020");
  EXPECT_EQ(delta.erased, (std::vector<Key>{INT64_MIN, -1, 0, INT64_MAX}));
  if (has_codec(Codec::kZstd)) {
    const FileContent packed = read_all(open(file_of(files.at("zstd"))));
    EXPECT_EQ(packed.rows, snapshot.rows);
    EXPECT_LT(packed.summary.num_bytes, snapshot.summary.num_bytes);
  }
}

/// Damages an input in one of the ways that damage happens, or that somebody would try.
void mutate(Input& input, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return n == 0 ? 0 : random() % n; };
  const auto at = [&](std::size_t i) { return input.begin() + static_cast<std::ptrdiff_t>(i); };
  switch (below(6)) {
    case 0:
      input[below(input.size())] ^= static_cast<std::uint8_t>(1U << below(8));
      return;
    case 1:
      input[below(input.size())] = static_cast<std::uint8_t>(random());
      return;
    case 2:
      input.resize(1 + below(input.size()));
      return;
    case 3: {  // a number of 8 bytes that somebody would try
      constexpr std::uint64_t kNumbers[] = {
          0, 1, ~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{1} << 26, 0x7FFFFFFFU};
      const std::uint64_t number = kNumbers[below(std::size(kNumbers))];
      if (input.size() > 16)
        std::memcpy(input.data() + 1 + below(input.size() - 9), &number, sizeof(number));
      return;
    }
    case 4: {  // bytes twice
      const std::size_t begin = 1 + below(input.size() - 1);
      const Input piece(at(begin),
                        at(begin + below(std::min<std::size_t>(input.size() - begin, 300))));
      input.insert(at(1 + below(input.size())), piece.begin(), piece.end());
      return;
    }
    default: {  // bytes gone
      const std::size_t begin = 1 + below(input.size() - 1);
      input.erase(at(begin), at(begin + below(std::min<std::size_t>(input.size() - begin, 300))));
    }
  }
}

TEST(RowFileCorpusTest, DamageIsRefusedAndNothingWorse) {
  const int num_tries = is_full_profile() ? 200'000 : 4000;
  std::mt19937 random(11);
  int num_read = 0;
  for (const auto& [name, original] : corpus()) {
    for (int i = 0; i < num_tries; ++i) {
      Input input = original;
      for (auto n = 1 + random() % 3; n > 0 && input.size() > 1; --n) mutate(input, random);
      input[0] = static_cast<std::uint8_t>(i % 4 != 0);
      bool was_read = false;
      ASSERT_NO_THROW(was_read = run_row_file(input.data(), input.size())) << name << " " << i;
      num_read += static_cast<int>(was_read);
    }
  }
  EXPECT_GT(num_read, 0);  // damage to keys and weights, with right checksums, can be read
}

}  // namespace
}  // namespace recsdk::test::row_file_corpus_test
