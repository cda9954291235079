#include "freeze/spill.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "recsdk/error.h"

namespace recsdk::internal {
namespace {

constexpr std::size_t kMostChunkBytes = std::size_t{1} << 16;

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCheckpoint,
              name + ": " + what + " failed: " + std::generic_category().message(errno));
}

int open_nameless(const std::string& folder) {
  // Not every file system has such files; a process that is killed leaves nothing of them.
  const int unnamed = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (unnamed >= 0) return unnamed;
  std::string path = folder + "/.recsdk-freeze-XXXXXX";
  const int descriptor = mkostemp(path.data(), O_CLOEXEC);
  if (descriptor < 0) refuse(folder, "making a scratch file in it");
  unlink(path.c_str());
  return descriptor;
}

}  // namespace

void write_at(int descriptor, std::int64_t offset, std::span<const std::byte> bytes,
              const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t n = pwrite(descriptor, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) refuse(name, "writing");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

void read_at(int descriptor, std::int64_t offset, std::span<std::byte> bytes,
             const std::string& name) {
  while (!bytes.empty()) {
    const ssize_t n = pread(descriptor, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) refuse(name, "reading");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

Spill::Spill(const std::string& folder, std::int64_t num_parts, std::int64_t record_bytes,
             std::int64_t max_bytes)
    : name_("a scratch file in " + folder), record_bytes_(static_cast<std::size_t>(record_bytes)) {
  const auto share = static_cast<std::size_t>(max_bytes / num_parts);
  const std::size_t wanted = std::min(share, kMostChunkBytes);
  chunk_bytes_ = std::max<std::size_t>(wanted / record_bytes_, 1) * record_bytes_;
  parts_.resize(static_cast<std::size_t>(num_parts));
  descriptor_ = open_nameless(folder);
}

Spill::~Spill() { close(descriptor_); }

std::byte* Spill::next(std::int64_t number) {
  Part& part = parts_[index(number)];
  if (part.buffer.empty()) part.buffer.resize(chunk_bytes_);
  if (part.used == chunk_bytes_) write_out(part);
  std::byte* const place = part.buffer.data() + part.used;
  part.used += record_bytes_;
  ++part.num_records;
  return place;
}

void Spill::write_out(Part& part) {
  part.chunks.push_back(end_);
  write_at(descriptor_, end_, part.buffer, name_);
  end_ += static_cast<std::int64_t>(chunk_bytes_);
  part.used = 0;
}

std::vector<std::byte> Spill::read(std::int64_t number) const {
  const Part& part = parts_[index(number)];
  std::vector<std::byte> records(part.chunks.size() * chunk_bytes_ + part.used);
  std::span<std::byte> rest(records);
  for (const std::int64_t offset : part.chunks) {
    read_at(descriptor_, offset, rest.first(chunk_bytes_), name_);
    rest = rest.subspan(chunk_bytes_);
  }
  std::copy_n(part.buffer.begin(), part.used, rest.begin());
  return records;
}

}  // namespace recsdk::internal
