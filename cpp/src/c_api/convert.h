// Converts C structs to the C++ interface, with every check that C needs and C++ does not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "recsdk/c_api.h"
#include "recsdk/table.h"

struct recsdk_table {
  recsdk::Table table;
};

struct recsdk_lease {
  recsdk::Lease lease;
};

namespace recsdk::c_api {

[[noreturn]] void reject_null(const char* name);
[[noreturn]] void reject_count(const char* name, std::int64_t count);
[[noreturn]] void reject_struct_size(const char* type, std::size_t got, std::size_t known);
[[noreturn]] void reject_value(const char* name, std::int64_t value, const char* allowed);

/// *pointer, which must not be null.
template <typename T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) reject_null(name);
  return *pointer;
}

/// A C++ array as a span; null only if empty.
template <typename T>
std::span<T> array(T* data, std::int64_t count, const char* name) {
  if (count < 0) reject_count(name, count);
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

/// *pointer, whose struct_size must be one that this library knows.
template <typename T>
T& sized(T* pointer, const char* type) {
  T& value = deref(pointer, type);
  if (value.struct_size != sizeof(T)) reject_struct_size(type, value.struct_size, sizeof(T));
  return value;
}

inline const Lease* lease_of(const recsdk_lease* lease) {
  return lease == nullptr ? nullptr : &lease->lease;
}

OptimizerConfig optimizer_defaults(std::int32_t kind);
TableConfig table_config(const recsdk_table_config& config);

MapCall map_call(const recsdk_map_call& call);
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
