// The C interface of serving: exceptions end here and become a status and a message.
#include "recsdk/serving/c_api.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "recsdk/serving/serving_table.h"
#include "util/last_message.h"
#include "util/must.h"

struct recsdk_serving_table {
  recsdk::ServingTable table;
};

struct recsdk_serving_delta {
  recsdk::ServingDelta delta;
};

namespace recsdk {
namespace {

thread_local internal::LastMessage last_message;

int fail(int status, const char* message) noexcept {
  last_message.set(message);
  return status;
}

template <typename Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return RECSDK_SERVING_OK;
  } catch (const Error& error) {
    return fail(error.code() == ErrorCode::kCheckpoint ? RECSDK_SERVING_ERROR_FILE
                                                       : RECSDK_SERVING_ERROR_INTERNAL,
                error.what());
  } catch (const std::invalid_argument& error) {
    return fail(RECSDK_SERVING_ERROR_INVALID_ARGUMENT, error.what());
  } catch (const std::bad_alloc&) {
    return fail(RECSDK_SERVING_ERROR_OUT_OF_MEMORY, "out of memory; free some");
  } catch (const std::exception& error) {
    return fail(RECSDK_SERVING_ERROR_INTERNAL, error.what());
  } catch (...) {
    return fail(RECSDK_SERVING_ERROR_INTERNAL, "something was thrown that is no std::exception");
  }
}

template <typename T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(name) + " must not be null");
  return *pointer;
}

/// Throws std::invalid_argument for a number that no array of items of this size has.
void check_count(const char* name, std::int64_t count, std::size_t item_bytes) {
  const std::int64_t most = PTRDIFF_MAX / static_cast<std::int64_t>(item_bytes);
  if (count >= 0 && count <= most) return;
  const std::string what =
      count < 0 ? "not be negative" : "be that of an array, at most " + std::to_string(most);
  throw std::invalid_argument(internal::must("the number of " + std::string(name), what, count));
}

template <typename T>
std::span<T> array(T* data, std::int64_t count, const char* name) {
  check_count(name, count, sizeof(T));
  if (count > 0) deref(data, name);
  return {data, static_cast<std::size_t>(count)};
}

std::span<Outcome> outcomes_of(std::uint8_t* data, std::int64_t count) {
  if (data == nullptr) return {};
  return {reinterpret_cast<Outcome*>(data), static_cast<std::size_t>(count)};
}

Pooling pooling_of(std::int32_t value) {
  if (value != RECSDK_SERVING_SUM && value != RECSDK_SERVING_MEAN) {
    throw std::invalid_argument(
        internal::must("pooling", "be RECSDK_SERVING_SUM or RECSDK_SERVING_MEAN", value));
  }
  return static_cast<Pooling>(value);
}

ServingBags bags_of(const recsdk_serving_call& call) {
  ServingBags bags;
  bags.keys = array(call.keys, call.num_keys, "keys");
  if (call.offsets != nullptr) {
    check_count("bags", call.num_bags, sizeof(std::int64_t));
    bags.offsets = {call.offsets, static_cast<std::size_t>(call.num_bags) + 1};
  } else if (call.num_bags != call.num_keys) {
    throw std::invalid_argument(internal::must(
        "num_bags", "be num_keys, " + std::to_string(call.num_keys) + ", without offsets",
        call.num_bags));
  }
  if (call.weights != nullptr) bags.weights = array(call.weights, call.num_keys, "weights");
  bags.pooling = pooling_of(call.pooling);
  if (call.reserved != 0) {
    throw std::invalid_argument(
        internal::must("recsdk_serving_call.reserved", "be 0", call.reserved));
  }
  return bags;
}

ServingCall call_of(const recsdk_serving_call& call) {
  ServingCall made;
  made.table = &deref(call.table, "table").table;
  made.block.bags = bags_of(call);
  if (made.block.bags.num_bags() > 0) deref(call.out, "out");
  made.block.out = call.out;
  made.block.stride = call.stride;
  made.block.outcomes = outcomes_of(call.outcomes, call.num_keys);
  return made;
}

recsdk_serving_info info_of(const ServingTable& table) {
  const FrozenInfo& info = table.info();
  return {sizeof(recsdk_serving_info),
          info.name.c_str(),
          info.dim,
          table.size(),
          info.row_bytes,
          info.num_bytes,
          info.num_shards,
          static_cast<std::int32_t>(info.dtype),
          info.default_value,
          table.is_whole() ? 1 : 0,
          0,
          table.num_deltas(),
          table.delta_bytes(),
          info.num_shared};
}

}  // namespace
}  // namespace recsdk

