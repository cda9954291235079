#include "tables.h"

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "frozen_place.h"
#include "recsdk/serving/torch.h"

namespace recsdk::serving_torch {
namespace {

struct Closing {
  void operator()(recsdk_serving_table* table) const { recsdk_serving_close(table); }
};
using Owned = std::unique_ptr<recsdk_serving_table, Closing>;
using Tables = std::map<std::string, Owned>;

constexpr int kMostReads = 10;

/// What is known of the tables of this process. It lives as long as the process: operators may run
/// on threads that nobody waits for.
struct Known {
  std::shared_mutex mutex;
  std::map<std::pair<std::string, std::string>, const recsdk_serving_table*> given;
  std::map<std::string, Tables> opened;                         // by group, then by name
  std::map<std::string, const recsdk_serving_table*> by_place;  // what a place reads
};

Known& known() {
  static Known* const it = new Known;
  return *it;
}

Owned open(const std::vector<std::string>& files) {
  std::vector<const char*> names;
  for (const std::string& file : files) names.push_back(file.c_str());
  recsdk_serving_table* table = nullptr;
  check(recsdk_serving_open(names.data(), static_cast<std::int64_t>(names.size()), &table));
  return Owned(table);
}

/// Opens all tables of a freeze, so that they are of one; anew if another came meanwhile.
Tables open_all(const Place& place) {
  for (int tries = 1;; ++tries) {
    const Frozen frozen = read_frozen(place);
    try {
      Tables opened;
      for (const auto& [name, files] : frozen.files) opened.emplace(name, open(files));
      return opened;
    } catch (const std::runtime_error&) {
      if (tries == kMostReads || read_frozen(place).token == frozen.token) throw;
    }
  }
}

/// Finds or opens what a place reads; the lock is held.
const recsdk_serving_table* resolve(Known& all, const std::string& text) {
  const Place place = parse_place(text);
  const auto given = all.given.find({place.path, place.name});
  if (given != all.given.end()) return given->second;
  auto group = all.opened.find(place.group);
  if (group == all.opened.end()) {
    group = all.opened.emplace(place.group, open_all(place)).first;
  }
  const auto found = group->second.find(place.name);
  if (found == group->second.end()) {
    throw std::runtime_error(place.path + ": has no table '" + place.name + "'");
  }
  return found->second.get();
}

const recsdk_serving_table* find(const std::string& place) {
  Known& all = known();
  {
    const std::shared_lock lock(all.mutex);
    const auto found = all.by_place.find(place);
    if (found != all.by_place.end()) return found->second;
  }
  const std::unique_lock lock(all.mutex);
  return all.by_place[place] = resolve(all, place);
}

recsdk_serving_info info_of(const recsdk_serving_table* table) {
  recsdk_serving_info info{};
  info.struct_size = sizeof(info);
  check(recsdk_serving_get_info(table, &info));
  return info;
}

}  // namespace

void check(int status) {
  if (status != RECSDK_SERVING_OK) throw std::runtime_error(recsdk_serving_last_error_message());
}

const recsdk_serving_table* table_of(const std::string& place, std::int64_t dim) {
  const recsdk_serving_table* const table = find(place);
  const recsdk_serving_info info = info_of(table);
  if (info.dim != dim) {
    throw std::runtime_error("table '" + std::string(info.name) + "' has width " +
                             std::to_string(info.dim) + ", and the program was exported for " +
                             std::to_string(dim) + "; export it again");
  }
  return table;
}

}  // namespace recsdk::serving_torch

extern "C" int recsdk_serving_torch_use(const char* path, const char* name,
                                        const recsdk_serving_table* table) {
  using recsdk::serving_torch::known;
  if (path == nullptr || name == nullptr) return RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
  try {
    auto& all = known();
    const std::unique_lock lock(all.mutex);
    if (table == nullptr) {
      all.given.erase({path, name});
    } else {
      all.given[{path, name}] = table;
    }
    all.by_place.clear();  // to be found anew
  } catch (const std::bad_alloc&) {
    return RECSDK_SERVING_ERROR_OUT_OF_MEMORY;
  }
  return RECSDK_SERVING_OK;
}
