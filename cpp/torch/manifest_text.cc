#include "manifest_text.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>

namespace recsdk::serving_torch {
namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

/// Opened to be read without waiting, as for who writes to a pipe; null if it cannot be.
File opened(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  File file(fdopen(descriptor, "rb"));
  if (!file) close(descriptor);
  return file;
}

}  // namespace

std::string manifest_text(const std::string& path) {
  const auto refuse = [&] {
    throw std::runtime_error(path + ": cannot be read; is it a frozen checkpoint?");
  };
  // What was opened is looked at, not the path: something else may lie there by then.
  const File file = opened(path);
  struct stat status = {};
  if (!file || fstat(fileno(file.get()), &status) != 0 || !S_ISREG(status.st_mode)) refuse();
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > kMostManifestBytes)
    throw std::runtime_error(path + ": has " + std::to_string(size) +
                             " bytes, more than a manifest may");
  std::string text(size, '\0');
  text.resize(std::fread(text.data(), 1, size, file.get()));
  if (std::ferror(file.get()) != 0) refuse();
  return text;
}

}  // namespace recsdk::serving_torch
