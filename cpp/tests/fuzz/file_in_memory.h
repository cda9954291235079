// Files that lie nowhere, for fuzzers.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace recsdk::test {

/// A file in memory, by a path that can be opened while it lives.
class FileInMemory {
 public:
  FileInMemory() : file_(memfd_create("recsdk_fuzz", MFD_CLOEXEC)) {
    if (file_ < 0) throw std::runtime_error("no file in memory for a test");
  }
  FileInMemory(FileInMemory&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FileInMemory& operator=(FileInMemory&&) = delete;
  FileInMemory(const FileInMemory&) = delete;
  FileInMemory& operator=(const FileInMemory&) = delete;
  ~FileInMemory() {
    if (file_ >= 0) close(file_);
  }
  int number() const { return file_; }
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace recsdk::test
