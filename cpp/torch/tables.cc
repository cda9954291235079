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

constexpr int kMostReads = 10;

/// Tables of one freeze: that of the path when the first of them was asked for.
struct Group {
  Place place;
  Frozen frozen;
  std::map<std::string, Table> tables;  ///< those that could be opened
};

/// What is known of the tables of this process. It lives as long as the process: operators may run
/// on threads that nobody waits for.
struct Known {
  std::shared_mutex mutex;
  std::map<std::pair<std::string, std::string>, Table> given;  // which are not closed here
  std::map<std::string, Group> opened;                         // by group
  std::map<std::string, Table> by_place;                       // what a place reads
};

Known& known() {
  static Known* const it = new Known;
  return *it;
}

Table open(const std::vector<std::string>& files) {
  std::vector<const char*> names;
  for (const std::string& file : files) names.push_back(file.c_str());
  recsdk_serving_table* table = nullptr;
  check(recsdk_serving_open(names.data(), static_cast<std::int64_t>(names.size()), &table));
  return {table, recsdk_serving_close};
}

bool is_replaced(const Group& group) {
  try {
    return read_frozen(group.place).token != group.frozen.token;
  } catch (const std::runtime_error&) {
    return false;
  }
}

const std::vector<std::string>& files_of(const Group& group, const std::string& name) {
  const auto files = group.frozen.files.find(name);
  if (files != group.frozen.files.end()) return files->second;
  throw std::runtime_error(group.place.path + ": has no table '" + name + "'");
}

/// Opens all other tables of a freeze that can be opened, so that another freeze does not take them
/// away. Throws if that has begun.
void open_others(Group& group) {
  for (const auto& [name, files] : group.frozen.files) {
    if (group.tables.contains(name)) continue;
    try {
      group.tables.emplace(name, open(files));
    } catch (const std::runtime_error&) {
      if (is_replaced(group)) throw;
    }
  }
}

/// Opens the table of a place, and those that were frozen with it; anew if another freeze came
/// meanwhile.
Group open_group(const Place& place) {
  for (int tries = 1;; ++tries) {
    Group group{place, read_frozen(place), {}};
    try {
      group.tables.emplace(place.name, open(files_of(group, place.name)));
      open_others(group);
      return group;
    } catch (const std::runtime_error&) {
      if (tries == kMostReads || !is_replaced(group)) throw;
    }
  }
}

/// Opens a table that could not be opened with the others, if it can be now.
Table open_later(const Group& group, const std::string& name) {
  const std::vector<std::string>& files = files_of(group, name);
  try {
    return open(files);
  } catch (const std::runtime_error&) {
    if (!is_replaced(group)) throw;
  }
  throw std::runtime_error(group.place.path +
                           ": another freeze has replaced the one whose tables are open already, "
                           "so table '" +
                           name + "' of it cannot be opened; open all of them again");
}

/// Finds or opens what a place reads; the lock is held.
Table resolve(Known& all, const std::string& text) {
  const Place place = parse_place(text);
  const auto given = all.given.find({place.path, place.name});
  if (given != all.given.end()) return given->second;
  auto group = all.opened.find(place.group);
  if (group == all.opened.end()) {
    group = all.opened.emplace(place.group, open_group(place)).first;
  }
  std::map<std::string, Table>& tables = group->second.tables;
  const auto table = tables.find(place.name);
  if (table != tables.end()) return table->second;
  return tables.emplace(place.name, open_later(group->second, place.name)).first->second;
}

Table find(const std::string& place) {
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

Table table_of(const std::string& place, std::int64_t dim) {
  Table table = find(place);
  const recsdk_serving_info info = info_of(table.get());
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
      all.given[{path, name}] = {table, [](const recsdk_serving_table*) {}};
    }
    all.by_place.clear();  // to be found anew
  } catch (const std::bad_alloc&) {
    return RECSDK_SERVING_ERROR_OUT_OF_MEMORY;
  }
  return RECSDK_SERVING_OK;
}

extern "C" int recsdk_serving_torch_close(const char* path) {
  using recsdk::serving_torch::known;
  if (path == nullptr) return RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
  auto& all = known();
  const std::unique_lock lock(all.mutex);
  all.by_place.clear();
  std::erase_if(all.opened, [path](const auto& each) { return each.second.place.path == path; });
  return RECSDK_SERVING_OK;
}
