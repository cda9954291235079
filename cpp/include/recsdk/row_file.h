// Row files: rows with their optimizer state, and keys that left, in blocks with checksums. A
// checkpoint has one per shard of a table; docs/reference/checkpoint.md has every byte.
//
// Shape letters: N rows of a call or block, C elements of a field.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "recsdk/error.h"
#include "recsdk/export.h"
#include "recsdk/leavers.h"
#include "recsdk/types.h"

namespace recsdk {

/// The version that is written; readers refuse any other.
inline constexpr std::uint32_t kRowFileVersion = 1;
/// A block, with its head and the whole pages of the file around both, fits into two huge pages.
inline constexpr std::int64_t kDefaultBlockBytes =
    (std::int64_t{4} << 20) - (std::int64_t{16} << 10);
/// The most that a block holds; readers refuse more before they allocate.
inline constexpr std::int64_t kMaxBlockBytes = std::int64_t{64} << 20;
/// The most that a writer puts in a block, so that its memory stays below 64 MiB.
inline constexpr std::int64_t kMaxWrittenBlockBytes = std::int64_t{12} << 20;

/// Type of a field's elements. The numbers are part of the format.
enum class FieldType : std::uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kInt32 = 6,
  kUint32 = 7,
  kUint8 = 8,
};

/// Bytes of one element.
RECSDK_API std::int64_t size_of(FieldType type);
/// "float32", "bfloat16", ...
RECSDK_API const char* name_of(FieldType type);

/// One field of every row of a file.
struct FileField {
  std::string name;    ///< 1 to 47 printable ASCII characters without spaces, unique
  FieldType type;      ///< of its elements
  std::int64_t count;  ///< C >= 1, elements a row
  std::int64_t row_bytes() const { return count * size_of(type); }
  bool operator==(const FileField&) const = default;
};

enum class RowFileKind : std::uint8_t {
  kSnapshot = 0,  ///< all rows
  kDelta = 1,     ///< rows changed since another save, and keys that left
};

/// The header of a file.
struct RECSDK_API RowFileHeader {
  RowFileKind kind = RowFileKind::kSnapshot;
  std::int64_t dim = 0;                     ///< D, elements of "weight"
  std::array<std::uint8_t, 16> token = {};  ///< equal in all files of one checkpoint
  std::vector<FileField> fields;            ///< 1 to 32; the first is "weight"

  /// Bytes of a row in a block: its key and fields.
  std::int64_t row_bytes() const;
  /// Throws std::invalid_argument naming what is wrong.
  void validate() const;
};

enum class Codec : std::uint8_t {
  kNone = 0,
  kZstd = 1,  ///< where this build has it, see has_codec
};

/// True if this build can write and read the codec.
RECSDK_API bool has_codec(Codec codec);

/// Totals of a whole file.
struct RowFileSummary {
  std::int64_t num_rows = 0;
  std::int64_t num_erased = 0;   ///< keys that left, for whatever cause
  std::int64_t num_evicted = 0;  ///< those of them that were evicted,
  std::int64_t num_expired = 0;  ///< or had expired
  std::int64_t num_bytes = 0;
  std::string checksum;  ///< XXH3-128 of all bytes, 32 hexadecimal digits, most significant first
  /// Of a writer with RowFileOptions::sums_content, else absent: equal for equal rows and keys that
  /// left, in any order. The sum of XXH3-64 of each, modulo 2**64.
  std::optional<std::uint64_t> content;
};

/// Where bytes go. Each call either takes all or throws.
class RECSDK_API ByteSink {
 public:
  ByteSink() = default;
  ByteSink(const ByteSink&) = delete;
  ByteSink& operator=(const ByteSink&) = delete;
  virtual ~ByteSink();
  virtual void write(std::span<const std::byte> bytes) = 0;
  /// Called after the last write: writes out what is still held back, or throws.
  virtual void finish() {}
};

/// Where bytes come from.
class RECSDK_API ByteSource {
 public:
  ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  virtual ~ByteSource();
  /// Fills the front of `bytes` from `offset` on; returns how many, 0 only at the end.
  virtual std::size_t read(std::int64_t offset, std::span<std::byte> bytes) = 0;
  /// Bytes [offset, offset + size), if they lie in memory already, which stays while somebody holds
  /// the pointer. Null, the default: not in memory, so read is called.
  virtual std::shared_ptr<const std::byte[]> take(std::int64_t offset, std::size_t size);
};

/// Writes to a file descriptor, which stays the caller's. Short writes and interruptions are
/// handled; throws Error(kCheckpoint) with the system's reason, such as a full disk. What follows
/// the first 8 MiB goes to the disk past the page cache, where the file system can do that and
/// RECSDK_DIRECT_IO is not 0. It is collected in 2 MiB of memory; finish() writes the rest.
class RECSDK_API FileSink final : public ByteSink {
 public:
  FileSink(int descriptor, std::string name);
  ~FileSink() override;
  void write(std::span<const std::byte> bytes) override;
  void finish() override;

 private:
  struct Direct;
  std::span<const std::byte> begin_direct(std::span<const std::byte> bytes);

  int descriptor_;
  std::string name_;
  std::int64_t num_bytes_ = 0;
  bool may_be_direct_ = true;
  std::unique_ptr<Direct> direct_;
};