uint32_t recsdk_serving_abi_version(void) { return RECSDK_SERVING_ABI_VERSION; }

const char* recsdk_serving_last_error_message(void) { return recsdk::last_message.text(); }

int recsdk_serving_open(const char* const* files, int64_t num_files, recsdk_serving_table** table) {
  return recsdk::guarded([&] {
    recsdk::deref(table, "table");
    std::vector<std::string> paths;
    for (const char* const file : recsdk::array(files, num_files, "files"))
      paths.emplace_back(&recsdk::deref(file, "a file"));
    *table = new recsdk_serving_table{recsdk::ServingTable(paths)};
  });
}

void recsdk_serving_close(recsdk_serving_table* table) { delete table; }

int recsdk_serving_get_info(const recsdk_serving_table* table, recsdk_serving_info* info) {
  return recsdk::guarded([&] {
    const std::size_t size = recsdk::deref(info, "info").struct_size;
    if (size <= sizeof(size) || size > sizeof(*info) || size % alignof(recsdk_serving_info) != 0) {
      throw std::invalid_argument(
          recsdk::internal::must("recsdk_serving_info.struct_size",
                                 "be sizeof the struct, of which this library knows up to " +
                                     std::to_string(sizeof(*info)),
                                 size));
    }
    recsdk_serving_info known = recsdk::info_of(recsdk::deref(table, "table").table);
    known.struct_size = size;
    std::memcpy(info, &known, size);
  });
}

int recsdk_serving_verify(const recsdk_serving_table* table) {
  return recsdk::guarded([&] { recsdk::deref(table, "table").table.verify(); });
}

int recsdk_serving_preload(const recsdk_serving_table* table) {
  return recsdk::guarded([&] { recsdk::deref(table, "table").table.preload(); });
}

int recsdk_serving_lookup(const recsdk_serving_table* table, const int64_t* keys, int64_t num_keys,
                          float* values, uint8_t* outcomes) {
  return recsdk::guarded([&] {
    const recsdk::ServingTable& found = recsdk::deref(table, "table").table;
    if (num_keys > 0) recsdk::deref(values, "values");
    found.lookup(recsdk::array(keys, num_keys, "keys"), values,
                 recsdk::outcomes_of(outcomes, num_keys));
  });
}

int recsdk_serving_pool(const recsdk_serving_call* calls, int64_t num_calls) {
  return recsdk::guarded([&] {
    std::vector<recsdk::ServingCall> made;
    for (const recsdk_serving_call& call : recsdk::array(calls, num_calls, "calls"))
      made.push_back(recsdk::call_of(call));
    recsdk::pool_serving(made);
  });
}

int recsdk_serving_delta_create(const recsdk_serving_table* table, recsdk_serving_delta** delta) {
  return recsdk::guarded([&] {
    const recsdk::ServingTable& of = recsdk::deref(table, "table").table;
    recsdk::deref(delta, "delta");
    *delta = new recsdk_serving_delta{recsdk::ServingDelta(of)};
  });
}

void recsdk_serving_delta_destroy(recsdk_serving_delta* delta) { delete delta; }

int recsdk_serving_delta_add(recsdk_serving_delta* delta, const int64_t* keys, int64_t num_keys,
                             const float* weights) {
  return recsdk::guarded([&] {
    if (num_keys > 0) recsdk::deref(weights, "weights");
    recsdk::deref(delta, "delta").delta.add(recsdk::array(keys, num_keys, "keys"), weights);
  });
}

int recsdk_serving_delta_add_shared(recsdk_serving_delta* delta, const int64_t* keys,
                                    int64_t num_keys, const float* weights) {
  return recsdk::guarded([&] {
    if (num_keys > 0) recsdk::deref(weights, "weights");
    recsdk::deref(delta, "delta").delta.add_shared(recsdk::array(keys, num_keys, "keys"), weights);
  });
}

int recsdk_serving_delta_erase(recsdk_serving_delta* delta, const int64_t* keys, int64_t num_keys) {
  return recsdk::guarded(
      [&] { recsdk::deref(delta, "delta").delta.erase(recsdk::array(keys, num_keys, "keys")); });
}

int recsdk_serving_take(recsdk_serving_table* table, const recsdk_serving_delta* delta) {
  return recsdk::guarded(
      [&] { recsdk::deref(table, "table").table.take(recsdk::deref(delta, "delta").delta); });
}

int recsdk_serving_shard(int64_t key, int64_t num_shards, int64_t* shard) {
  return recsdk::guarded(
      [&] { recsdk::deref(shard, "shard") = recsdk::serving_shard(key, num_shards); });
}
