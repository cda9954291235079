#include "checkpoint/format.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

#include "io/checksum.h"
#include "io/codec.h"
#include "recsdk/row_layout.h"
#include "util/hash.h"
#include "util/must.h"

namespace recsdk {
namespace {

[[noreturn, gnu::cold]] void reject(const std::string& what) {
  throw std::invalid_argument("row file header: " + what);
}

bool is_name(const std::string& name) {
  const auto is_printable = [](char c) { return c > ' ' && c <= '~'; };
  return !name.empty() && name.size() < internal::kNameBytes &&
         std::all_of(name.begin(), name.end(), is_printable);
}

bool is_type(std::uint32_t type) {
  return type >= static_cast<std::uint32_t>(FieldType::kFloat32) &&
         type <= static_cast<std::uint32_t>(FieldType::kUint8);
}

void check_field(const FileField& field) {
  if (!is_name(field.name))
    reject("a field's name must be 1 to 47 printable ASCII characters without spaces");
  if (!is_type(static_cast<std::uint32_t>(field.type)))
    reject("field '" + field.name + "' has an unknown type");
  if (field.count < 1 || field.count > internal::kMaxCount) {
    reject(internal::must("count of field '" + field.name + "'",
                          "be 1 to " + std::to_string(internal::kMaxCount), field.count));
  }
}

}  // namespace

std::int64_t size_of(FieldType type) {
  switch (type) {
    case FieldType::kInt64:
    case FieldType::kUint64:
      return 8;
    case FieldType::kFloat32:
    case FieldType::kInt32:
    case FieldType::kUint32:
      return 4;
    case FieldType::kFloat16:
    case FieldType::kBfloat16:
      return 2;
    case FieldType::kUint8:
      return 1;
  }
  reject("unknown type of a field");
}

const char* name_of(FieldType type) {
  switch (type) {
    case FieldType::kFloat32:
      return "float32";
    case FieldType::kFloat16:
      return "float16";
    case FieldType::kBfloat16:
      return "bfloat16";
    case FieldType::kInt64:
      return "int64";
    case FieldType::kUint64:
      return "uint64";
    case FieldType::kInt32:
      return "int32";
    case FieldType::kUint32:
      return "uint32";
    case FieldType::kUint8:
      return "uint8";
  }
  reject("unknown type of a field");
}

std::int64_t RowFileHeader::row_bytes() const {
  std::int64_t bytes = sizeof(Key);
  for (const FileField& field : fields) bytes += field.row_bytes();
  return bytes;
}

void RowFileHeader::validate() const {
  if (kind != RowFileKind::kSnapshot && kind != RowFileKind::kDelta)
    reject(internal::must("kind", "be one of RowFileKind", kind));
  if (dim < 1 || dim > kMaxDim)
    reject(internal::must("dim", "be 1 to " + std::to_string(kMaxDim), dim));
  const auto num_fields = static_cast<std::int64_t>(fields.size());
  if (num_fields < 1 || num_fields > internal::kMaxFields)
    reject(internal::must("the number of fields", "be 1 to " + std::to_string(internal::kMaxFields),
                          num_fields));
  std::set<std::string> names;
  for (const FileField& field : fields) {
    check_field(field);
    if (!names.insert(field.name).second) reject("field '" + field.name + "' comes twice");
  }
  if (fields[0].name != "weight" || fields[0].count != dim)
    reject("the first field must be 'weight' with dim elements, " + std::to_string(dim));
  // A writer's block holds at least one row of the largest size.
  if (row_bytes() > kMaxBlockBytes / 2)
    reject("a row of " + std::to_string(row_bytes()) + " bytes is longer than half a block");
}

std::uint32_t virtual_shard(Key key) {
  return static_cast<std::uint32_t>(internal::virtual_shard_hash(static_cast<std::uint64_t>(key)) &
                                    (kNumVirtualShards - 1));
}

namespace internal {
namespace {

constexpr std::array<char, 8> kFileMagic = {'R', 'E', 'C', 'S', 'D', 'K', 'R', 'F'};
constexpr std::array<char, 4> kBlockMagic = {'R', 'F', 'B', 'K'};

template <typename T>
std::span<const std::byte> bytes_before_checksum(const T& head) {
  return std::as_bytes(std::span(&head, 1)).first(sizeof(T) - sizeof(std::uint64_t));
}

FieldEntry entry_of(const FileField& field) {
  FieldEntry entry{};
  std::copy(field.name.begin(), field.name.end(), entry.name.begin());
  entry.type = static_cast<std::uint32_t>(field.type);
  entry.count = static_cast<std::uint64_t>(field.count);
  return entry;
}

FileField field_of(const FieldEntry& entry, const Place& place) {
  const auto end = std::find(entry.name.begin(), entry.name.end(), '\0');
  if (end == entry.name.end() || std::any_of(end, entry.name.end(), [](char c) { return c != 0; }))
    throw_damaged(place, "a field's name does not end in zeros");
  if (!is_type(entry.type)) throw_damaged(place, "a field has an unknown type");
  if (entry.reserved != 0) throw_damaged(place, "reserved bytes of a field are not zero");
  if (entry.count > static_cast<std::uint64_t>(kMaxCount))
    throw_damaged(place, "a field has " + std::to_string(entry.count) + " elements a row");
  return {std::string(entry.name.begin(), end), static_cast<FieldType>(entry.type),
          static_cast<std::int64_t>(entry.count)};
}

// Checks all that the type of a block demands, apart from its sizes.
void check_kind(const BlockHead& head, const RowFileHeader& header, const Place& place) {
  const bool is_erased = head.type == static_cast<std::uint8_t>(BlockKind::kErased);
  const bool is_known = (head.type >= static_cast<std::uint8_t>(BlockKind::kRows) &&
                         head.type <= static_cast<std::uint8_t>(BlockKind::kErased)) ||
                        head.type == kEndBlock;
  if (!is_known) throw_damaged(place, "unknown type of block " + std::to_string(head.type));
  if (head.reserved != 0) throw_damaged(place, "reserved bytes of a block are not zero");
  if (head.cause > (is_erased ? static_cast<std::uint8_t>(LeaveCause::kExpired) : 0))
    throw_damaged(place, "unknown cause of leaving " + std::to_string(head.cause));
  if (is_erased && header.kind == RowFileKind::kSnapshot)
    throw_damaged(place, "a snapshot has erased keys");
}

// The raw bytes that a block of so many rows must have.
std::int64_t expected_bytes(const BlockHead& head, const RowFileHeader& header,
                            const Place& place) {
  if (head.type == kEndBlock) {
    if (head.num_rows != 0) throw_damaged(place, "the end block counts rows");
    return std::int64_t{sizeof(EndPayload)};
  }
  if (head.num_rows == 0) throw_damaged(place, "a block of rows is empty");
  // Bounds the products below: a row has at least the 8 bytes of its key.
  if (head.num_rows > static_cast<std::uint64_t>(kMaxBlockBytes) / sizeof(Key))
    throw_damaged(place, "a block claims " + std::to_string(head.num_rows) + " rows");
  const auto n = static_cast<std::int64_t>(head.num_rows);
  if (head.type == static_cast<std::uint8_t>(BlockKind::kErased))
    return n * static_cast<std::int64_t>(sizeof(Key));
  return rows_payload_bytes(header, n);
}

}  // namespace

std::int64_t rows_payload_bytes(const RowFileHeader& header, std::int64_t n) {
  std::int64_t bytes = n * static_cast<std::int64_t>(sizeof(Key));
  for (const FileField& field : header.fields) bytes += padded(n * field.row_bytes());
  return bytes;
}

std::vector<std::byte> encode(const RowFileHeader& header) {
  header.validate();
  const std::size_t size = sizeof(FileHead) + header.fields.size() * sizeof(FieldEntry) + 8;
  std::vector<std::byte> bytes(size);
  FileHead head{kFileMagic,
                kRowFileVersion,
                static_cast<std::uint32_t>(size),
                static_cast<std::uint32_t>(header.kind),
                static_cast<std::uint32_t>(header.fields.size()),
                static_cast<std::uint64_t>(header.dim),
                header.token};
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::byte* out = bytes.data() + sizeof(head);
  for (const FileField& field : header.fields) {
    const FieldEntry entry = entry_of(field);
    std::memcpy(out, &entry, sizeof(entry));
    out += sizeof(entry);
  }
  const std::uint64_t checksum = checksum64(std::span(bytes).first(size - 8));
  std::memcpy(out, &checksum, sizeof(checksum));
  return bytes;
}

void seal(BlockHead& head) {
  head.magic = kBlockMagic;
  head.checksum = checksum64(bytes_before_checksum(head));
}

void throw_damaged(const Place& place, const std::string& reason) {
  throw Error(ErrorCode::kCheckpoint,
              "'" + place.file + "', byte " + std::to_string(place.offset) + ": " + reason +
                  "; the file is damaged: get it from a copy, or load another checkpoint");
}

void check(const FileHead& head, std::int64_t file_size, const std::string& file) {
  const Place place{file, 0};
  if (head.magic != kFileMagic) throw_damaged(place, "this is no row file (its magic is missing)");
  if (head.version != kRowFileVersion) {
    throw Error(ErrorCode::kCheckpoint,
                "'" + file + "' has version " + std::to_string(head.version) +
                    " of the format, and this library reads version " +
                    std::to_string(kRowFileVersion) + "; install a recsdk that reads it");
  }
  const bool is_sane =
      head.num_fields >= 1 && head.num_fields <= kMaxFields &&
      head.header_bytes == sizeof(FileHead) + head.num_fields * sizeof(FieldEntry) + 8;
  if (!is_sane) throw_damaged({file, 12}, "the sizes of the header disagree");
  if (head.header_bytes > file_size) throw_damaged(place, "the file ends within its header");
}

RowFileHeader decode(std::span<const std::byte> bytes, const std::string& file) {
  const Place place{file, 0};
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + bytes.size() - 8, 8);
  if (checksum != checksum64(bytes.first(bytes.size() - 8)))
    throw_damaged(place, "the checksum of the header differs");
  FileHead head;
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.kind > static_cast<std::uint32_t>(RowFileKind::kDelta))
    throw_damaged(place, "unknown kind " + std::to_string(head.kind));
  if (head.dim > static_cast<std::uint64_t>(kMaxDim))
    throw_damaged(place, "a dim of " + std::to_string(head.dim) + " is out of range");
  RowFileHeader header;
  header.kind = static_cast<RowFileKind>(head.kind);
  header.dim = static_cast<std::int64_t>(head.dim);
  header.token = head.token;
  for (std::uint32_t f = 0; f < head.num_fields; ++f) {
    FieldEntry entry;
    std::memcpy(&entry, bytes.data() + sizeof(head) + f * sizeof(entry), sizeof(entry));
    header.fields.push_back(field_of(entry, place));
  }
  try {
    header.validate();
  } catch (const std::invalid_argument& error) {
    throw_damaged(place, error.what());
  }
  return header;
}

