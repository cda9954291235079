// Converts C structs to the C++ interface, with every check that C needs and C++ does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recsdk/c_api.h"
#include "recsdk/leavers.h"
#include "recsdk/table.h"

struct recsdk_table {
  recsdk::Table table;
};

struct recsdk_index {
  recsdk::Index index;
};

struct recsdk_lease {
  recsdk::Lease lease;
};

namespace recsdk::c_api {

// Throw std::invalid_argument, saying which argument or field is wrong and what it may be.
[[noreturn]] void reject_null(const char* name);
[[noreturn]] void reject_count(const char* name, std::int64_t count, std::int64_t most);
[[noreturn]] void reject_struct_size(const char* type, std::size_t got, std::size_t known);
[[noreturn]] void reject_value(const char* name, std::int64_t value, const char* allowed);

/// An enum of a C field, which must lie between 0 and `last`.
template <typename Enum>
Enum checked_enum(std::int32_t value, Enum last, const char* name) {
  const std::int32_t largest = static_cast<std::int32_t>(last);
  if (value < 0 || value > largest) {
    reject_value(name, value, ("0 to " + std::to_string(largest)).c_str());
  }
  return static_cast<Enum>(value);
}

/// Throws std::invalid_argument unless a reserved field is 0.
inline void check_reserved(std::int32_t reserved, const char* name) {
  if (reserved != 0) reject_value(name, reserved, "0");
}

/// Throws std::invalid_argument for a length that no array of items of this size has.
inline void check_count(const char* name, std::int64_t count, std::size_t item_bytes) {
  const std::int64_t most = PTRDIFF_MAX / static_cast<std::int64_t>(item_bytes);
  if (count < 0 || count > most) reject_count(name, count, most);
}

/// *pointer, which must not be null.
template <typename T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) reject_null(name);
  return *pointer;
}

inline Table& table_of(recsdk_table* table) { return deref(table, "table").table; }
inline const Table& table_of(const recsdk_table* table) { return deref(table, "table").table; }
inline Index& index_of(recsdk_index* index) { return deref(index, "index").index; }
inline const Index& index_of(const recsdk_index* index) { return deref(index, "index").index; }

/// A C++ array as a span; null only if empty.
template <typename T>
std::span<T> array(T* data, std::int64_t count, const char* name) {
  check_count(name, count, sizeof(T));
  if (data == nullptr && count > 0) reject_null(name);
  return {data, static_cast<std::size_t>(count)};
}

/// The same for an array that may be absent: null gives an empty span.
template <typename T>
std::span<T> optional_array(T* data, std::int64_t count, const char* name) {
  return data == nullptr ? std::span<T>() : array(data, count, name);
}

// uint8_t is a character type, and Outcome is made of it.
inline std::span<Outcome> outcomes_of(std::span<std::uint8_t> bytes) {
  return {reinterpret_cast<Outcome*>(bytes.data()), bytes.size()};
}
inline std::span<const Outcome> outcomes_of(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const Outcome*>(bytes.data()), bytes.size()};
}

/// How many bytes of *pointer the caller's header knows. Structs grow at their end, so an older one
/// knows fewer than this library.
template <typename T>
std::size_t struct_size(const T* pointer, const char* type) {
  const std::size_t size = deref(pointer, type).struct_size;
  if (size <= sizeof(size) || size > sizeof(T) || size % alignof(T) != 0)
    reject_struct_size(type, size, sizeof(T));
  return size;
}

/// *from; fields that the caller's header does not know are those of `defaults`.
template <typename T>
T read_struct(const T* from, const T& defaults, const char* type) {
  T value = defaults;
  std::memcpy(&value, from, struct_size(from, type));
  return value;
}

/// Gives *to the fields of `value` that the caller's header knows; its struct_size stays.
template <typename T>
void write_struct(T* to, T value, const char* type) {
  value.struct_size = struct_size(to, type);
  std::memcpy(to, &value, value.struct_size);
}

inline const Lease* lease_of(const recsdk_lease* lease) {
  return lease == nullptr ? nullptr : &lease->lease;
}

/// Gives *lease a lease of a table or an index.
template <typename Keyed>
void take_lease(Keyed& from, int has_step, std::int64_t step, recsdk_lease** lease) {
  deref(lease, "lease");
  auto taken = std::make_unique<recsdk_lease>();
  taken->lease = from.lease(has_step != 0 ? std::optional(step) : std::nullopt);
  *lease = taken.release();
}

recsdk_optimizer_config optimizer_defaults(std::int32_t kind);
recsdk_initializer_config initializer_defaults();
recsdk_table_config table_defaults();
recsdk_index_config index_defaults();
recsdk_default_config default_row_defaults();
recsdk_evict_config evict_defaults();
recsdk_admit_config admit_defaults();
recsdk_leavers_options leavers_defaults();
InitializerConfig initializer_config(const recsdk_initializer_config* given, std::int64_t dim);
TableConfig table_config(const recsdk_table_config* config);
IndexConfig index_config(const recsdk_index_config& config);
/// Null: zeros.
DefaultConfig default_config(const recsdk_default_config* config);
/// Null: none.
std::optional<EvictConfig> evict_config(const recsdk_evict_config* config);
/// Null: none.
std::optional<AdmitConfig> admit_config(const recsdk_admit_config* config);
recsdk_clock clock_of(const EvictionState& state);
EvictionState eviction_state(const recsdk_clock* clock);
/// Null: the defaults.
LeaversOptions leavers_options(const recsdk_leavers_options* options);
/// Null: nothing.
KeyData key_data(const recsdk_key_data* data, std::int64_t num_keys);
recsdk_stats stats_of(const TableStats& stats);

MapCall map_call(const recsdk_map_call& call);
IndexMapCall index_map_call(const recsdk_index_map_call& call);
PoolBlock pool_block(const recsdk_pool_block& block);
GradBlock grad_block(const recsdk_grad_block& block);

/// convert(c) of each element of a C array.
template <typename C, typename Convert>
auto convert_all(const C* data, std::int64_t count, const char* name, Convert convert) {
  const std::span<const C> calls = array(data, count, name);
  std::vector<decltype(convert(*data))> converted;
  converted.reserve(calls.size());
  for (const C& call : calls) converted.push_back(convert(call));
  return converted;
}

}  // namespace recsdk::c_api