/// Reads from a file descriptor, which stays the caller's; its position is not used. It suits
/// reading from front to back: it fetches ahead. Threads of its own read files of 8 MiB and more
/// past the page cache, some blocks ahead, if the page cache does not have them, the file system
/// can do that, and RECSDK_DIRECT_IO is not 0.
class RECSDK_API FileSource final : public ByteSource {
 public:
  FileSource(int descriptor, std::string name);
  ~FileSource() override;
  std::size_t read(std::int64_t offset, std::span<std::byte> bytes) override;
  std::shared_ptr<const std::byte[]> take(std::int64_t offset, std::size_t size) override;

 private:
  struct Ahead;
  void begin(std::int64_t offset);
  void fetch_ahead(std::int64_t offset) noexcept;

  int descriptor_;
  std::string name_;
  std::int64_t fetched_ = 0;  // where what the system was asked for ends
  bool is_begun_ = false;
  std::unique_ptr<Ahead> ahead_;
};

struct RowFileOptions {
  Codec codec = Codec::kNone;
  std::int64_t block_bytes = kDefaultBlockBytes;  ///< raw, 4 KiB to kMaxWrittenBlockBytes
  /// Calls the sink from a thread of its own, while the next block is made.
  bool in_background = true;
  bool sums_content = false;  ///< for RowFileSummary::content; it takes one more pass over the rows
};

/// Writes one file: rows, then erased keys, then finish. The bytes depend on header, content and
/// options only, not on how the content is spread over calls. Holds up to five blocks in memory.
/// Not thread-safe. After it threw, a writer can only be destroyed: the file is not whole. The same
/// holds, in a child of fork, for a writer that was made before.
class RECSDK_API RowFileWriter {
 public:
  /// Throws std::invalid_argument for a bad header or option, and what the sink throws.
  RowFileWriter(ByteSink& sink, const RowFileHeader& header, const RowFileOptions& options = {});
  ~RowFileWriter();
  RowFileWriter(RowFileWriter&&) noexcept;
  RowFileWriter& operator=(RowFileWriter&&) noexcept;

  /// Adds rows of keys (N,); fields[f] points to (N, C) elements of field f.
  void write_rows(std::span<const Key> keys, std::span<const void* const> fields);
  /// Adds keys (N,) that left, in ascending order of causes. Throws std::invalid_argument in a
  /// snapshot, and after keys of a higher cause.
  void write_erased(std::span<const Key> keys, LeaveCause cause = LeaveCause::kErased);
  /// Writes the end. It does not fsync; the caller does.
  RowFileSummary finish();
  /// Bytes handed to the sink so far.
  std::int64_t num_bytes() const;

  struct Impl;

 private:
  friend struct RowFileAccess;
  std::unique_ptr<Impl> impl_;
};

enum class BlockKind : std::uint8_t {
  kRows = 1,
  kErased = 2,
};

/// One block of a file; lives on its own.
struct RECSDK_API RowBlock {
  BlockKind kind = BlockKind::kRows;
  LeaveCause cause = LeaveCause::kEvicted;    ///< of erased keys: why they left
  std::span<const Key> keys;                  ///< (N,) of rows or erased keys
  std::vector<const std::byte*> fields;       ///< of rows: (N, C) elements of each field, packed
  std::shared_ptr<const std::byte[]> memory;  ///< what all of this lies in
};

struct ReadOptions {
  /// Limits, for example from a manifest that lists the file: a block that exceeds them is refused
  /// before memory is taken for it. Absent: any number.
  std::optional<std::int64_t> max_rows = std::nullopt;
  std::optional<std::int64_t> max_erased = std::nullopt;
  /// Reads and checks the next block in a thread of its own, while this one is used.
  bool in_background = true;
};

/// Reads one file from its start to its end, and trusts nothing: it checks every size against
/// `size` and the limits before it takes memory for it, and every checksum before it uses the
/// bytes. Errors are Error(kCheckpoint) with the file's name, the offset and the reason. Not
/// thread-safe. In a child of fork, a reader that has read before, in the background, can only be
/// destroyed.
class RECSDK_API RowFileReader {
 public:
  /// Reads the header. `size` is the file's, `name` is for messages.
  RowFileReader(std::shared_ptr<ByteSource> source, std::int64_t size, std::string name,
                const ReadOptions& options = {});
  ~RowFileReader();
  RowFileReader(RowFileReader&&) noexcept;
  RowFileReader& operator=(RowFileReader&&) noexcept;

  const std::string& name() const;
  const RowFileHeader& header() const;
  /// The file's size.
  std::int64_t num_bytes() const;
  /// An estimate of its rows: max_rows of the options, else as many as fit into its size without
  /// compression.
  std::int64_t expected_rows() const;
  /// Reads the next block; false at the end, after checking the totals there.
  bool next(RowBlock& block);
  /// True before the first call of next.
  bool is_at_start() const;
  /// Throws std::invalid_argument before next has returned false.
  const RowFileSummary& summary() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// The virtual shard of a key, 0 to 65535: the low 16 bits of a fixed mix of its 64 bits. Ranks own
/// sets of virtual shards.
/// Source: the finalizer of SplitMix64 with its increment, G. Steele et al., OOPSLA 2014.
RECSDK_API std::uint32_t virtual_shard(Key key);

}  // namespace recsdk
