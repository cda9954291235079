// A file in the folder for tests, which may or may not be able to do without the page cache.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace recsdk::test {

class TemporaryFile {
 public:
  TemporaryFile() : path_(testing::TempDir() + "recsdk_test_XXXXXX") {
    descriptor = mkstemp(path_.data());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    close(descriptor);
    unlink(path_.c_str());
  }

  /// Whether the descriptor goes past the page cache now.
  bool is_direct() const { return (fcntl(descriptor, F_GETFL) & O_DIRECT) != 0; }

  /// Whether its file system can do that, as reading its first page tells.
  bool can_be_direct() const {
    constexpr std::size_t kPage = 4096;
    const int direct = ::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct < 0) return false;
    alignas(kPage) std::byte page[kPage];
    const bool is_read = pread(direct, page, kPage, 0) >= 0;
    close(direct);
    return is_read;
  }

  /// The share of it that the page cache has.
  double cached_share() const {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const auto size = static_cast<std::size_t>(lseek(descriptor, 0, SEEK_END));
    void* const mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    std::vector<unsigned char> pages((size + page - 1) / page);
    const bool is_known = mapping != MAP_FAILED && mincore(mapping, size, pages.data()) == 0;
    if (mapping != MAP_FAILED) munmap(mapping, size);
    if (!is_known) return 1.0;
    const auto count =
        std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1U) != 0; });
    return static_cast<double>(count) / static_cast<double>(pages.size());
  }

  /// All of it, through the page cache.
  std::vector<std::byte> content() const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(lseek(descriptor, 0, SEEK_END)));
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t n =
          pread(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      if (n <= 0) break;
      done += static_cast<std::size_t>(n);
    }
    return bytes;
  }

  void put(const std::vector<std::byte>& bytes) const {
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

}  // namespace recsdk::test
