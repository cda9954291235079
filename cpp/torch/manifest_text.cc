#include "manifest_text.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

namespace recsdk::serving_torch {
namespace {

/// Closed at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }

 private:
  int number_;
};

/// As many bytes as are there, `most` at most; none at all if they cannot be read.
std::optional<std::string> read_bytes(int descriptor, std::size_t most) {
  std::string text(most, '\0');
  std::size_t done = 0;
  while (done < most) {
    const ssize_t count = read(descriptor, text.data() + done, most - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    if (count == 0) break;
    done += static_cast<std::size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace

std::string manifest_text(const std::string& path) {
  // What was opened is looked at, not the path: something else may lie there by then.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status = {};
  std::optional<std::string> text;
  if (file.get() >= 0 && fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode)) {
    const auto size = static_cast<std::uintmax_t>(status.st_size);
    if (size > kMostManifestBytes)
      throw std::runtime_error(path + ": has " + std::to_string(size) +
                               " bytes, more than a manifest may");
    text = read_bytes(file.get(), size);
  }
  if (!text) throw std::runtime_error(path + ": cannot be read; is it a frozen checkpoint?");
  return *std::move(text);
}

}  // namespace recsdk::serving_torch