void check(const BlockHead& head, const RowFileHeader& header, std::int64_t left,
           const Place& place) {
  if (head.magic != kBlockMagic) throw_damaged(place, "no block begins here (magic missing)");
  if (head.checksum != checksum64(bytes_before_checksum(head)))
    throw_damaged(place, "the checksum of a block's header differs");
  check_kind(head, header, place);
  if (head.raw_bytes > static_cast<std::uint64_t>(kMaxBlockBytes))
    throw_damaged(place, "a block of " + std::to_string(head.raw_bytes) + " bytes is too large");
  if (head.stored_bytes > static_cast<std::uint64_t>(std::max<std::int64_t>(left, 0)))
    throw_damaged(place, "a block of " + std::to_string(head.stored_bytes) +
                             " bytes goes beyond the end of the file");
  if (static_cast<std::int64_t>(head.raw_bytes) != expected_bytes(head, header, place))
    throw_damaged(place, "the size of a block does not fit its number of rows");
  if (head.codec > static_cast<std::uint8_t>(Codec::kZstd))
    throw_damaged(place, "unknown codec " + std::to_string(head.codec));
  const bool is_plain = head.codec == static_cast<std::uint8_t>(Codec::kNone);
  if (head.type == kEndBlock && !is_plain) throw_damaged(place, "the end block is compressed");
  if (is_plain ? head.stored_bytes != head.raw_bytes : head.stored_bytes >= head.raw_bytes)
    throw_damaged(place, "the stored size of a block does not fit its raw size");
}

}  // namespace internal
}  // namespace recsdk
